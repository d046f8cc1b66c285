"""Meshes of devices."""

import functools
import math
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxlm.core.errors import InputError
from jaxlm.parallel.layout import OVER_SLICES, Layout


def make_mesh(layout: Layout = Layout(), devices: Sequence | None = None) -> Mesh:
    """Return a mesh of the first devices, as many as the layout has, with the innermost axis nearest together.

    Where the devices lie in several slices, each a fast network of its own, OVER_SLICES go over the slow network
    between them, in their order. Warns where an axis of the mesh shares links of the
    torus with another.

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
        outer = _over_slices(layout, slices)
        inner = tuple(size // outer[axis] for axis, size in layout.items())
        arrange = functools.partial(mesh_utils.create_hybrid_device_mesh, inner, tuple(outer.values()), devices)
    try:
        return _mesh(arrange())
    except NotImplementedError:
        warnings.warn(f"in a mesh of {layout} axes share links of this topology", stacklevel=2)
        return _mesh(arrange(allow_split_physical_axes=True))


def _over_slices(layout: Layout, slices: int) -> Layout:
    """Return how the slices are shared among the axes that may go over the network between them."""
    left, outer = slices, {}
    for axis in OVER_SLICES:
        outer[axis] = math.gcd(layout[axis], left)
        left //= outer[axis]
    if left > 1:
        named, sizes = (" × ".join(map(str, x)) for x in (outer, (layout[axis] for axis in outer)))
        raise InputError(
            f"the devices lie in {slices} slices, over which {named} = {sizes} does not divide: the slow network "
            "between slices carries these axes alone"
        )
    return Layout(outer)


def _mesh(devices: np.ndarray) -> Mesh:
    return Mesh(devices, tuple(Layout()), axis_types=(AxisType.Auto,) * devices.ndim)
