"""A pipeline of stages, each with its part of stacked weights, through which microbatches pass.

The schedule is that of `jaxlm.parallel.ticks`: loops with a body for each kind of tick, and no branch on the stage.
Where a stage has no microbatch it computes all the same, and nothing keeps the result.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.nested_maps import without_loss
from jaxlm.parallel.partition import constrain, mesh_around, rules_around
from jaxlm.parallel.ticks import Ticks, TickSpan
from kernels_pallas.core import target

# The logical axis of stacked weights, whose parts the stages have.
STACKED = "layers"

Tree = Any
Index = jax.Array  # of a microbatch, int32


def stages_around() -> int:
    """Return the number of stages on the mesh and under the rules around; 1 where there is no pipeline."""
    mesh = mesh_around()
    return 1 if mesh.empty else Layout(mesh.shape).over(rules_around().over(STACKED))


class Model(NamedTuple):
    """A model in three parts, of which the middle one lies on stages.

    Everything reads `rows`, a tree of arrays [M, …] of all microbatches, and the index of its own.

    Attributes:
      enter: (outer weights, rows, index) → ((x, loss), sums), what goes into the first chunk of layers.
      stage: (weights of a chunk, rows, index, chunk, x) → ((y, loss), (sums, by_slot)), y like x. The weights are a
        pair, those that have gradients and the others. `chunk`: its index, in the order of layers.
      leave: (outer weights, rows, index, y) → (loss, sums), of what the last chunk gives.

    Each `loss` is a float32 scalar, a part of what is made small. `sums` are trees of arrays that are added up over
    microbatches, and over chunks too; `by_slot` have a first dimension for the layers of a chunk, and are added up over
    microbatches.
    """

    enter: Callable[[Tree, Tree, Index], tuple[tuple[jax.Array, jax.Array], Tree]]
    stage: Callable[
        [tuple[Tree, Tree], Tree, Index, jax.Array, jax.Array], tuple[tuple[jax.Array, jax.Array], tuple[Tree, Tree]]
    ]
    leave: Callable[[Tree, Tree, Index, jax.Array], tuple[jax.Array, Tree]]


class Totals(NamedTuple):
    """The sums of what the parts of a `Model` return besides, float32: `by_slot` has all layers, [slots, …]."""

    enter: Tree
    stage: Tree
    by_slot: Tree
    leave: Tree


def pinned(tree: Tree, axes: Tree, *before: None, computing: bool = False) -> Tree:
    """Return a tree of arrays with these logical axes, and others before them, where they lie, or as layers compute
    with them: whole over the mesh axes that shard them in storage alone."""
    return jax.tree.map(lambda x, axes: constrain(x, *before, *axes, computing=computing), tree, axes)


def gradients(
    model: Model,
    outer: Tree,
    stack: tuple[Tree, Tree],
    rows: Tree,
    microbatches: int,
    axes: Sequence[str | None],
    weight_axes: tuple[Tree, Tree],
) -> tuple[Totals, tuple[Tree, Tree]]:
    """Return what the parts of a model return besides the residual, and the gradients of its loss, float32, of the
    outer weights and of the stacked ones, [R, slots, …].

    What is kept of a microbatch are the inputs of chunks: `Ticks.kept` on each stage, whatever their number is.

    Args:
      stack: the weights in slots (`jaxlm.parallel.slots`), those that have gradients and the others.
      rows: read by all stages.
      axes: the logical axes of what passes between stages.
      weight_axes: those of each outer weight, and of each stacked one that has a gradient.
    """

    def run(more_maps: int, outer: Tree, stack: tuple[Tree, Tree], rows: Tree) -> tuple[Totals, tuple[Tree, Tree]]:
        return _Pipeline(model, outer, stack, rows, microbatches, axes, more_maps).gradients(weight_axes)

    return without_loss(run, outer, stack, rows)


def forward(
    model: Model, outer: Tree, stack: tuple[Tree, Tree], rows: Tree, microbatches: int, axes: Sequence[str | None]
) -> Tree:
    """Return the sums of `leave` after a forward pass alone; the arguments are those of `gradients`."""

    def run(more_maps: int, outer: Tree, stack: tuple[Tree, Tree], rows: Tree) -> Tree:
        return _Pipeline(model, outer, stack, rows, microbatches, axes, more_maps).forward()

    return without_loss(run, outer, stack, rows)


class _Passing(NamedTuple):
    """The arrays of the residual between two ticks: [S, …] on stages, but `entering`.

    `entering`: what goes into the first chunk next. `arrived`: from the stage before, and `returned`: the gradient from
    the stage after; the first stage comes after the last. `inputs`: [S, kept, …].
    """

    entering: jax.Array
    arrived: jax.Array
    returned: jax.Array
    inputs: jax.Array


class _Sums(NamedTuple):
    """The sums over ticks."""

    totals: Totals
    outer: Tree
    stack: Tree


class _Pipeline:
    """`more_maps`: maps within that of each part of a tick which compute nothing (`without_loss`)."""

    def __init__(
        self, model: Model, outer: Tree, stack: Tree, rows: Tree, microbatches: int, axes: Sequence, more_maps: int
    ):
        self._model, self._outer, self._stack, self._rows = model, outer, stack, rows
        self._M, self._S, self._axes, self._more_maps = microbatches, stages_around(), axes, more_maps
        (self._mesh_axis,) = rules_around().over(STACKED)
        self._ticks = Ticks(self._S, self._M, len(jax.tree.leaves(stack)[0]))

    def gradients(self, weight_axes: tuple[Tree, Tree]) -> tuple[Totals, tuple[Tree, Tree]]:
        passing, sums = self._nothing(self._ticks.kept)
        outer, stack = pinned(sums.outer, weight_axes[0]), pinned(sums.stack, weight_axes[1], None)
        carry = passing, sums._replace(outer=outer, stack=stack)
        passing, sums = self._through(carry, self._ticks.phases, self._tick)
        sums, _ = self._return(passing, sums, jnp.int32(self._ticks.ticks))
        of_stages = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums.totals.stage)
        by_slot = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sums.totals.by_slot)
        return sums.totals._replace(stage=of_stages, by_slot=by_slot), (sums.outer, sums.stack)

    def forward(self) -> Tree:
        def tick(span: TickSpan) -> Callable:
            def run(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
                passing, total = carry
                passing, y, done = self._forward(passing, t, jnp.float32(0))
                if span.at_ends and span.goes_back:
                    index = self._ticks.microbatch(self._ticks.item_forward(self._S - 1, t))
                    loss, of_leave = self._model.leave(self._outer, self._rows, index, y)
                    total, done = _added(total, of_leave), loss
                if span.at_ends:
                    passing = self._enter(passing, t + 1, done)
                return (passing, total), None

            return run

        passing, sums = self._nothing(kept=1)
        phases = [(times, spans) for times, spans in self._ticks.phases if spans[-1].goes_forward]
        return self._through((passing, sums.totals.leave), phases, tick)[1]

    def _through(self, carry: Any, phases: Iterable[tuple[int, Sequence[TickSpan]]], tick: Callable) -> Any:
        """Carry what is between ticks through the ticks of these phases."""
        first = 0
        for times, spans in phases:

            def phase(carry: Any, t: jax.Array, spans: Sequence[TickSpan] = spans) -> tuple[Any, None]:
                for span in spans:
                    carry, _ = jax.lax.scan(tick(span), carry, t + jnp.arange(span.ticks))
                    t += span.ticks
                return carry, None

            length = sum(span.ticks for span in spans)
            if times == 1:
                carry, _ = phase(carry, jnp.int32(first))
            else:
                carry, _ = jax.lax.scan(phase, carry, first + length * jnp.arange(times))
            first += times * length
        return carry

    def _nothing(self, kept: int) -> tuple[_Passing, _Sums]:
        """Return what there is before the first tick, with what enters in it."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        (x, _), of_enter = jax.eval_shape(self._model.enter, self._outer, self._rows, index)
        _, of_leave = jax.eval_shape(self._model.leave, self._outer, self._rows, index, x)
        R = self._ticks.rounds

        def chunk(w: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((w.shape[1] // self._S, *w.shape[2:]), w.dtype)

        part = jax.tree.map(chunk, self._stack)
        _, (of_stage, by_slot) = jax.eval_shape(self._model.stage, part, self._rows, index, index, x)
        of_stage = jax.tree.map(lambda y: jax.ShapeDtypeStruct((self._S, *y.shape), y.dtype), of_stage)
        by_slot = jax.tree.map(lambda y: jax.ShapeDtypeStruct((R, self._S * len(y), *y.shape[1:]), y.dtype), by_slot)

        def zeros(tree: Tree) -> Tree:
            return jax.tree.map(lambda y: jnp.zeros(y.shape, jnp.float32), tree)

        totals = Totals(zeros(of_enter), zeros(of_stage), zeros(by_slot), zeros(of_leave))

        def on_stages(*shape: int) -> jax.Array:
            axes = STACKED, *(None,) * len(shape), *self._axes
            return constrain(jnp.zeros((self._S, *shape, *x.shape), x.dtype), *axes)

        (entering, _), _ = self._model.enter(self._outer, self._rows, jnp.int32(0))
        passing = _Passing(entering, on_stages(), on_stages(), on_stages(kept))
        return passing, _Sums(totals, zeros(self._outer), zeros(self._stack[0]))

    def _tick(self, span: TickSpan) -> Callable:
        def run(carry: tuple[_Passing, _Sums], t: jax.Array) -> tuple[tuple[_Passing, _Sums], None]:
            (passing, sums), done, of_loss = carry, jnp.float32(0), None
            if span.goes_back and span.at_ends:
                sums, done = self._return(passing, sums, t)
            if span.goes_forward:
                passing, y, done = self._forward(passing, t, done)
                if span.goes_back and span.at_ends:
                    of_loss, sums, done = self._leave(y, t, sums)
            if span.goes_back:
                passing, sums, done = self._backward(passing, sums, of_loss, t, done)
            if span.goes_forward and span.at_ends:
                passing = self._enter(passing, t + 1, done)
            return (passing, sums), None

        return run

    # Each part of a tick returns, or is given, a float32 scalar that is there once what came before is done (`_after`).

    def _enter(self, passing: _Passing, t: jax.Array, done: jax.Array) -> _Passing:
        """Compute what enters the first chunk in a tick."""
        index = jnp.minimum(self._ticks.microbatch(self._ticks.item_forward(0, t)), self._M - 1)
        (x, _), _ = self._model.enter(self._outer, self._rows, _after(index, done))
        return passing._replace(entering=x)

    def _forward(self, passing: _Passing, t: jax.Array, done: jax.Array) -> tuple[_Passing, jax.Array, jax.Array]:
        """Carry a microbatch forward on each stage. Return also what the last stage gives, on all of them."""

        def local(
            stage: jax.Array,
            stack: Tree,
            rows: Tree,
            entering: jax.Array,
            arrived: jax.Array,
            inputs: jax.Array,
            t: jax.Array,
        ) -> tuple:
            arrived, inputs, ticks = arrived[0], inputs[0], self._ticks
            item, is_live = self._nearest(ticks.item_forward(stage, t))
            index, k = ticks.microbatch(item), ticks.round_forward(item)
            x = constrain(jnp.where((stage == 0) & (k == 0), entering, arrived), *self._axes)
            (y, _), _ = self._model.stage(_chunk(stack, k), rows, index, k * self._S + stage, x)
            inputs = _put(inputs, jnp.asarray(ticks.places)[item] % len(inputs), x, is_live)
            last = jax.lax.psum(jnp.where(stage == self._S - 1, y, jnp.zeros_like(y)), self._mesh_axis)
            arrived = jax.lax.ppermute(y, self._mesh_axis, [(i, (i + 1) % self._S) for i in range(self._S)])
            last = _after(constrain(last, *self._axes), arrived)
            return (arrived[None], inputs[None]), last, jnp.sum(arrived, dtype=jnp.float32)

        entering = _after(passing.entering, done)
        (arrived, inputs), y, done = self._on_stages(local, (1, None, None, 0, 0, None), ((0, 0), None, None))(
            self._stack, self._rows, entering, passing.arrived, passing.inputs, t
        )
        return passing._replace(arrived=arrived, inputs=inputs), y, done

    def _leave(self, y: jax.Array, t: jax.Array, sums: _Sums) -> tuple[jax.Array, _Sums, jax.Array]:
        """Return the gradient of the loss in what the last stage gave, and the sums with what follows it."""
        index = self._ticks.microbatch(self._ticks.item_forward(self._S - 1, t))
        loss, back, of_leave = jax.vjp(
            lambda outer, y: self._model.leave(outer, self._rows, index, y), self._outer, y, has_aux=True
        )
        of_outer, of_y = back(jnp.ones_like(loss))
        totals = sums.totals._replace(leave=_added(sums.totals.leave, of_leave))
        return of_y, sums._replace(totals=totals, outer=_added(sums.outer, of_outer)), _sum(of_outer)

    def _backward(
        self, passing: _Passing, sums: _Sums, of_loss: jax.Array | None, t: jax.Array, done: jax.Array
    ) -> tuple[_Passing, _Sums, jax.Array]:
        """Carry the gradients of a microbatch back on each stage. `of_loss`: that of what the last chunk gave in this
        tick, if it did."""

        def local(
            stage: jax.Array,
            stack: Tree,
            rows: Tree,
            inputs: jax.Array,
            gradients: tuple,
            total: tuple,
            t: jax.Array,
        ) -> tuple:
            inputs, ticks, (returned, of_loss) = inputs[0], self._ticks, gradients
            item, is_live = self._nearest(ticks.item_back(stage, t))
            index, k = ticks.microbatch(item), ticks.round_back(item)
            x = jax.lax.dynamic_index_in_dim(inputs, jnp.asarray(ticks.places)[ticks.as_forward(item)], keepdims=False)
            of_y = returned[0]
            if of_loss is not None:
                of_y = jnp.where((stage == self._S - 1) & (k == ticks.rounds - 1), of_loss, of_y)
            of_y = constrain(of_y, *self._axes)
            x = _after(x, of_y)
            trained, fixed = _chunk(stack, k)
            (_, loss), back, (of_stage, by_slot) = jax.vjp(
                lambda trained, x: self._model.stage((trained, fixed), rows, index, k * self._S + stage, x),
                trained,
                x,
                has_aux=True,
            )
            of_chunk, of_x = back((of_y, jnp.ones_like(loss)))
            of_stages, of_slots, of_stack = total
            of_stages = _added(of_stages, _live(jax.tree.map(lambda each: each[None], of_stage), is_live))
            of_slots, of_stack = _added_at((of_slots, of_stack), k, _live((by_slot, of_chunk), is_live))
            returned = jax.lax.ppermute(of_x, self._mesh_axis, [(i, (i - 1) % self._S) for i in range(self._S)])
            return returned[None], (of_stages, of_slots, of_stack), jnp.sum(returned, dtype=jnp.float32)

        total = sums.totals.stage, sums.totals.by_slot, sums.stack
        gradients = _after(passing.returned, done), of_loss
        returned, (of_stage, by_slot, of_stack), done = self._on_stages(
            local, (1, None, 0, (0, None), (0, 1, 1), None), (0, (0, 1, 1), None)
        )(self._stack, self._rows, passing.inputs, gradients, total, t)
        totals = sums.totals._replace(stage=of_stage, by_slot=by_slot)
        return passing._replace(returned=returned), sums._replace(totals=totals, stack=of_stack), done

    def _return(self, passing: _Passing, sums: _Sums, t: jax.Array) -> tuple[_Sums, jax.Array]:
        """Return the sums with the gradient that left the first chunk in the tick before."""

        def local(stage: jax.Array, returned: jax.Array, is_live: jax.Array) -> jax.Array:
            first = _live(returned[0], is_live & (stage == self._S - 1))  # the first stage has sent it to the last
            return constrain(jax.lax.psum(first, self._mesh_axis), *self._axes)

        item, is_live = self._nearest(self._ticks.item_back(0, t - 1))
        of_x = self._on_stages(local, (0, None), None)(passing.returned, is_live)
        index = _after(self._ticks.microbatch(item), jnp.sum(of_x))
        (_, loss), back, of_enter = jax.vjp(
            lambda outer: self._model.enter(outer, self._rows, index), self._outer, has_aux=True
        )
        (of_outer,) = back((of_x, is_live.astype(loss.dtype)))
        totals = sums.totals._replace(enter=_added(sums.totals.enter, _live(of_enter, is_live)))
        return sums._replace(totals=totals, outer=_added(sums.outer, of_outer)), _sum(of_outer)

    def _nearest(self, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return an item of work, or the nearest that there is, and whether it is one."""
        return jnp.clip(item, 0, self._ticks.items - 1), (item >= 0) & (item < self._ticks.items)

    def _on_stages(self, function: Callable, on_stages: Any, results: Any) -> Callable:
        """Return function(stage, *operands) on each stage, int32. Of operands and results the first dimension lies
        `on_stages`, or the second of [R, slots, …], whose parts are those of a stage; or they are whole (None)."""

        def spec(dimension: int | None) -> PartitionSpec:
            return PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, self._mesh_axis)

        in_specs, out_specs = (
            jax.tree.map(spec, dimensions, is_leaf=lambda each: each is None) for dimensions in (on_stages, results)
        )

        def on_stage(stage: jax.Array, *operands: Any) -> Any:
            for _ in range(self._more_maps):
                stage = on_each_device(jnp.copy, (stage, (None,)))
            return function(stage[0], *operands)

        # check_vma=False: kernels inside know of no other way.
        mapped = jax.shard_map(
            on_stage,
            in_specs=(spec(0), *in_specs),
            out_specs=out_specs,
            axis_names={self._mesh_axis},
            check_vma=False,
        )
        # An operand, since XLA may fail to partition `axis_index` while other mesh axes are left to it ("PartitionId").
        return functools.partial(mapped, jnp.arange(self._S, dtype=jnp.int32))


def _chunk(stack: Tree, k: jax.Array) -> Tree:
    """Return the weights of one chunk of a stage, of those of all [R, …]."""
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, k, keepdims=False), stack)


def _added_at(total: Tree, k: jax.Array, more: Tree) -> Tree:
    """Return sums [R, …] with more in chunk k."""

    def added(t: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_index_in_dim(t, k, keepdims=False) + x.astype(t.dtype)
        return jax.lax.dynamic_update_index_in_dim(t, x, k, 0)

    return jax.tree.map(added, total, more)


def _put(inputs: jax.Array, at: jax.Array, x: jax.Array, is_live: jax.Array) -> jax.Array:
    """Return kept inputs with one more in its place."""
    x = jnp.where(is_live, x, jax.lax.dynamic_index_in_dim(inputs, at, keepdims=False))
    return jax.lax.dynamic_update_index_in_dim(inputs, x, at, 0)


def _after(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Return x once others, of its shape or scalars, are there too, where their order matters: devices that are threads
    of a CPU wait for one another for ever if some send for an inner loop while others still send outside of it."""
    if target.platform() == "cpu":
        for other in others:
            x = jnp.where(other > jnp.inf, jnp.zeros_like(x), x)
    return x


def _sum(tree: Tree) -> jax.Array:
    """Return the sum of all numbers of a tree of arrays."""
    return sum((jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(tree)), start=jnp.float32(0))


def _live(tree: Tree, is_live: jax.Array) -> Tree:
    """Return a tree of arrays, or zeros."""
    return jax.tree.map(lambda x: jnp.where(is_live, x, jnp.zeros_like(x)), tree)


def _added(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, more)
