"""Parallelism: a mesh of devices and one table from logical axes to mesh axes.

Models name the axes of their parameters and activations; nothing but this file knows which mesh axis a
name lands on. Mesh axes are Auto (GSPMD) axes: XLA's partitioner places the collectives.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlm.core.errors import InputError

MESH_AXES = ("data", "fsdp", "tensor")

TABLE: Mapping[str, str | tuple[str, ...] | None] = {
    # parameters
    "layers": None,
    "vocab": "tensor",
    "positions": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "feed_forward": "tensor",
    "channels": None,  # vectors as wide as the model: too small to be worth gathering
    # activations
    "batch": ("data", "fsdp"),
    "sequence": None,
    "stream": "tensor",  # the sequence between attention and feed-forward (arXiv:2205.05198, section 4.2.2)
    "act_model": None,
    "act_heads": "tensor",
    "act_kv_heads": "tensor",
    "act_head_dim": None,
    "act_ff": "tensor",
    "act_vocab": "tensor",
}

# Dimensions that stay whole when their mesh axes do not divide them. Every other one must divide.
WHOLE_IF_UNEVEN = {"batch", "stream", "kv_heads"}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence | None = None) -> Mesh:
    """A mesh of the first data × fsdp × tensor devices, `tensor` innermost (its traffic is the heaviest).

    Where the devices lie in several slices, each a fast network of its own, `data` and then `fsdp` go over the slow
    network between them. Warns where an axis of the mesh shares links of the torus with another.

    Raises InputError where there are fewer devices than that, or where data × fsdp does not divide over the slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = data, fsdp, tensor
    size = math.prod(shape)
    if size > len(devices):
        raise InputError(f"a mesh of {data} × {fsdp} × {tensor} needs {size} devices; {len(devices)} are here")
    if size < len(devices):  # in their order: a part of a topology need not be one
        return _mesh(np.array(devices[:size]).reshape(shape))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    between = math.gcd(data, slices)
    outer = between, math.gcd(fsdp, slices // between), 1
    if math.prod(outer) != slices:
        raise InputError(
            f"the devices lie in {slices} slices, over which data × fsdp = {data} × {fsdp} does not divide: the slow "
            "network between slices carries these two axes alone"
        )
    inner = tuple(n // o for n, o in zip(shape, outer, strict=True))
    if slices == 1:
        arrange = functools.partial(mesh_utils.create_device_mesh, inner, devices)
    else:
        arrange = functools.partial(mesh_utils.create_hybrid_device_mesh, inner, outer, devices)
    try:
        return _mesh(arrange())
    except NotImplementedError:
        warnings.warn(f"in a mesh of {data} × {fsdp} × {tensor} axes share links of this topology", stacklevel=2)
        return _mesh(arrange(allow_split_physical_axes=True))


def _mesh(devices: np.ndarray) -> Mesh:
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry these logical axes.

    Raises ValueError where a mesh axis does not divide a dimension that has no right to stay whole.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {tuple(axes)} for shape {tuple(shape)}")
    manual = getattr(mesh, "manual_axes", ())  # of a shard_map around this: arrays are parts along them already
    entries = []
    for name, size in zip(axes, shape, strict=True):
        target, names = TABLE[name] if name is not None else None, _mesh_axes(name)
        if manual:
            target = names = tuple(axis for axis in names if axis not in manual)
        parts = math.prod(mesh.shape[axis] for axis in names)
        if size % parts:
            if name not in WHOLE_IF_UNEVEN:
                raise ValueError(f"{'·'.join(names)} = {parts} does not divide {name} = {size}")
            target = None
        entries.append(target)
    return PartitionSpec(*entries)


def sharding(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """`partition` on a mesh of devices."""
    return NamedSharding(mesh, partition(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def _mesh_around() -> AbstractMesh:
    """The mesh of the `jax.set_mesh` around this. Raises ValueError for one that the table knows nothing of."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and (mesh.axis_names != MESH_AXES or AxisType.Explicit in mesh.axis_types):
        axes = ", ".join(f"{name} ({type.name})" for name, type in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise ValueError(
            f"a model runs on a mesh that jaxlm.parallel.sharding.make_mesh makes; this one has the axes {axes}"
        )
    return mesh


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin the sharding of an activation, by its logical axes, inside jit under `jax.set_mesh`.

    Without a mesh it returns x.
    """
    mesh = _mesh_around()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def by_parts(x: jax.Array, axis: str) -> jax.Array:
    """x [n, …], whose first dimension is this logical axis, as [P, n / P, …]: P parts, each on devices of its own."""
    mesh = _mesh_around()
    if mesh.empty:
        return x[None]
    (target,) = partition((axis,), x.shape[:1], mesh)
    parts = math.prod(mesh.shape[name] for name in ((target,) if isinstance(target, str) else target or ()))
    return jax.lax.with_sharding_constraint(x.reshape(parts, -1, *x.shape[1:]), PartitionSpec(target))


def shards_of(axis: str) -> int:
    """Into how many parts the mesh around this cuts a logical axis, where its size lets it."""
    mesh = _mesh_around()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in _mesh_axes(axis))


def is_sharded(axis: str) -> bool:
    """Whether the mesh around this parts a logical axis among devices."""
    return shards_of(axis) > 1


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    """What the table says of a logical axis."""
    target = None if axis is None else TABLE[axis]
    return (target,) if isinstance(target, str) else (target or ())


def summed_over_data(function: Callable[[Any, Any, jax.Array | int], Any], whole: Any, batch: Any) -> Any:
    """function(whole, batch, part), whose results are sums over the rows of `batch`, added over the `data` axis once.

    Inside, each part of the axis sees its rows alone, so that a loop there sends nothing over it: XLA would leave the
    all-reduce of an accumulated sum in the loop. `part` is 0, 1, … along the axis; what is drawn at random
    there (dropout) depends on how many parts there are. Results are float32.
    """
    mesh = _mesh_around()
    if mesh.empty or mesh.shape["data"] == 1:
        return function(whole, batch, 0)

    def local(whole: Any, batch: Any) -> Any:
        return jax.lax.psum(function(whole, batch, jax.lax.axis_index("data")), "data")

    everywhere, rows = PartitionSpec(), PartitionSpec("data")
    # check_vma=False: whole is not varying over data, and its gradients inside must stay the sums of this part.
    return jax.shard_map(
        local, in_specs=(everywhere, rows), out_specs=everywhere, axis_names={"data"}, check_vma=False
    )(whole, batch)


def on_each_device(function: Callable[..., Any], *operands: tuple[jax.Array | None, Sequence[str | None]]) -> Any:
    """function(*arrays) on each device's own parts of them; what it gives lies as the first array does.

    Args:
      function: gives for parts of the arrays the same part of its result, or results; a Pallas kernel may be in it.
      operands: each array, or None, with its logical axes.
    """
    mesh = _mesh_around()
    arrays = [x for x, _ in operands]
    left = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if mesh.size <= 1 or not left:
        return function(*arrays)
    specs = tuple(None if x is None else partition(axes, x.shape, mesh) for x, axes in operands)
    # check_vma=False: interpreted kernels know of no other way, and where gradients are summed is the same.
    mapped = jax.shard_map(function, in_specs=specs, out_specs=specs[0], axis_names=left, check_vma=False)
    return mapped(*arrays)


@functools.lru_cache
def process_rows(batch: int, mesh: Mesh) -> np.ndarray:
    """The rows of a batch that lie on the devices of this process, int [rows], ascending."""
    held = sharding(("batch",), (batch,), mesh).addressable_devices_indices_map((batch,)).values()
    return np.unique(np.concatenate([np.arange(batch)[rows] for (rows,) in held]))


@functools.lru_cache
def _parts(mesh: Mesh) -> tuple[int, int]:
    """Into how many parts the mesh cuts a batch, and how many of them this process has."""
    over = [MESH_AXES.index(axis) for axis in TABLE["batch"]]
    ours = np.isin(mesh.device_ids, [device.id for device in mesh.local_devices])
    return math.prod(mesh.device_ids.shape[axis] for axis in over), len(np.unique(np.argwhere(ours)[:, over], axis=0))


def map_whole(function: Callable[[jax.Array], jax.Array], x: jax.Array, *axes: str | None) -> jax.Array:
    """function(x) for an x [M, …] with these logical axes, computed with whole entries of M on each device.

    `function` keeps the shape and treats each entry by itself. The result is laid out as x is declared. M is padded
    with zeros so that every device has as many. Inside jit under `jax.set_mesh`; without a mesh it is function(x).
    """
    mesh = _mesh_around()
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
    """Host arrays [rows of this process, …] onto the mesh as global arrays [B, …], B over the batch axes."""
    parts, ours = _parts(mesh)

    def put(x: np.ndarray) -> jax.Array:
        shape = (len(x) * parts // ours, *x.shape[1:])
        rows = process_rows(shape[0], mesh)

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            first, behind, _ = index[0].indices(shape[0])
            return x[slice(*np.searchsorted(rows, (first, behind))), *index[1:]]

        axes = ("batch", "sequence")[: x.ndim]
        return jax.make_array_from_callback(shape, sharding(axes, shape, mesh), piece)

    return {name: put(x) for name, x in batch.items()}
