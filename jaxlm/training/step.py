"""One optimizer step and one evaluation step, as pure functions of plain trees."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from flax import nnx
from jax.sharding import Mesh

from jaxlm.models import kernels
from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import Dropout
from jaxlm.models.layers import Execution
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.rows import Auxiliary
from jaxlm.models.tree import Tree
from jaxlm.parallel.collectives import summed_over_data
from jaxlm.parallel.partition import constrain, replicated
from jaxlm.training import norms as norms_of
from jaxlm.training.config import DPOConfig, OptimizerConfig, TrainingConfig
from jaxlm.training.objectives import Batch, DirectPreference, NextToken, answers
from jaxlm.training.optimizer import optimizer, state_shardings, without_frozen
from jaxlm.training.schedules import schedule


class TrainState(NamedTuple):
    """Everything that a resumed run needs; the position in the data is `step`."""

    step: jax.Array  # batches consumed, int32
    parameters: Tree  # those that train, float32
    optimizer: optax.OptState
    skipped: jax.Array  # steps whose update was not finite, int32
    skipped_in_a_row: jax.Array
    average: Tree | None = None  # of the parameters, float32; None without `training.ema_decay`
    # What adapters adapt and what is beside it, in the dtype of the computation: it stays, and no checkpoint holds it.
    base: Tree = {}


class Steps(NamedTuple):
    """The functions of a training run, pure, or jitted by `jit_steps`, and the shardings of their state on a mesh."""

    init: Callable[[], TrainState]
    begin: Callable[[Tree], TrainState]
    train: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Tree, Batch], tuple[jax.Array, jax.Array]]
    answers: Callable[[Tree, Batch], jax.Array]
    norms: Callable[[TrainState, Batch], dict[str, Any]]
    shardings: Callable[[Mesh], TrainState]


def make_steps(
    model: ModelConfig,
    training: TrainingConfig,
    optimization: OptimizerConfig,
    dpo: DPOConfig | None = None,
    lora: LoraConfig | None = None,
) -> Steps:
    """The steps of this model under these settings; the objective is the next token's unless `dpo` is given. With
    `lora` adapters alone are trained, and are the `parameters` of the state.

    `init` returns the first state, with parameters of `training.seed`, and `begin` that with given ones, in float32,
    or of adapters with what they adapt.
    `train` returns the next state and the metrics `loss` (nats per target), `grad_norm` (before clipping),
    `learning_rate`, `tokens` (targets that count), `skipped` and `skipped_in_a_row`; where it is on also `z_loss`, the
    mean term that was added to the loss, and what layers and other objectives return
    (`jaxlm.models.rows.Auxiliary`). `evaluate` returns the sum of the losses and their number, `answers` the
    log-probabilities of preferences (`objectives.answers`); both take the parameters with those of the base. Under
    microbatches the loss is still the sum over the whole batch by what the objective counts in it. `norms` returns what
    `train` would meet on this batch, by layer: `gradient` by path (`norms.of_gradients`) and `residual`, the root mean
    square of the stream after each layer, [L]. It is a program of its own, so that looking changes no rounding in
    `train` and costs nothing on other steps.

    Raises InputError where a pattern of `optimizer.groups` or `lora.targets` decides nothing.
    """
    graph, whole_tree = model_tree.abstract(model, lora)
    tree, base_tree = model_tree.trained(whole_tree)
    transform = optimizer(optimization, tree)
    mask_frozen = without_frozen(optimization, tree)
    learning_rate = schedule(optimization.schedule, optimization.learning_rate)
    dtype = jnp.dtype(training.dtype)
    execution = Execution(remat=training.remat, scan=training.scan_layers)
    objective = NextToken(training.z_loss) if dpo is None else DirectPreference(dpo.beta)

    def begin(weights: Tree) -> TrainState:
        return first(weights, {}) if lora is None else first(drawn()[0], weights)

    def init() -> TrainState:
        return first(*drawn())

    def drawn() -> tuple[Tree, Tree]:
        parameters, base = model_tree.trained(nnx.state(model_tree.build(model, training.seed, lora)))
        return nnx.to_pure_dict(parameters), cast(nnx.to_pure_dict(base), dtype)

    def first(parameters: Tree, base: Tree) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        average = None if training.ema_decay is None else parameters
        return TrainState(zero, parameters, transform.init(parameters), zero, zero, average, base)

    def summed_losses(parameters: Tree, batch: Batch, dropout: Dropout) -> Auxiliary:
        """The terms of the objective and statistics, each summed over what the objective counts."""
        module = nnx.merge(graph, parameters)
        positions = batch["positions"]
        hidden, _, of_layers = module.hidden(
            batch["tokens"], positions, packed_causal_mask(positions), dropout=dropout, execution=execution
        )
        count = objective.count(batch).astype(jnp.float32)
        losses = {name: count * jnp.sum(each_L) for name, each_L in of_layers.losses.items()}
        statistics = {name: count * jnp.mean(each_L) for name, each_L in of_layers.statistics.items()}
        return objective.sums(module, hidden, batch) | Auxiliary(losses, statistics)

    def in_microbatches(batch: Batch) -> Batch:
        """[B, T] → [M, B / M, T]. Each takes every M-th row, so that it lies on all devices without moving any row."""
        parts = {k: rearrange(x, "(B M) T -> M B T", M=training.microbatches) for k, x in batch.items()}
        return {k: constrain(x, None, "batch", "sequence") for k, x in parts.items()}

    def gradients(state: TrainState, batch: Batch) -> tuple[Auxiliary, Tree, jax.Array]:
        """Means of the objective's terms and of statistics, the float32 gradients of the objective, and the number of
        targets."""
        key = jax.random.fold_in(jax.random.key(training.seed), state.step)
        targets = jnp.sum(batch["segments"] > 0)
        scale = 1.0 / jnp.maximum(objective.count(batch), 1).astype(jnp.float32)
        working = cast(state.parameters, dtype), state.base

        def microbatch_gradients(
            working: tuple[Tree, Tree], index: jax.Array | int, microbatch: Batch
        ) -> tuple[Auxiliary, Tree]:
            dropout = Dropout(training.dropout, jax.random.fold_in(key, index))

            def objective(p: Tree, base: Tree) -> tuple[jax.Array, Auxiliary]:
                losses = summed_losses(model_tree.joined(p, base), microbatch, dropout)
                terms = jax.tree.map(lambda term: term * scale, losses)
                return sum(terms.losses.values()), terms

            grads, terms = jax.grad(objective, has_aux=True)(*working)
            return terms, grads

        if training.microbatches == 1:
            terms, grads = microbatch_gradients(working, 0, batch)
            return terms, cast(grads, jnp.float32), targets

        def accumulate(working: tuple[Tree, Tree], batch: Batch, part: jax.Array | int) -> tuple[Auxiliary, Tree]:
            def add(total: tuple, indexed: tuple) -> tuple[tuple, None]:
                terms_and_grads = microbatch_gradients(working, *indexed)
                return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, terms_and_grads), None

            microbatches = in_microbatches(batch)
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)
            terms = jax.eval_shape(summed_losses, model_tree.joined(*working), one, Dropout())
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (terms, working[0]))
            indices = part * training.microbatches + jnp.arange(training.microbatches)
            return jax.lax.scan(add, zeros, (indices, microbatches))[0]

        terms, grads = summed_over_data(accumulate, working, batch)
        return terms, grads, targets

    def moving_average(average: Tree | None, parameters: Tree, updates: jax.Array) -> Tree | None:
        """The average after this many updates; its first ones weigh more, so that it forgets where it began."""
        if average is None:
            return None
        # As tf.train.ExponentialMovingAverage does with num_updates.
        updates = updates.astype(jnp.float32)
        decay = jnp.minimum(training.ema_decay, (1.0 + updates) / (10.0 + updates))
        return jax.tree.map(lambda a, p: a + (1.0 - decay) * (p - a), average, parameters)

    @kernels.using_kernels(training.kernels)
    def train(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        terms, grads, targets = gradients(state, batch)
        grads = mask_frozen(grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(terms.losses["loss"]) & jnp.isfinite(grad_norm)

        with jax.named_scope("optimizer"):
            updates, moments = transform.update(grads, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        average = moving_average(state.average, parameters, state.step - state.skipped + 1)
        old, new = (state.parameters, state.optimizer, state.average), (parameters, moments, average)
        parameters, moments, average = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)

        skipped = jnp.where(finite, 0, 1)
        next_state = TrainState(
            step=state.step + 1,
            parameters=parameters,
            optimizer=moments,
            skipped=state.skipped + skipped,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            average=average,
            base=state.base,
        )
        return next_state, {
            **terms.losses,
            **terms.statistics,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate(state.step - state.skipped),
            "tokens": targets,
            "skipped": next_state.skipped,
            "skipped_in_a_row": next_state.skipped_in_a_row,
        }

    @kernels.using_kernels(training.kernels)
    def evaluate(parameters: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        terms = summed_losses(cast(parameters, dtype), batch, Dropout())
        return terms.losses["loss"], objective.count(batch)

    @kernels.using_kernels(training.kernels)
    def log_probabilities(parameters: Tree, batch: Batch) -> jax.Array:
        module = nnx.merge(graph, cast(parameters, dtype))
        positions = batch["positions"]
        hidden, _, _ = module.hidden(batch["tokens"], positions, packed_causal_mask(positions), execution=execution)
        return answers(module, hidden, batch)

    @kernels.using_kernels(training.kernels)
    def norms(state: TrainState, batch: Batch) -> dict[str, Any]:
        _, grads, targets = gradients(state, batch)
        module = nnx.merge(graph, model_tree.joined(cast(state.parameters, dtype), state.base))
        squares_ML = jax.lax.map(lambda part: norms_of.squares(module, part, execution), in_microbatches(batch))
        return {
            "gradient": norms_of.of_gradients(mask_frozen(grads), tree),
            "residual": jnp.sqrt(jnp.sum(squares_ML, axis=0) / jnp.maximum(targets, 1).astype(jnp.float32)),
        }

    def shardings(mesh: Mesh) -> TrainState:
        whole, like_parameters = replicated(mesh), model_tree.shardings(tree, mesh)
        return TrainState(
            step=whole,
            parameters=like_parameters,
            optimizer=state_shardings(transform, tree, mesh),
            skipped=whole,
            skipped_in_a_row=whole,
            average=None if training.ema_decay is None else like_parameters,
            base=model_tree.shardings(base_tree, mesh),
        )

    return Steps(init, begin, train, evaluate, log_probabilities, norms, shardings)


def cast(parameters: Tree, dtype: jnp.dtype) -> Tree:
    """Every parameter in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), parameters)


def jit_steps(steps: Steps, mesh: Mesh) -> Steps:
    """The steps jitted for a mesh, shardings pinned, to be called under `jax.set_mesh`. `begin` and `train` consume
    what they are given: its buffers are donated."""
    state, whole = steps.shardings(mesh), replicated(mesh)
    return steps._replace(
        init=jax.jit(steps.init, out_shardings=state),
        begin=jax.jit(steps.begin, donate_argnums=0, out_shardings=state),
        train=jax.jit(steps.train, donate_argnums=0, out_shardings=(state, whole)),
        evaluate=jax.jit(steps.evaluate, out_shardings=whole),
        answers=jax.jit(steps.answers, out_shardings=whole),
        norms=jax.jit(steps.norms, out_shardings=whole),
    )
