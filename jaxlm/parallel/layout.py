"""Mesh layouts: how many devices lie along each axis. Imports no JAX."""

import math
from collections.abc import Iterable, Iterator, Mapping

from jaxlm.core.errors import InputError

# The axes of every mesh, outermost first: `tensor` has the heaviest traffic, and the nearest neighbours.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
# Those that may reach over the slow network between slices, since they send least often, in their order.
OVER_SLICES = ("pipeline", "data", "fsdp")


class Layout(Mapping[str, int]):
    """Devices along each mesh axis: an immutable, hashable mapping from AXES to sizes, 1 where none is given.

    Raises ValueError for an axis that is not one of AXES, and for a size below 1.
    """

    __slots__ = ("_hash", "_sizes")

    def __init__(self, sizes: Mapping[str, int] | None = None, **more: int):
        given = {**(sizes or {}), **more}
        if unknown := given.keys() - set(AXES):
            raise ValueError(f"there is no mesh axis {', '.join(sorted(unknown))}; the axes are {', '.join(AXES)}")
        if any(size < 1 for size in given.values()):
            raise ValueError(f"the sizes of a mesh are 1 or more, not {given}")
        self._sizes = {axis: given[axis] for axis in AXES if given.get(axis, 1) > 1}
        self._hash = hash(tuple(self._sizes.items()))  # caches ask for it often

    def __getitem__(self, axis: str) -> int:
        if axis not in AXES:
            raise KeyError(axis)
        return self._sizes.get(axis, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(AXES)

    def __len__(self) -> int:
        return len(AXES)

    def __eq__(self, other: object) -> bool:
        return self._sizes == other._sizes if isinstance(other, Layout) else dict(self) == other

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'{axis}={size}' for axis, size in self._sizes.items())})"

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self._sizes.items()) or "one device"

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(self._sizes.values())

    def over(self, axes: Iterable[str]) -> int:
        """Return the number of shards that these axes together make."""
        return math.prod(self[axis] for axis in axes)

    def replace(self, **sizes: int) -> "Layout":
        """Return this layout with other sizes of some axes."""
        return Layout({**self, **sizes})


def over_slices(layout: Layout, slices: int, axes: Iterable[str] = OVER_SLICES) -> Layout:
    """Return how a number of slices, each a fast network of its own, are shared among `axes`, in their order.

    Raises InputError where these axes do not divide over the slices.
    """
    left, outer = slices, {}
    for axis in axes:
        outer[axis] = math.gcd(layout[axis], left)
        left //= outer[axis]
    if left > 1:
        names, sizes = (" × ".join(map(str, each)) for each in (outer, (layout[axis] for axis in outer)))
        raise InputError(
            f"{names} = {sizes} does not divide over {slices} slices: these axes alone may cross the network between "
            f"slices; set mesh.data to a multiple of {slices}"
        )
    return Layout(outer)


def can_cross(layout: Layout, slices: int) -> bool:
    """Return whether OVER_SLICES divide over a number of slices."""
    try:
        over_slices(layout, slices)
    except InputError:
        return False
    return True
