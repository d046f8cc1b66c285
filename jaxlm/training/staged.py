"""The gradients of a step whose layers lie on the stages of a pipeline."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.models import tree as model_tree
from jaxlm.models.doors import Dropout
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.layers import Slots, main_layers
from jaxlm.models.logical_axes import RESIDUAL
from jaxlm.models.masks import OneDocumentMask
from jaxlm.models.positions import LayerRows, packed_causal_mask
from jaxlm.models.rows import Auxiliary
from jaxlm.models.transformer import Transformer
from jaxlm.models.tree import Tree
from jaxlm.parallel import pipeline
from jaxlm.parallel.partition import constrain
from jaxlm.parallel.slots import as_stored, in_slots
from jaxlm.training.objectives import Batch, Objective


def check_dtype(execution: ExecutionConfig, platform: str) -> None:
    """Raise InputError for a dtype in which XLA compiles no pipeline for a platform."""
    if platform == "cpu" and execution.dtype != "float32":
        raise InputError(f"execution.dtype = {execution.dtype!r}: XLA compiles no pipeline for CPUs in it; set float32")


@dataclass(frozen=True)
class StagedModel:
    """A model whose main layers lie on stages: the longest run of one structure. Layers before and after them are
    computed with the embedding and with the loss, on all stages together.

    `dropout`: of microbatch i is that of the key folded with `first_index` + i. `of_sums` and `per_token`: the factors
    of sums over a microbatch, and what the objective counts for each token.

    Raises InputError for a model that has no such run.
    """

    graph: nnx.GraphDef
    tree: nnx.State
    execution: ExecutionConfig
    objective: Objective
    one_document: bool
    dropout: Dropout
    first_index: jax.Array | int
    of_sums: jax.Array | float
    per_token: jax.Array | float

    def gradients(self, parameters: Tree, base: Tree, microbatches: Batch) -> tuple[Auxiliary, Tree]:
        """Return the terms of the objective and the gradients of the parameters, float32, of [M, b, T] each."""
        model, outer, stack = self._parts(parameters, base, microbatches)
        rows, count = self._rows(microbatches), len(microbatches["tokens"])
        axes, layers = self._split(_axes(parameters, self.tree)), len(self._layers)
        totals, (of_outer, of_stack) = pipeline.gradients(model, outer, stack, rows, count, RESIDUAL, axes)
        by_layer = jax.tree.map(lambda x: x[:layers], totals.by_slot)
        terms = _together(totals.enter, totals.stage._replace(counts=by_layer), totals.leave)
        return terms, self._whole(of_outer, as_stored(of_stack, axes[1], layers))

    def sums(self, parameters: Tree, base: Tree, microbatches: Batch) -> Auxiliary:
        """Return the terms of the objective alone, without those of layers before the last stage's."""
        model, outer, stack = self._parts(parameters, base, microbatches)
        rows, count = self._rows(microbatches), len(microbatches["tokens"])
        return pipeline.forward(model, outer, stack, rows, count, RESIDUAL)

    def _parts(self, parameters: Tree, base: Tree, microbatches: Batch) -> tuple[pipeline.Model, Tree, tuple]:
        """Return the model in three parts, its outer weights, and those of its stages."""
        (outer, stack), (outer_base, stack_base) = self._split(parameters), self._split(base)
        axes, axes_of_base = (self._split(_axes(tree, self.tree)) for tree in (parameters, base))
        rounds = self.execution.pipeline_rounds
        slots = in_slots(stack, axes[1], rounds), in_slots(stack_base, axes_of_base[1], rounds)
        whole, once = functools.partial(pipeline.pinned, computing=True), self.execution.pipeline_gather == "step"
        if once:
            slots = whole(slots[0], axes[1], None), whole(slots[1], axes_of_base[1], None)

        def gathered(outer: Tree, axes: Tree) -> Tree:
            """Return outer weights, gathered before all ticks where they are: the loss gathers its table itself."""
            names = outer.keys() & ({"embedding", "layers"} if once else {"embedding"})
            return outer | {name: whole(outer[name], axes[name]) for name in names}

        outer, outer_base = gathered(outer, axes[0]), gathered(outer_base, axes_of_base[0])

        def module(outer: Tree) -> Transformer:
            return nnx.merge(self.graph, model_tree.joined(outer, outer_base, self._whole({}, stack), unused))

        unused = self._whole({}, stack_base)
        one = jax.tree.map(lambda x: x[0], microbatches)
        layers_with = jax.eval_shape(
            lambda: module(outer).hidden(one["tokens"], one["positions"], packed_causal_mask(one["positions"]))[2]
        ).statistics

        def weighted(auxiliary: Auxiliary, tokens: jax.Array, of_objective: Auxiliary) -> tuple:
            """Return the loss, and all terms as parts of means over the batch."""
            count = self.per_token * tokens
            losses = {name: count * jnp.sum(each) for name, each in auxiliary.losses.items()}
            statistics = {
                name: count * jnp.sum(each) / len(layers_with[name]) for name, each in auxiliary.statistics.items()
            }
            sums = of_objective | Auxiliary(losses, statistics)
            terms = jax.tree.map(lambda term: (term * self.of_sums).astype(jnp.float32), sums)
            return sum(terms.losses.values(), start=jnp.float32(0)), terms._replace(counts=auxiliary.counts)

        first, last = self._layers.start, self._layers.stop

        def enter(outer: Tree, rows: Any, index: jax.Array) -> tuple:
            batch, of_layers, dropout = self._at(rows, index)
            x_BTD = module(outer).embedded(batch["tokens"], batch["positions"], dropout)
            x_BTD, auxiliary = module(outer).through_layers(x_BTD, of_layers, self.execution, range(first))
            loss, terms = weighted(auxiliary, _tokens(batch), Auxiliary())
            return (constrain(x_BTD, *RESIDUAL), loss), terms

        def stage(stacks: tuple, rows: Any, index: jax.Array, chunk: jax.Array, x_BTD: jax.Array) -> tuple:
            batch, of_layers, _ = self._at(rows, index)
            weights = model_tree.joined(*stacks)
            count = len(jax.tree.leaves(weights)[0])
            of_chunk = Slots(weights, chunk * count + jnp.arange(count))
            y_BTD, auxiliary = self._abstract.through_stage(x_BTD, of_layers, self.execution, of_chunk)
            loss, terms = weighted(auxiliary, _tokens(batch), Auxiliary())
            return (constrain(y_BTD, *RESIDUAL), loss), (terms._replace(counts={}), terms.counts)

        def leave(outer: Tree, rows: Any, index: jax.Array, y_BTD: jax.Array) -> tuple:
            batch, of_layers, _ = self._at(rows, index)
            whole, after = module(outer), range(last, len(self._abstract.groups.blocks))
            y_BTD, auxiliary = whole.through_layers(y_BTD, of_layers, self.execution, after)
            return weighted(auxiliary, _tokens(batch), self.objective.sums(whole, whole.final_norm(y_BTD), batch))

        return pipeline.Model(enter, stage, leave), outer, slots

    def _rows(self, microbatches: Batch) -> tuple[Batch, jax.Array | None, jax.Array]:
        """Return what stages read besides weights and the residual."""
        return microbatches, self.dropout.key, jnp.asarray(self.first_index)

    def _at(self, rows: tuple, index: jax.Array) -> tuple[Batch, LayerRows, Dropout]:
        """Return a microbatch, what layers read of it, and its dropout."""
        microbatches, key, first_index = rows
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), microbatches)
        batch = {name: constrain(x, "batch", "sequence") for name, x in batch.items()}
        dropout = self.dropout
        if key is not None:
            dropout = Dropout(dropout.rate, jax.random.fold_in(key, first_index + index))
        positions = batch["positions"]
        mask = OneDocumentMask(positions.shape[1]) if self.one_document else packed_causal_mask(positions)
        return batch, LayerRows(self._abstract.model, positions, mask, dropout, None, batch["segments"] == 0), dropout

    @cached_property
    def _abstract(self) -> Transformer:
        """The model without its numbers."""
        return nnx.merge(self.graph, self.tree)

    @property
    def _layers(self) -> range:
        return self._main[1]

    def check(self, mesh: Mesh) -> None:
        """Raise InputError for a model, or devices, that cannot run this."""
        _ = self._main
        check_dtype(self.execution, mesh.devices.flat[0].platform)

    @cached_property
    def _main(self) -> tuple[str, range]:
        return main_layers(self._abstract.groups)

    @property
    def _path(self) -> tuple[str, ...]:
        """The path of the stack of the main layers."""
        name, _ = self._main
        return ("layers",) if len(self._abstract.groups.stacks) == 1 else ("layers", name)

    def _split(self, tree: Tree) -> tuple[Tree, Tree]:
        """Return a tree without the main layers, and them."""

        def split(tree: Tree, path: tuple[str, ...]) -> tuple[Tree, Tree]:
            name, *rest = path
            if name not in tree:
                return tree, {}
            others = {key: below for key, below in tree.items() if key != name}
            if not rest:
                return others, tree[name]
            without, found = split(tree[name], tuple(rest))
            return {**others, name: without}, found

        return split(tree, self._path)

    def _whole(self, outer: Tree, stack: Tree) -> Tree:
        """Return the tree of which these are the parts."""
        for name in reversed(self._path):
            stack = {name: stack}
        return model_tree.joined(outer, stack)


def _axes(like: Tree, tree: nnx.State) -> Tree:
    """Return the logical axes of the parameters of a tree, of those that the abstract tree has."""

    def of(like: Tree, axes: Tree) -> Tree:
        return {key: of(below, axes[key]) if isinstance(below, dict) else axes[key] for key, below in like.items()}

    return of(like, model_tree.read(tree, lambda leaf: leaf.axes))


def _tokens(batch: Batch) -> jax.Array:
    return jnp.sum(batch["segments"] != 0).astype(jnp.float32)


def _together(*parts: Auxiliary) -> Auxiliary:
    """Return terms of parts of the layers, in layer order, as those of all."""

    def by_name(field: str, join: Callable[[list[jax.Array]], jax.Array]) -> dict[str, jax.Array]:
        found: dict[str, list[jax.Array]] = {}
        for part in parts:
            for name, x in getattr(part, field).items():
                found.setdefault(name, []).append(x)
        return {name: join(arrays) for name, arrays in found.items()}

    return Auxiliary(by_name("losses", sum), by_name("statistics", sum), by_name("counts", jnp.concatenate))
