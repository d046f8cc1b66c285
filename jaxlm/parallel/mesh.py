"""Meshes of devices."""

import functools
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxlm.core.errors import InputError
from jaxlm.parallel.layout import AXES, OVER_SLICES, Layout, over_slices


def make_mesh(layout: Layout = Layout(), devices: Sequence | None = None) -> Mesh:
    """Return a mesh of the first devices, as many as the layout has, with the innermost axis nearest together.

    Where TPUs lie in several slices, each a fast network of its own, OVER_SLICES go over the slow network between them,
    in their order; over the network between nodes of other devices any axis may go, the outermost first. Warns where an
    axis of the mesh shares links of the torus with another.

    Raises InputError where there are fewer devices than that, or where OVER_SLICES do not divide over the slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if layout.size > len(devices):
        raise InputError(f"a mesh of {layout} needs {layout.size} devices; {len(devices)} are here")
    shape = tuple(layout.values())
    if layout.size < len(devices):  # in their order: a part of a topology need not be one
        return _mesh(np.array(devices[: layout.size]).reshape(shape))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        arrange = functools.partial(mesh_utils.create_device_mesh, shape, devices)
    else:
        axes = OVER_SLICES if devices[0].platform == "tpu" else AXES  # nodes of GPUs are "slices" too
        outer = over_slices(layout, slices, axes)
        inner = tuple(size // outer[axis] for axis, size in layout.items())
        arrange = functools.partial(mesh_utils.create_hybrid_device_mesh, inner, tuple(outer.values()), devices)
    try:
        return _mesh(arrange())
    except NotImplementedError:
        warnings.warn(f"in a mesh of {layout} axes share links of this topology", stacklevel=2)
        return _mesh(arrange(allow_split_physical_axes=True))


def _mesh(devices: np.ndarray) -> Mesh:
    """Return the mesh of devices that are arranged by `Layout`, as many along each of its axes.

    Where there are stages, `data` is the first of its axes: the gradients of all stages are summed over `data` in a
    shard_map around theirs, and XLA of JAX 0.12 aborts on nested axes that are not in the order of the mesh.
    """
    names = list(Layout())
    if dict(zip(names, devices.shape, strict=True))["pipeline"] > 1:
        devices = np.moveaxis(devices, names.index("data"), 0)
        names.sort(key=lambda name: name != "data")
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * devices.ndim)
