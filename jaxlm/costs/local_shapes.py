"""Arrays on one device of a mesh: their shapes and placements, from rules, layout and sizes alone.

The plans of a search, and of many batches, share these results. `heads`: the query heads whose key/value heads are
repeated until each device has those that its query heads read; None for no repetition.
"""

import functools
import math

from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Placement, Rules, local


@functools.lru_cache(maxsize=1 << 16)
def placed(rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...], heads: int | None) -> Placement:
    """Return the mesh axes with several devices that shard each dimension of an array while a layer computes."""
    placement = rules.placed(axes, _with_copies(rules, layout, axes, shape, heads), layout, computing=True)
    return tuple(tuple(name for name in over if layout[name] > 1) for over in placement)


@functools.lru_cache(maxsize=1 << 16)
def stored(rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...]) -> int:
    """Return the number of elements of a parameter on one device."""
    return rules.stored(axes, shape, layout)


@functools.lru_cache(maxsize=1 << 16)
def local_shape(
    rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...], heads: int | None
) -> tuple[int, ...]:
    """Return the shape of an array on one device, while a layer computes."""
    return local(
        placed(rules, layout, axes, shape, heads),
        _with_copies(rules, layout, axes, shape, heads),
        layout,
    )


def _with_copies(
    rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...], heads: int | None
) -> tuple[int, ...]:
    """Return a shape whose key/value heads are repeated until each device has those that its query heads read."""
    if heads is None:
        return shape
    (over,) = placed(rules, layout, ("act_heads",), (heads,), None)
    shards = layout.over(over)
    return tuple(
        math.lcm(n, shards) if axis in ("kv_heads", "act_kv_heads") else n for axis, n in zip(axes, shape, strict=True)
    )


@functools.lru_cache(maxsize=1 << 16)
def gathered_over(rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the mesh axes with several devices over which a parameter is gathered before a layer computes."""
    over = rules.gathered_over(axes, shape, layout)
    return tuple(name for name in layout if layout[name] > 1 and name in over)
