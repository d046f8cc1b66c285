"""One optimizer step and one evaluation step, as pure functions of plain trees."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from flax import nnx
from jax.sharding import Mesh

from jaxlm.models import expert_parallel, kernels
from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import Dropout
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.masks import OneDocumentMask
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.rows import Auxiliary
from jaxlm.models.tree import Tree
from jaxlm.parallel import compiler_options
from jaxlm.parallel.batches import axes_of
from jaxlm.parallel.collectives import summed_over_replicas
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import constrain, mesh_around, replicated
from jaxlm.parallel.pipeline import stages_around
from jaxlm.parallel.rules import TRAIN
from jaxlm.training import balancing, local_sgd, table_gradients
from jaxlm.training import norms as norms_of
from jaxlm.training.config import (
    DPOConfig,
    NextTokenConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from jaxlm.training.groups import state_scales
from jaxlm.training.objectives import (
    Batch,
    DirectPreference,
    NextToken,
    Objective,
    objective,
    preference_logprobs,
)
from jaxlm.training.optimizer import optimizer, state_shardings, without_frozen
from jaxlm.training.schedules import schedule
from jaxlm.training.staged import StagedModel
from jaxlm.training.state import TrainState
from kernels_pallas.core import target


class _Scales(NamedTuple):
    """Factors of the sums of a microbatch in the means over the whole batch, [] float32.

    `of_sums`: one over what the objective counts in the batch. `per_token`: what it counts for each token of the batch.
    """

    of_sums: jax.Array | float
    per_token: jax.Array | float


@dataclass(frozen=True, eq=False)
class TrainStep:
    """One step of training a model, as pure functions of plain trees.

    The objective is that of text unless `dpo` is given. With `lora`, adapters alone are trained, and are the
    `parameters` of the state. Under microbatches the loss is still the sum over the whole batch, divided by what the
    objective counts in it. `one_document` promises that each row of the batches to train on is a piece of one document,
    so that attention's mask is known while tracing. `replicas`: those of `training.local_sgd`, where it is set.

    Raises InputError where a pattern of `optimizer.groups` or `lora.targets` decides nothing.
    """

    model: ModelConfig
    execution: ExecutionConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    dpo: DPOConfig | None = None
    lora: LoraConfig | None = None
    of_text: ObjectiveConfig = NextTokenConfig()
    one_document: bool = False
    replicas: int = 1

    def __post_init__(self) -> None:
        _ = self._transform, self._mask_frozen  # which check the patterns

    @classmethod
    def of(cls, settings: RunConfig, mesh: Mesh | None = None, one_document: bool = False) -> "TrainStep":
        """Return the step of a run with these settings on a mesh, on rows that are one document each or not."""
        return cls(
            settings.model,
            settings.execution,
            settings.training,
            settings.optimizer,
            settings.dpo,
            settings.lora,
            settings.objective,
            one_document,
            1 if mesh is None else Layout(mesh.shape).over(TRAIN.replicas),
        )

    def init(self) -> TrainState:
        """Return the first state, with parameters of `training.seed`."""
        return self._first_state(*self._initial_weights())

    def begin(self, weights: Tree) -> TrainState:
        """Return the first state with these parameters, in float32; or of adapters with the weights that they adapt."""
        if self.lora is None:
            return self._first_state(weights, {})
        return self._first_state(self._initial_weights()[0], weights)

    def resume(self, state: TrainState) -> TrainState:
        """Return a state that was restored from a checkpoint, with its working copy."""
        own = state.parameters if state.local is None else state.local.parameters
        return state._replace(working=self._working(own))

    def loss_sums(
        self,
        parameters: Tree,
        batch: Batch,
        dropout: Dropout,
        objective: Objective | None = None,
        one_document: bool = False,
        per_token: jax.Array | float = 1.0,
    ) -> Auxiliary:
        """Return the terms of the objective, or of another, and statistics, each summed over what the objective counts.

        `one_document`: each row is a piece of one document. `per_token`: what the objective counts for each token of
        the whole batch, since terms of layers are means over tokens.
        """
        objective = objective or self.objective
        module = nnx.merge(self._graph, parameters)
        positions = batch["positions"]
        mask = OneDocumentMask(positions.shape[1]) if one_document else packed_causal_mask(positions)
        hidden, _, of_layers = module.hidden(
            batch["tokens"],
            positions,
            mask,
            dropout=dropout,
            execution=self.execution,
            padding_BT=batch["segments"] == 0,
        )
        count = per_token * jnp.sum(batch["segments"] != 0).astype(jnp.float32)
        losses = {name: count * jnp.sum(each_L) for name, each_L in of_layers.losses.items()}
        statistics = {name: count * jnp.mean(each_L) for name, each_L in of_layers.statistics.items()}
        return objective.sums(module, hidden, batch) | Auxiliary(losses, statistics, of_layers.counts)

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Auxiliary, Tree, jax.Array]:
        """Return the means of the objective's terms and of statistics, the float32 gradients of the objective, and the
        number of targets."""
        key = jax.random.fold_in(jax.random.key(self.training.seed), state.step)
        if self._has_replicas:
            key = jax.random.fold_in(key, local_sgd.replica_index())
        targets = jnp.sum(batch["segments"] > 0)
        counted, tokens = (
            jnp.maximum(n, 1).astype(jnp.float32)
            for n in (self.objective.count(batch), jnp.sum(batch["segments"] != 0))
        )
        scales = _Scales(1.0 / counted, counted / tokens)
        weights = self._weights(state), state.base

        if self.training.microbatches == 1 and stages_around() == 1:
            terms, grads = self._microbatch_gradients(weights, batch, scales, key, 0)
            return terms, jax.tree.map(lambda g: g.astype(jnp.float32), self._stacked(grads)), targets

        def accumulate(weights: tuple[Tree, Tree], batch: Batch, part: jax.Array | int) -> tuple[Auxiliary, Tree]:
            return self._accumulated_gradients(weights, batch, scales, key, part)

        terms, grads = summed_over_replicas(accumulate, weights, batch)
        return terms, grads, targets

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the next state and the metrics of the step.

        They are `loss` (nats per target), `grad_norm` (before clipping), `learning_rate`, `tokens` (of the rows,
        without padding), `learned_tokens` (targets that count), `skipped` and `skipped_in_a_row`; where it is on also
        `z_loss`, the mean term that was added to the loss, and what layers and other objectives return
        (`jaxlm.models.rows.Auxiliary`).

        Under `training.local_sgd` each replica moves by the mean of its own rows. Metrics are of all rows, `grad_norm`
        the mean of the replicas', and a step that is not finite on one of them is skipped on all.
        """
        if not self._has_replicas:
            return self._next(state, batch)
        return local_sgd.train(self._next, state, batch)

    def outer(self, state: TrainState) -> TrainState:
        """Return the state after a step of the outer optimizer of `training.local_sgd`, from whose parameters all
        replicas go on."""
        settings = self.training.local_sgd
        outer, momentum = local_sgd.moved(settings, self.optimizer, self._tree, state.parameters, state.local)
        local = local_sgd.LocalState(local_sgd.stacked(outer, self.replicas), momentum)
        return self.resume(state._replace(parameters=outer, local=local))

    def _next(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        with self._as_executed():
            terms, grads, targets = self.gradients(state, batch)
            grads = self._mask_frozen(grads)
            grad_norm = optax.tree.norm(grads)
            tokens = {"tokens": jnp.sum(batch["segments"] != 0), "learned_tokens": targets}
            measured = {**terms.losses, **terms.statistics, "grad_norm": grad_norm}
            if self._has_replicas:
                measured, tokens = local_sgd.metrics(measured, tokens, self.objective.count(batch))
            finite = jnp.isfinite(measured["loss"]) & jnp.isfinite(measured["grad_norm"])

            kept = state.parameters, state.optimizer, state.average

            def moved() -> tuple:
                with jax.named_scope("optimizer"):
                    transform = self._transform.update
                    updates, moments = transform(grads, state.optimizer, state.parameters, norm=grad_norm)
                parameters = optax.apply_updates(state.parameters, updates)
                if terms.counts:
                    scales = state_scales(self.optimizer, self._tree)
                    parameters = balancing.moved(self.model, self._tree, parameters, terms.counts, scales)
                average = self._moving_average(state.average, parameters, state.step - state.skipped + 1)
                return parameters, moments, average

            if target.platform() == "cpu":  # where XLA would copy the moments before a selection
                parameters, moments, average = jax.lax.cond(finite, moved, lambda: kept)
            else:  # where a branch would wait for the host
                selected = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved(), kept)
                parameters, moments, average = selected

            skipped = jnp.where(finite, 0, 1)
            next_state = TrainState(
                step=state.step + 1,
                parameters=parameters,
                working=self._working(parameters),
                optimizer=moments,
                skipped=state.skipped + skipped,
                skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
                average=average,
                base=state.base,
            )
            return next_state, {
                **measured,
                **tokens,
                "learning_rate": self._learning_rate(state.step - state.skipped),
                "skipped": next_state.skipped,
                "skipped_in_a_row": next_state.skipped_in_a_row,
            }

    def evaluate(self, parameters: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the sum of the losses and their number, of parameters with those of the base. Of text it is the
        cross-entropy, whatever the objective is, so that runs can be compared."""
        objective = self.objective if self.dpo is not None else NextToken(self.training.z_loss)
        with self._as_executed():
            if stages_around() > 1:
                terms = self._staged(Dropout(), 0, _Scales(1.0, 1.0), objective).sums(
                    self._cast(parameters), {}, self._in_microbatches(batch)
                )
            else:
                terms = self.loss_sums(self._cast(parameters), batch, Dropout(), objective)
            return terms.losses["loss"], objective.count(batch)

    def preference_logprobs(self, parameters: Tree, batch: Batch) -> jax.Array:
        """Return ln p of the chosen and of the rejected answers, float32 [B, 2], as `objectives` does, of parameters
        with those of the base."""
        with self._as_executed():
            module = nnx.merge(self._graph, self._cast(parameters))
            positions = batch["positions"]
            mask, execution = packed_causal_mask(positions), self.execution
            hidden, _, _ = module.hidden(batch["tokens"], positions, mask, execution=execution)
            return preference_logprobs(module, hidden, batch)

    def norms(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Return what `train` would meet on this batch, by layer.

        `gradient` by path (`norms.of_gradients`) and `residual`, the root mean square of the residual stream after each
        layer, [L]. It is a program of its own, so that looking changes no rounding in `train` and costs nothing on
        other steps.
        """
        with self._as_executed():
            _, grads, targets = self.gradients(state, batch)
            module = nnx.merge(self._graph, model_tree.joined(self._weights(state), state.base))
            squares_ML = jax.lax.map(
                lambda part: norms_of.squares(module, part, self.execution), self._in_microbatches(batch)
            )
            return {
                "gradient": norms_of.of_gradients(self._mask_frozen(grads), self._tree),
                "residual": jnp.sqrt(jnp.sum(squares_ML, axis=0) / jnp.maximum(targets, 1).astype(jnp.float32)),
            }

    def shardings(self, mesh: Mesh) -> TrainState:
        """Return the sharding of each array of the state."""
        whole, like_parameters = replicated(mesh), model_tree.shardings(self._tree, mesh)
        own, moments = like_parameters, state_shardings(self._transform, self._tree, mesh)
        if self._has_replicas:
            own, moments = (local_sgd.stacked_shardings(each, mesh) for each in (own, moments))
        return TrainState(
            step=whole,
            parameters=like_parameters,
            working=own if self._has_working_copy else None,
            optimizer=moments,
            skipped=whole,
            skipped_in_a_row=whole,
            average=None if self.training.ema_decay is None else like_parameters,
            base=model_tree.shardings(self._base_tree, mesh),
            local=local_sgd.LocalState(own, like_parameters) if self._has_replicas else None,
        )

    def jitted(self, mesh: Mesh) -> "TrainPrograms":
        """Return the functions jitted for a mesh, shardings pinned, to be called under `jax.set_mesh`. `begin`,
        `resume`, `outer` and `train` consume their first argument: its buffers are donated.

        Raises InputError for compiler options that XLA refuses for these devices.
        """
        state, whole = self.shardings(mesh), replicated(mesh)
        if Layout(mesh.shape).over(TRAIN.over("layers")) > 1:
            self._staged(Dropout(), 0, _Scales(1.0, 1.0)).check(mesh)
        compiler_options.check(mesh, self.execution.compiler_options)
        options = compiler_options.on_mesh(mesh, self.execution.compiler_options)
        return TrainPrograms(
            init=jax.jit(self.init, out_shardings=state),
            begin=jax.jit(self.begin, donate_argnums=0, out_shardings=state),
            resume=jax.jit(self.resume, donate_argnums=0, out_shardings=state),
            outer=jax.jit(self.outer, donate_argnums=0, out_shardings=state, compiler_options=options),
            train=jax.jit(self.train, donate_argnums=0, out_shardings=(state, whole), compiler_options=options),
            evaluate=jax.jit(self.evaluate, out_shardings=whole, compiler_options=options),
            preference_logprobs=jax.jit(self.preference_logprobs, out_shardings=whole, compiler_options=options),
            norms=jax.jit(self.norms, out_shardings=whole, compiler_options=options),
        )

    def _as_executed(self) -> AbstractContextManager[None]:
        execution = self.execution
        mesh = mesh_around()
        devices = 1 if mesh.empty else Layout(mesh.shape).over(TRAIN.over("experts"))
        ways = execution.context_parallel, expert_parallel.way(execution.expert_parallel, self.model, devices)
        return kernels.using_kernels(execution.kernels, execution.deterministic, *ways)

    @property
    def objective(self) -> Objective:
        """The objective that is made small."""
        return objective(self.of_text, self.training) if self.dpo is None else DirectPreference(self.dpo.beta)

    @property
    def _abstract(self) -> tuple[nnx.GraphDef, nnx.State]:
        return model_tree.abstract(self.model, self.lora, quantized=self.execution.quantization)

    @property
    def _graph(self) -> nnx.GraphDef:
        return self._abstract[0]

    @property
    def _tree(self) -> nnx.State:
        """The abstract tree of what is trained."""
        return model_tree.trained(self._abstract[1])[0]

    @property
    def _base_tree(self) -> nnx.State:
        """The abstract tree of what is not."""
        return model_tree.trained(self._abstract[1])[1]

    @cached_property
    def _transform(self) -> optax.GradientTransformationExtraArgs:
        return optimizer(self.optimizer, self._tree)

    @cached_property
    def _mask_frozen(self) -> Callable[[Tree], Tree]:
        return without_frozen(self.optimizer, self._tree)

    @property
    def _learning_rate(self) -> optax.Schedule:
        return schedule(self.optimizer.schedule, self.optimizer.learning_rate)

    @property
    def _dtype(self) -> jnp.dtype:
        return jnp.dtype(self.execution.dtype)

    def _initial_weights(self) -> tuple[Tree, Tree]:
        """Return parameters of `training.seed`, and the base that adapters adapt."""
        module = model_tree.build(self.model, self.training.seed, self.lora, quantized=self.execution.quantization)
        parameters, base = model_tree.trained(nnx.state(module))
        return nnx.to_pure_dict(parameters), model_tree.cast(base, nnx.to_pure_dict(base), self._dtype)

    def _first_state(self, parameters: Tree, base: Tree) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        average = None if self.training.ema_decay is None else parameters
        moments = self._transform.init(parameters)
        if not self._has_replicas:
            return TrainState(zero, parameters, self._working(parameters), moments, zero, zero, average, base)
        own, moments = (local_sgd.stacked(each, self.replicas) for each in (parameters, moments))
        local = local_sgd.LocalState(own, jax.tree.map(jnp.zeros_like, parameters))
        return TrainState(zero, parameters, self._working(own), moments, zero, zero, average, base, local)

    @property
    def _has_replicas(self) -> bool:
        return self.training.local_sgd is not None

    def _stacked(self, gradients: Tree) -> Tree:
        """Return the gradients, those of all layers together in one array each.

        Where layers are written out each has its own gradient, and XLA would join them again in each of the fusions of
        the update: one for every array of the optimizer's state.
        """
        by_layer = model_tree.read(self._tree, lambda leaf: "layers" in leaf.axes)
        return jax.tree.map(
            lambda g, of_layers: jax.lax.optimization_barrier(g) if of_layers else g, gradients, by_layer
        )

    @property
    def _has_working_copy(self) -> bool:
        return self._dtype != jnp.float32

    def _working(self, parameters: Tree) -> Tree | None:
        return model_tree.cast(self._tree, parameters, self._dtype) if self._has_working_copy else None

    def _cast(self, whole: Tree) -> Tree:
        """Return all parameters in the dtype of the computation."""
        return model_tree.cast(self._abstract[1], whole, self._dtype)

    @staticmethod
    def _weights(state: TrainState) -> Tree:
        """Return the parameters of a state in the dtype of the computation."""
        return state.parameters if state.working is None else state.working

    def _microbatch_gradients(
        self, weights: tuple[Tree, Tree], batch: Batch, scales: "_Scales", key: jax.Array, index: jax.Array | int
    ) -> tuple[Auxiliary, Tree]:
        """Return the terms of one microbatch, its part of the means, and their gradients in the dtype of `weights`."""
        dropout = Dropout(self.training.dropout, jax.random.fold_in(key, index))

        def loss(parameters: Tree, base: Tree) -> tuple[jax.Array, Auxiliary]:
            whole = model_tree.joined(parameters, base)
            options = {"one_document": self.one_document, "per_token": scales.per_token}
            sums = self.loss_sums(whole, batch, dropout, **options)
            losses, statistics = jax.tree.map(lambda term: term * scales.of_sums, (sums.losses, sums.statistics))
            return sum(losses.values()), Auxiliary(losses, statistics, sums.counts)

        grads, terms = jax.grad(loss, has_aux=True)(*weights)
        return terms, table_gradients.as_stored(grads, self._tree, self.model)

    def _accumulated_gradients(
        self, weights: tuple[Tree, Tree], batch: Batch, scales: "_Scales", key: jax.Array, part: jax.Array | int
    ) -> tuple[Auxiliary, Tree]:
        """Return the sums over the microbatches of a part of the batch, in float32; `part` is its index."""

        if stages_around() > 1:
            dropout = Dropout(self.training.dropout, key)
            staged = self._staged(dropout, part * self.training.microbatches, scales)
            return staged.gradients(*weights, self._in_microbatches(batch))

        def add(total: tuple, indexed: tuple[jax.Array, Batch]) -> tuple[tuple, None]:
            index, microbatch = indexed
            terms_and_grads = self._microbatch_gradients(weights, microbatch, scales, key, index)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, terms_and_grads), None

        microbatches = self._in_microbatches(batch)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)
        terms = jax.eval_shape(self.loss_sums, model_tree.joined(*weights), one, Dropout())
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (terms, weights[0]))
        indices = part * self.training.microbatches + jnp.arange(self.training.microbatches)
        return jax.lax.scan(add, zeros, (indices, microbatches))[0]

    def _staged(
        self, dropout: Dropout, first_index: jax.Array | int, scales: "_Scales", objective: Objective | None = None
    ) -> StagedModel:
        """Return the model on the stages around, with the dropout of microbatches from an index on."""
        of_step = self.execution, objective or self.objective, self.one_document and objective is None
        return StagedModel(*self._abstract, *of_step, dropout, first_index, *scales)

    def _in_microbatches(self, batch: Batch) -> Batch:
        """[B, …] → [M, B / M, …]. Each takes every M-th row, so that it lies on all devices without moving any row."""
        parts = {k: rearrange(x, "(B M) T -> M B T", M=self.training.microbatches) for k, x in batch.items()}
        return {k: constrain(x, None, *axes_of(k)) for k, x in parts.items()}

    def _moving_average(self, average: Tree | None, parameters: Tree, updates: jax.Array) -> Tree | None:
        """Return the average after this many updates; its first ones weigh more, so that it forgets where it began."""
        if average is None:
            return None
        # As tf.train.ExponentialMovingAverage does with num_updates.
        updates = updates.astype(jnp.float32)
        decay = jnp.minimum(self.training.ema_decay, (1.0 + updates) / (10.0 + updates))
        return jax.tree.map(lambda a, p: a + (1.0 - decay) * (p - a), average, parameters)


class TrainPrograms(NamedTuple):
    """The functions of a `TrainStep`, jitted or compiled for a mesh."""

    init: Callable[[], TrainState]
    begin: Callable[[Tree], TrainState]
    resume: Callable[[TrainState], TrainState]
    outer: Callable[[TrainState], TrainState]
    train: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Tree, Batch], tuple[jax.Array, jax.Array]]
    preference_logprobs: Callable[[Tree, Batch], jax.Array]
    norms: Callable[[TrainState, Batch], dict[str, Any]]
