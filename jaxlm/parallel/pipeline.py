"""A pipeline of stages, each with its part of stacked weights, through which microbatches pass.

The schedule is that of `jaxlm.parallel.ticks`: three loops with a body each, and no branch on the stage. Where a stage
has no microbatch it computes all the same, and nothing keeps the result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import constrain, mesh_around, partition, rules_around
from jaxlm.parallel.ticks import Ticks
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
      enter: (outer weights, rows, index) → ((x, loss), sums), what goes into the first stage.
      stage: (weights of a stage, rows, index, stage, x) → ((y, loss), (sums, by_slot)), y like x. The weights are a
        pair, those that have gradients and the others.
      leave: (outer weights, rows, index, y) → (loss, sums), of what the last stage gives.

    Each `loss` is a float32 scalar, a part of what is made small. `sums` are trees of arrays that are added up over
    microbatches, and over stages too; `by_slot` have a first dimension for the layers of a stage, and are added up over
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


def slots(stack: Tree, axes: Tree) -> Tree:
    """Return stacked weights [L, …] with these logical axes as [S · ⌈L / S⌉, …], those of a stage together. What is
    more than L is the last layer again: slots that stages leave idle."""

    def padded(x: jax.Array, axes: Sequence[str]) -> jax.Array:
        more = -len(x) % stages_around()
        if not more:
            return x
        stored = partition(axes, x.shape, mesh_around())
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (more, *x.shape[1:]))])
        # Pinned on both sides, so that it moves by an all-to-all of what devices have.
        return constrain(jax.lax.with_sharding_constraint(x, stored), *axes)

    return jax.tree.map(padded, stack, axes)


def without_slots(stack: Tree, axes: Tree, layers: int) -> Tree:
    """Return [S · ⌈L / S⌉, …] as [L, …], as stacked weights lie: the opposite of `slots`."""

    def cut(x: jax.Array, axes: Sequence[str]) -> jax.Array:
        if len(x) == layers:
            return x
        stored = partition(axes, (layers, *x.shape[1:]), mesh_around())
        return jax.lax.with_sharding_constraint(x, stored)[:layers]

    return jax.tree.map(cut, stack, axes)


def pinned(tree: Tree, axes: Tree) -> Tree:
    """Return a tree of arrays with these logical axes where they lie."""
    return jax.tree.map(lambda x, axes: constrain(x, *axes), tree, axes)


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
    outer weights and of the stacked ones, [slots, …].

    What is kept of a microbatch are the inputs of its stages: 2 S − 1 on each, whatever their number is.

    Args:
      stack: the weights of `slots`, those that have gradients and the others.
      rows: read by all stages.
      axes: the logical axes of what passes between stages.
      weight_axes: those of each outer weight, and of each stacked one that has a gradient.
    """
    return _Pipeline(model, outer, stack, rows, microbatches, axes).gradients(weight_axes)


def forward(
    model: Model, outer: Tree, stack: tuple[Tree, Tree], rows: Tree, microbatches: int, axes: Sequence[str | None]
) -> Tree:
    """Return the sums of `leave` after a forward pass alone; the arguments are those of `gradients`."""
    return _Pipeline(model, outer, stack, rows, microbatches, axes).forward()


class _Passing(NamedTuple):
    """The arrays on stages between two ticks, [S, …] of the residual.

    `arrived`: from the stage before, and `returned`: the gradient from the stage after. `inputs`: [S, 2 S − 1, …].
    """

    arrived: jax.Array
    returned: jax.Array
    inputs: jax.Array


class _Sums(NamedTuple):
    """The sums over ticks."""

    totals: Totals
    outer: Tree
    stack: Tree


class _Pipeline:
    def __init__(self, model: Model, outer: Tree, stack: Tree, rows: Tree, microbatches: int, axes: Sequence):
        self._model, self._outer, self._stack, self._rows = model, outer, stack, rows
        self._M, self._S, self._axes = microbatches, stages_around(), axes
        (self._mesh_axis,) = rules_around().over(STACKED)
        self._ticks = Ticks(self._S, self._M)

    def gradients(self, weight_axes: tuple[Tree, Tree]) -> tuple[Totals, tuple[Tree, Tree]]:
        passing, sums = self._nothing()
        outer, stack = map(pinned, (sums.outer, sums.stack), weight_axes)
        carry, first, alone = (passing, sums._replace(outer=outer, stack=stack)), 0, self._ticks.alone
        for ticks, does in ((alone, (True, False)), (self._M, (True, True)), (alone, (False, True))):
            carry, _ = jax.lax.scan(self._tick(*does), carry, first + jnp.arange(ticks))
            first += ticks
        _, sums = carry
        of_stages = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums.totals.stage)
        return sums.totals._replace(stage=of_stages), (sums.outer, sums.stack)

    def forward(self) -> Tree:
        def tick(leaves: bool) -> Callable:
            def run(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
                passing, total = carry
                passing, y = self._forward(passing, t)
                if leaves:
                    total = _added(total, self._model.leave(self._outer, self._rows, t - (self._S - 1), y)[1])
                return (passing, total), None

            return run

        passing, sums = self._nothing()
        carry = passing._replace(inputs=passing.inputs[:, :1]), sums.totals.leave
        for first, ticks, leaves in ((0, self._ticks.alone, False), (self._ticks.alone, self._M, True)):
            carry, _ = jax.lax.scan(tick(leaves), carry, first + jnp.arange(ticks))
        return carry[1]

    def _nothing(self) -> tuple[_Passing, _Sums]:
        """Return what there is before the first tick."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        (x, _), of_enter = jax.eval_shape(self._model.enter, self._outer, self._rows, index)
        _, of_leave = jax.eval_shape(self._model.leave, self._outer, self._rows, index, x)
        part = jax.tree.map(lambda w: jax.ShapeDtypeStruct((len(w) // self._S, *w.shape[1:]), w.dtype), self._stack)
        _, (of_stage, by_slot) = jax.eval_shape(self._model.stage, part, self._rows, index, index, x)
        of_stage = jax.tree.map(lambda y: jax.ShapeDtypeStruct((self._S, *y.shape), y.dtype), of_stage)
        by_slot = jax.tree.map(lambda y: jax.ShapeDtypeStruct((self._S * len(y), *y.shape[1:]), y.dtype), by_slot)

        def zeros(tree: Tree) -> Tree:
            return jax.tree.map(lambda y: jnp.zeros(y.shape, jnp.float32), tree)

        totals = Totals(zeros(of_enter), zeros(of_stage), zeros(by_slot), zeros(of_leave))

        def on_stages(*shape: int) -> jax.Array:
            axes = STACKED, *(None,) * len(shape), *self._axes
            return constrain(jnp.zeros((self._S, *shape, *x.shape), x.dtype), *axes)

        passing = _Passing(on_stages(), on_stages(), on_stages(self._ticks.kept))
        return passing, _Sums(totals, zeros(self._outer), zeros(self._stack[0]))

    def _tick(self, goes_forward: bool, goes_back: bool) -> Callable:
        def run(carry: tuple[_Passing, _Sums], t: jax.Array) -> tuple[tuple[_Passing, _Sums], None]:
            passing, sums = carry
            of_loss = jnp.zeros_like(passing.returned[0])
            if goes_forward:
                passing, y = self._forward(passing, t)
                if goes_back:
                    of_loss, sums = self._leave(y, t, sums)
            if goes_back:
                passing, sums = self._backward(passing, sums, of_loss, t)
            return (passing, sums), None

        return run

    def _forward(self, passing: _Passing, t: jax.Array) -> tuple[_Passing, jax.Array]:
        """Carry a microbatch forward on each stage. Return also what the last stage gives, on all of them."""
        (x, _), _ = self._model.enter(self._outer, self._rows, jnp.minimum(t, self._M - 1))

        def local(stack: Tree, rows: Tree, x: jax.Array, passing: _Passing, t: jax.Array) -> tuple:
            arrived, _, inputs = jax.tree.map(lambda each: each[0], passing)
            stage = jax.lax.axis_index(self._mesh_axis)
            index, is_live = self._index(t - stage)
            x = constrain(jnp.where(stage == 0, x, arrived), *self._axes)
            (y, _), _ = self._model.stage(stack, rows, index, stage, x)
            inputs = _put(inputs, index, x, is_live)
            last = jax.lax.psum(jnp.where(stage == self._S - 1, y, jnp.zeros_like(y)), self._mesh_axis)
            arrived = jax.lax.ppermute(y, self._mesh_axis, [(i, (i + 1) % self._S) for i in range(self._S)])
            return (arrived[None], inputs[None]), _after(constrain(last, *self._axes), arrived)

        (arrived, inputs), y = self._on_stages(local, (True, False, False, True, False), ((True, True), False))(
            self._stack, self._rows, x, passing, t
        )
        return passing._replace(arrived=arrived, inputs=inputs), y

    def _leave(self, y: jax.Array, t: jax.Array, sums: _Sums) -> tuple[jax.Array, _Sums]:
        """Return the gradient of the loss in what the last stage gave, and the sums with what follows it."""
        index = t - (self._S - 1)
        loss, back, of_leave = jax.vjp(
            lambda outer, y: self._model.leave(outer, self._rows, index, y), self._outer, y, has_aux=True
        )
        of_outer, of_y = back(jnp.ones_like(loss))
        totals = sums.totals._replace(leave=_added(sums.totals.leave, of_leave))
        of_y = _after(of_y, *map(jnp.sum, jax.tree.leaves(of_outer)))
        return of_y, sums._replace(totals=totals, outer=_added(sums.outer, of_outer))

    def _backward(self, passing: _Passing, sums: _Sums, of_loss: jax.Array, t: jax.Array) -> tuple[_Passing, _Sums]:
        """Carry the gradients of a microbatch back on each stage, and from the first one into what was before."""

        def local(stack: Tree, rows: Tree, passing: _Passing, of_loss: jax.Array, total: tuple, t: jax.Array) -> tuple:
            _, returned, inputs = jax.tree.map(lambda each: each[0], passing)
            stage = jax.lax.axis_index(self._mesh_axis)
            index, is_live = self._index(t - 2 * (self._S - 1) + stage)
            x = jax.lax.dynamic_index_in_dim(inputs, index % self._ticks.kept, keepdims=False)
            of_y = constrain(jnp.where(stage == self._S - 1, of_loss, returned), *self._axes)
            x = _after(x, of_y)
            trained, fixed = stack
            (_, loss), back, (of_stage, by_slot) = jax.vjp(
                lambda trained, x: self._model.stage((trained, fixed), rows, index, stage, x), trained, x, has_aux=True
            )
            of_stack, of_x = back((of_y, jnp.ones_like(loss)))
            of_slots = _live((jax.tree.map(lambda each: each[None], of_stage), by_slot, of_stack), is_live)
            first = jax.lax.psum(_live(of_x, is_live & (stage == 0)), self._mesh_axis)
            returned = jax.lax.ppermute(of_x, self._mesh_axis, [(i, (i - 1) % self._S) for i in range(self._S)])
            return returned[None], _added(total, of_slots), _after(constrain(first, *self._axes), returned)

        total = sums.totals.stage, sums.totals.by_slot, sums.stack
        returned, (of_stage, by_slot, of_stack), of_x = self._on_stages(
            local, (True, False, True, False, True, False), (True, True, False)
        )(self._stack, self._rows, passing, of_loss, total, t)
        index, is_live = self._index(t - 2 * (self._S - 1))
        (_, loss), back, of_enter = jax.vjp(
            lambda outer: self._model.enter(outer, self._rows, index), self._outer, has_aux=True
        )
        (of_outer,) = back((of_x, is_live.astype(loss.dtype)))
        of_enter = _live(of_enter, is_live)
        totals = sums.totals
        totals = totals._replace(enter=_added(totals.enter, of_enter), stage=of_stage, by_slot=by_slot)
        return passing._replace(returned=returned), _Sums(totals, _added(sums.outer, of_outer), of_stack)

    def _index(self, index: jax.Array) -> tuple[Index, jax.Array]:
        """Return the index of a microbatch, or the nearest that there is, and whether it is one."""
        return jnp.clip(index, 0, self._M - 1), (index >= 0) & (index < self._M)

    def _on_stages(self, function: Callable, on_stages: Any, results: Any) -> Callable:
        """Return function(*operands) on each stage; those and results that lie `on_stages` have parts there."""

        def spec(is_part: bool) -> PartitionSpec:
            return PartitionSpec(self._mesh_axis) if is_part else PartitionSpec()

        in_specs, out_specs = jax.tree.map(spec, on_stages), jax.tree.map(spec, results)
        # check_vma=False: kernels inside know of no other way.
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names={self._mesh_axis}, check_vma=False
        )


def _put(inputs: jax.Array, index: Index, x: jax.Array, is_live: jax.Array) -> jax.Array:
    """Return inputs of microbatches with one more, in its turn."""
    at = index % len(inputs)
    x = jnp.where(is_live, x, jax.lax.dynamic_index_in_dim(inputs, at, keepdims=False))
    return jax.lax.dynamic_update_index_in_dim(inputs, x, at, 0)


def _after(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Return x once others, of its shape or scalars, are there too, where their order matters: devices that are threads
    of a CPU wait for one another for ever if some send for an inner loop while others still send outside of it."""
    if target.platform() == "cpu":
        for other in others:
            x = jnp.where(other > jnp.inf, jnp.zeros_like(x), x)
    return x


def _live(tree: Tree, is_live: jax.Array) -> Tree:
    """Return a tree of arrays, or zeros."""
    return jax.tree.map(lambda x: jnp.where(is_live, x, jnp.zeros_like(x)), tree)


def _added(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, more)
