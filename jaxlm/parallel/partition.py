"""Partitioning arrays by their logical axes: outside of a program by a mesh, inside by the mesh and rules around it.

Mesh axes are Auto (GSPMD) axes: XLA's partitioner places the collectives.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import TRAIN, Rules

# A user context: JAX keys its caches by it, so that what is traced under some rules is not reused under others.
_rules = jax.make_user_context(TRAIN)


@contextlib.contextmanager
def using_rules(rules: Rules) -> Iterator[None]:
    """Trace models inside under these rules; outside they are TRAIN. Also a decorator of a function."""
    with _rules(rules):
        yield


def rules_around() -> Rules:
    """Return the rules of the surrounding `using_rules`."""
    return _rules.value


def partition(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    *,
    computing: bool = False,
) -> PartitionSpec:
    """Return the PartitionSpec of an array whose dimensions have these logical axes, under these rules or those around:
    of a parameter as it is stored, or while a layer is `computing` with it.

    Raises ValueError where a mesh axis does not divide a dimension that has no right to stay whole.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {tuple(axes)} for shape {tuple(shape)}")
    sizes = _sizes_left(mesh)

    def entry(over: tuple[str, ...]) -> tuple[str, ...] | str | None:
        several = tuple(axis for axis in over if sizes[axis] > 1)
        return None if not several else several[0] if len(several) == 1 else several

    return PartitionSpec(
        *map(entry, (rules or rules_around()).placed(axes, shape, sizes, computing=computing, exact=True))
    )


def named_sharding(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules | None = None
) -> NamedSharding:
    """Return `partition` as a sharding over a mesh of devices."""
    return NamedSharding(mesh, partition(axes, shape, mesh, rules))


def on_every_device(arrays: Any, mesh: Mesh) -> Any:
    """Return a tree of arrays on a mesh as numpy arrays, whole in each process."""
    whole = jax.jit(lambda arrays: arrays, out_shardings=replicated(mesh))(arrays)
    return jax.tree.map(np.asarray, whole)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding in which every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def mesh_around() -> AbstractMesh:
    """Return the mesh of the surrounding `jax.set_mesh`, empty where there is none.

    Raises ValueError for a mesh that the rules know nothing of.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and ({*mesh.axis_names} != {*Layout()} or AxisType.Explicit in mesh.axis_types):
        axes = ", ".join(f"{name} ({type.name})" for name, type in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise ValueError(
            f"a model runs on a mesh that jaxlm.parallel.mesh.make_mesh makes; this one has the axes {axes}"
        )
    return mesh


def constrain(x: jax.Array, *axes: str | None, computing: bool = False) -> jax.Array:
    """Pin the sharding of an array by its logical axes, under the mesh and rules around; `computing` as in `partition`.

    Returns x where there is no mesh.
    """
    mesh = mesh_around()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh, rules_around(), computing=computing))


def by_shards(x: jax.Array, *axes: str) -> jax.Array:
    """Return x [n, …] as [P, n / P, …], each of P shards on devices of its own; `axes` are those of its first dimension
    or of its first two, [n, m, …] as [P, n / P₁, m / P₂, …] with P = P₁ · P₂ where the second has several shards."""
    mesh = mesh_around()
    if mesh.empty:
        return x[None]
    first, *second = partition(axes, x.shape[: len(axes)], mesh, rules_around())
    shards, parts = (shards_of(axis, size) for axis, size in zip((*axes, None)[:2], (*x.shape, 1)[:2], strict=True))
    if parts == 1:
        return jax.lax.with_sharding_constraint(x.reshape(shards, -1, *x.shape[1:]), PartitionSpec(first))
    x = x.reshape(shards, -1, parts, x.shape[1] // parts, *x.shape[2:]).swapaxes(1, 2)
    x = jax.lax.with_sharding_constraint(x, PartitionSpec(first, *second))
    return x.reshape(-1, *x.shape[2:])


def shards_of(axis: str | None, size: int, after: Sequence[tuple[str, int]] = ()) -> int:
    """Return the number of shards of a dimension of this size under the mesh and rules around. `after`: the axes and
    sizes of the dimensions before it, which take their mesh axes first."""
    mesh = mesh_around()
    if mesh.empty:
        return 1
    layout = _sizes_left(mesh)
    axes, shape = zip(*after, (axis, size), strict=True)
    return math.prod(layout[name] for name in rules_around().placed(axes, shape, layout, exact=True)[-1])


def is_sharded(axis: str) -> bool:
    """Return whether the mesh around shards a logical axis where its size lets it."""
    mesh = mesh_around()
    return not mesh.empty and Layout(_sizes_left(mesh)).over(rules_around().over(axis)) > 1


def gathers_parameters() -> bool:
    """Return whether, on the mesh around, parameters are gathered before a layer computes with them."""
    mesh, rules = mesh_around(), rules_around()
    return not mesh.empty and Layout(_sizes_left(mesh)).over(rules.of_parameters - rules.of_layers) > 1


def _sizes_left(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Return the sizes of a mesh's axes, 1 for those that are manual: inside their shard_map arrays are shards."""
    manual = getattr(mesh, "manual_axes", ())
    return {axis: 1 if axis in manual else size for axis, size in mesh.shape.items()}
