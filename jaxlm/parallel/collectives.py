"""Computations over the shards of a mesh: sums over replicas, functions of shards, functions of whole entries."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import constrain, mesh_around, partition, rules_around


def summed_over_replicas(function: Callable[[Any, Any, jax.Array | int], Any], whole: Any, batch: Any) -> Any:
    """function(whole, batch, part), whose results are sums over the rows of `batch`, added once over the mesh axes that
    shard the batch alone (`Rules.replicas`).

    Inside, each part of these axes sees its rows alone, so that a loop there sends nothing over them: XLA would leave
    the all-reduce of an accumulated sum in the loop. `part` is 0, 1, … along the axes; what is drawn at random
    there (dropout) depends on how many parts there are. Results are float32.
    """
    mesh = mesh_around()
    axes = tuple(axis for axis in rules_around().replicas if not mesh.empty and mesh.shape[axis] > 1)
    if not axes:
        return function(whole, batch, 0)

    def local(whole: Any, batch: Any) -> Any:
        return jax.lax.psum(function(whole, batch, jax.lax.axis_index(axes)), axes)

    everywhere, rows = PartitionSpec(), PartitionSpec(axes)
    # check_vma=False: whole is not varying over replicas, and its gradients inside must stay the sums of this part.
    return jax.shard_map(
        local, in_specs=(everywhere, rows), out_specs=everywhere, axis_names=set(axes), check_vma=False
    )(whole, batch)


def on_each_shard(
    function: Callable[..., Any], axis: str, is_sharded: Sequence[bool], shared: str | None = None
) -> Callable[..., Any]:
    """Return a function that computes function(*operands) on each shard of a logical axis by itself.

    Operands that are sharded, and all results, are pytrees of arrays whose first dimension holds the shards, one after
    the other; the other operands are given to each shard as they are. Mesh axes that do not shard `axis` go on to shard
    other dimensions inside. With one shard it is `function` itself. Called inside jit under `jax.set_mesh`.

    Args:
      is_sharded: of each operand, whether shards have parts of it.
      shared: a logical axis whose entries the devices of a shard share out. They have the same operands, of which the
        function takes its `own_part`, and must give the same results.
    """

    @functools.wraps(function)
    def mapped(*operands: Any) -> Any:
        mesh, axes = mesh_around(), rules_around().over(axis)
        manual = {*axes, *(() if shared is None else rules_around().over(shared))}
        if mesh.empty or Layout(mesh.shape).over(manual) == 1:
            return function(*operands)
        parts = PartitionSpec(axes)
        specs = tuple(parts if sharded else PartitionSpec() for sharded in is_sharded)
        # check_vma=False: interpreted kernels know of no other way.
        return jax.shard_map(function, in_specs=specs, out_specs=parts, axis_names=manual, check_vma=False)(*operands)

    return mapped


def parts_of(axis: str) -> int:
    """Return among how many devices the `on_each_shard` around shares out a logical axis; 1 where it does not."""
    mesh = mesh_around()
    return 1 if mesh.empty or not mesh.manual_axes else Layout(mesh.shape).over(_sharing(axis))


def own_part(x: jax.Array, axis: str) -> jax.Array:
    """Return the entries [n / P, …] of x [n, …] that this device has where P devices share out a logical axis: from its
    own index on every P-th, so that all have about as many of the last ones, which see most."""
    if (parts := parts_of(axis)) == 1:
        return x
    by_part = x.reshape(-1, parts, *x.shape[1:])
    return jax.lax.dynamic_index_in_dim(by_part, jax.lax.axis_index(_sharing(axis)), 1, keepdims=False)


def all_parts(x: jax.Array, axis: str, *axes: str | None) -> jax.Array:
    """Return the entries [n, …] of all devices that share out a logical axis, of each device's `own_part`. `axes`: the
    logical axes of the other dimensions, which lie as before; left to itself, the partitioner gathers them too."""
    if parts_of(axis) == 1:
        return x
    over = _sharing(axis)

    def gathered(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, over, axis=1).reshape(-1, *x.shape[1:])

    return on_each_device(gathered, (x, (None, *axes)))


def of_parts(x: jax.Array, part: jax.Array, axis: str) -> jax.Array:
    """Return the entries [n, …] that lie on the devices with these indices, int32 [n], among those that share out a
    logical axis."""
    if parts_of(axis) == 1:
        return x
    over = _sharing(axis)
    is_own = (part == jax.lax.axis_index(over)).reshape(-1, *[1] * (x.ndim - 1))
    return on_each_device(lambda x: jax.lax.psum(x, over), (jnp.where(is_own, x, 0), (None,) * x.ndim))


def _sharing(axis: str) -> tuple[str, ...]:
    """Return the mesh axes over which the `on_each_shard` around shares out a logical axis."""
    return tuple(name for name in rules_around().over(axis) if name in mesh_around().manual_axes)


def on_any_shard(condition: jax.Array) -> jax.Array:
    """Return whether a condition holds on any shard of the `on_each_shard` around, so that all shards branch alike.

    A branch may exchange arrays over the other mesh axes, which not all devices understand as an exchange among few.
    Where there are no others it is the shard's own condition.
    """
    return largest_on_shards(condition.astype(jnp.int32)) > 0


def largest_on_shards(number: jax.Array) -> jax.Array:
    """Return the largest of the numbers on the shards around, so that all loop alike, as `on_any_shard` does."""
    mesh = mesh_around()
    if mesh.empty or not mesh.manual_axes or mesh.size == Layout(mesh.shape).over(mesh.manual_axes):
        return number
    return jax.lax.pmax(number, mesh.manual_axes)


def on_each_device(
    function: Callable[..., Any],
    *operands: tuple[jax.Array | None, Sequence[str | None]],
    results: Sequence[Sequence[str | None] | PartitionSpec] | None = None,
) -> Any:
    """function(*arrays) on each device's own parts of them; what it gives lies as the first array does.

    Args:
      function: gives for parts of the arrays the same part of its result, or results; a Pallas kernel may be in it.
      operands: each array, or None, with its logical axes.
      results: the logical axes of each result, of a tuple; each dimension lies as that of an operand with its axis. Or
        its PartitionSpec.
    """
    mesh = mesh_around()
    arrays = [x for x, _ in operands]
    left = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if mesh.size <= 1 or not left:
        return function(*arrays)
    specs = tuple(None if x is None else partition(axes, x.shape, mesh, rules_around()) for x, axes in operands)
    # check_vma=False: interpreted kernels know of no other way, and where gradients are summed is the same.
    out_specs = (
        specs[0]
        if results is None
        else tuple(each if isinstance(each, PartitionSpec) else _like(each, operands, specs) for each in results)
    )
    mapped = jax.shard_map(function, in_specs=specs, out_specs=out_specs, axis_names=left, check_vma=False)
    return mapped(*arrays)


class Gathers(NamedTuple):
    """The dimensions of an array that a function `on_each_device` gathers from its parts, each with the mesh axes."""

    over: tuple[tuple[int, tuple[str, ...]], ...]

    @classmethod
    def of(cls, shape: Sequence[int], stored: Sequence[str | None], computing: Sequence[str | None]) -> Self:
        """Return what is gathered of an array with the logical axes `stored` to lie as if it had `computing`.

        Its gradient is then a reduce-scatter. XLA for TPUs would leave it the sum of whole arrays, an all-reduce, where
        the array is gathered on its way into the function.
        """
        mesh, rules = mesh_around(), rules_around()
        if mesh.size <= 1:
            return cls(())
        placed = (map(_names, partition(axes, shape, mesh, rules)) for axes in (stored, computing))
        over = tuple((i, lies, needed) for i, (lies, needed) in enumerate(zip(*placed, strict=True)) if lies != needed)
        assert all(lies[: len(needed)] == needed for _, lies, needed in over), (
            f"{stored} is not gathered to {computing}"
        )
        return cls(tuple((i, lies[len(needed) :]) for i, lies, needed in over))

    def __call__(self, part: jax.Array) -> jax.Array:
        """Return the array gathered, of a device's own part of it."""
        for dimension, axes in self.over:
            part = jax.lax.all_gather(part, axes, axis=dimension, tiled=True)
        return part

    def scattered_sum(self, whole: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Return a device's own part of the sum of gathered arrays over mesh axes."""
        for dimension, over in self.over:
            whole = jax.lax.psum_scatter(whole, over, scatter_dimension=dimension, tiled=True)
        scattered = {axis for _, over in self.over for axis in over}
        left = tuple(axis for axis in axes if axis not in scattered)
        return jax.lax.psum(whole, left) if left else whole


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def placement(axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Return `partition` of an array on the mesh around; of one device where there is none."""
    mesh = mesh_around()
    return PartitionSpec() if mesh.empty else partition(axes, shape, mesh, rules_around())


def axes_over(axis: str, size: int) -> tuple[str, ...]:
    """Return the mesh axes with several devices that shard a logical axis of this size."""
    mesh = mesh_around()
    return () if mesh.empty else _names(partition((axis,), (size,), mesh, rules_around())[0])


def _like(
    axes: Sequence[str | None], operands: Sequence[tuple[Any, Sequence[str | None]]], specs: Sequence[Any]
) -> PartitionSpec:
    """Return the specification of an array each dimension of which lies as that of an operand with its logical axis."""
    pairs = zip(operands, specs, strict=True)
    lies = {
        axis: entry
        for (x, of_operand), spec in pairs
        if x is not None
        for axis, entry in zip(of_operand, spec, strict=True)
        if axis is not None
    }
    return PartitionSpec(*(None if axis is None else lies.get(axis) for axis in axes))


def summed_over_parts(x: jax.Array) -> jax.Array:
    """Return the sum of an array over the parts of the `summed_over_replicas` around; for what has no gradient."""
    mesh = mesh_around()
    parts = () if mesh.empty else tuple(axis for axis in rules_around().replicas if axis in mesh.manual_axes)
    return jax.lax.psum(x, parts) if parts else x


def map_whole(function: Callable[[jax.Array], jax.Array], x: jax.Array, *axes: str | None) -> jax.Array:
    """function(x) for an x [M, …] with these logical axes, computed with whole entries of M on each device.

    `function` keeps the shape and treats each entry by itself. The result is laid out as x is declared. M is padded
    with zeros so that every device has as many. Inside jit under `jax.set_mesh`; without a mesh it is function(x).
    """
    mesh = mesh_around()
    if mesh.empty:
        return function(x)
    entries = list(partition(axes, x.shape, mesh, rules_around()))
    layouts = [PartitionSpec(*entries)]
    # One mesh axis after the other moves to the first dimension: each is one all-to-all (over an axis that shards
    # none of them a slice, and an all-gather back). Asked for at once, the partitioner replicates the array on its way.
    names = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    for axis in reversed(names):
        first, *others = ((entry,) if isinstance(entry, str) else (entry or ()) for entry in entries)
        entries = [(*(a for a in first if a != axis), axis), *(tuple(a for a in e if a != axis) for e in others)]
        layouts.append(PartitionSpec(*entries))
    padding = [(0, -len(x) % Layout({name: mesh.shape[name] for name in names}).size)] + [(0, 0)] * (x.ndim - 1)
    y = jnp.pad(x, padding)
    for layout in layouts:
        y = jax.lax.with_sharding_constraint(y, layout)
    y = function(y)
    for layout in reversed(layouts):
        y = jax.lax.with_sharding_constraint(y, layout)
    return constrain(y[: len(x)], *axes)
