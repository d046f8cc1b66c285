"""Parallelism: a mesh of devices and one table from logical axes to mesh axes.

Models name the axes of their parameters and activations; nothing but this file knows which mesh axis a
name lands on. Mesh axes are Auto (GSPMD) axes: XLA's partitioner places the collectives.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

Table = Mapping[str, str | tuple[str, ...] | None]

TABLE: Table = {
    # parameters
    "layers": None,
    "vocab": "tensor",
    "positions": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_width": None,
    "feed_forward": "tensor",
    "channels": None,  # vectors as wide as the model: too small to be worth gathering
    # activations
    "batch": ("data", "fsdp"),
    "sequence": None,
    "act_model": None,
    "act_heads": "tensor",
    "act_kv_heads": "tensor",
    "act_head_width": None,
    "act_ff": "tensor",
    "act_vocab": "tensor",
}

# Dimensions that stay whole when their mesh axes do not divide them. Every other one must divide.
WHOLE_IF_UNEVEN = {"batch", "kv_heads", "act_kv_heads"}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence | None = None) -> Mesh:
    """A mesh of the first data × fsdp × tensor devices, `tensor` innermost (its traffic is the heaviest).

    Raises ValueError where there are fewer devices than that.
    """
    devices = jax.devices() if devices is None else list(devices)
    size = data * fsdp * tensor
    if size > len(devices):
        raise ValueError(f"a mesh of {data} × {fsdp} × {tensor} needs {size} devices; {len(devices)} are here")
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:size])


def partition(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh, table: Table = TABLE
) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry these logical axes.

    Raises ValueError where a mesh axis does not divide a dimension that has no right to stay whole.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {tuple(axes)} for shape {tuple(shape)}")
    entries = []
    for name, size in zip(axes, shape, strict=True):
        target = table[name] if name is not None else None
        names = (target,) if isinstance(target, str) else (target or ())
        parts = math.prod(mesh.shape[axis] for axis in names)
        if size % parts:
            if name not in WHOLE_IF_UNEVEN:
                raise ValueError(f"{'·'.join(names)} = {parts} does not divide {name} = {size}")
            target = None
        entries.append(target)
    return PartitionSpec(*entries)


def sharding(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, table: Table = TABLE) -> NamedSharding:
    """`partition` on a mesh of devices."""
    return NamedSharding(mesh, partition(axes, shape, mesh, table))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin the sharding of an activation, by its logical axes, inside jit under `jax.set_mesh`.

    Without a mesh it returns x.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def map_whole(function: Callable[[jax.Array], jax.Array], x: jax.Array, *axes: str | None) -> jax.Array:
    """function(x) for an x [M, …] with these logical axes, computed with whole entries of M on each device.

    `function` keeps the shape and treats each entry by itself. The result is laid out as x is declared. M is padded
    with zeros so that every device has as many. Inside jit under `jax.set_mesh`; without a mesh it is function(x).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(x)
    entries = list(partition(axes, x.shape, mesh))
    layouts = [PartitionSpec(*entries)]
    # One mesh axis after the other moves to the first dimension: each is one all-to-all (over data it is a slice, and
    # an all-gather back). Asked for at once, the partitioner replicates the array on its way.
    for axis in reversed(MESH_AXES):
        first, *others = ((entry,) if isinstance(entry, str) else (entry or ()) for entry in entries)
        entries = [(*(a for a in first if a != axis), axis), *(tuple(a for a in e if a != axis) for e in others)]
        layouts.append(PartitionSpec(*entries))
    padding = [(0, -len(x) % mesh.size)] + [(0, 0)] * (x.ndim - 1)
    y = jnp.pad(x, padding)
    for layout in layouts:
        y = jax.lax.with_sharding_constraint(y, layout)
    y = function(y)
    for layout in reversed(layouts):
        y = jax.lax.with_sharding_constraint(y, layout)
    return constrain(y[: len(x)], *axes)


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Host arrays [B, …] onto the mesh, B over the batch axes; each device receives only its rows."""

    def put(x: np.ndarray) -> jax.Array:
        axes = ("batch", "sequence")[: x.ndim]
        return jax.make_array_from_callback(x.shape, sharding(axes, x.shape, mesh), x.__getitem__)

    return {name: put(x) for name, x in batch.items()}
