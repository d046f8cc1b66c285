"""Arrays of a step on one device of its mesh: their shapes, and the mesh axes that shard them.

An array with rows is given with a single one. `num_query_heads`: the query heads whose key/value heads are repeated
until each device has those that its query heads read; None for no repetition.
"""

import functools
import math
from collections.abc import Sequence

from jaxlm.costs.memoized import memoized
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Placement, Rules, local, together

ROWS = ("batch", "expert_batch", "draws")  # logical axes of rows


def placed(
    work: Workload, axes: Sequence[str | None], shape: Sequence[int], num_query_heads: int | None = None
) -> Placement:
    """Return the mesh axes with several devices that shard each dimension of an array while a layer computes."""
    return _placed(work.rules, work.layout, tuple(axes), _with_row_shards(work, axes, shape), num_query_heads)


def gathered_over(work: Workload, axes: Sequence[str], shape: Sequence[int]) -> tuple[str, ...]:
    """Return the mesh axes with several devices over which a parameter is gathered before a layer computes."""
    return _gathered_over(work.rules, work.layout, tuple(axes), tuple(shape))


def shards(work: Workload, axis: str, size: int) -> int:
    """Return the number of shards of a dimension while a layer computes, uneven ones too."""
    return work.layout.over(together(placed(work, (axis,), (size,))))


def local_shape(
    work: Workload, axes: Sequence[str | None], shape: Sequence[int], num_query_heads: int | None = None
) -> tuple[int, ...]:
    """Return the shape of an array on one device while a layer computes. Mesh axes that shard parameters alone are
    gathered."""
    with_one = _local_shape(work.rules, work.layout, tuple(axes), _with_row_shards(work, axes, shape), num_query_heads)
    return _with_rows(axes, with_one, rows_by_axis(work))


def stored(work: Workload, axes: Sequence[str], shape: Sequence[int]) -> int:
    """Return the number of elements of a parameter on one device."""
    return _stored(work.rules, work.layout, tuple(axes), tuple(shape))


@memoized
def rows_by_axis(work: Workload) -> dict[str, int]:
    """Return the rows on one device by their logical axis."""
    shared = work.row_shards() // _shards_by_axis(work)["expert_batch"]
    return {"batch": work.rows(), "expert_batch": work.rows() * shared, "draws": work.draws()}


@memoized
def _shards_by_axis(work: Workload) -> dict[str, int]:
    """Return the shards of rows by their logical axis."""
    row_shards = work.row_shards()
    shared = work.layout.over(work.rules.over("expert_batch")) if row_shards > 1 else 1
    return {"batch": row_shards, "expert_batch": shared, "draws": row_shards}


def _with_row_shards(work: Workload, axes: Sequence[str | None], shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with one row for each shard of the batch: placements then do not depend on the number of rows."""
    return _with_rows(axes, tuple(shape), _shards_by_axis(work))


def _with_rows(axes: Sequence[str | None], shape: tuple[int, ...], rows: dict[str, int]) -> tuple[int, ...]:
    """Return a shape with these numbers of rows along the axes ROWS."""
    row_axis = next((axis for axis in ROWS if axis in axes), None)
    if row_axis is None:
        return shape
    at = axes.index(row_axis)
    return (*shape[:at], rows[row_axis], *shape[at + 1 :])


# The plans of a search, and of many batches, share the results of what follows from rules, layout and sizes alone.
@functools.lru_cache(maxsize=1 << 16)
def _placed(rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...], heads: int | None) -> Placement:
    placement = rules.placed(axes, _with_copies(rules, layout, axes, shape, heads), layout, computing=True)
    return tuple(tuple(name for name in over if layout[name] > 1) for over in placement)


@functools.lru_cache(maxsize=1 << 16)
def _stored(rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...]) -> int:
    return rules.stored(axes, shape, layout)


@functools.lru_cache(maxsize=1 << 16)
def _local_shape(
    rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...], heads: int | None
) -> tuple[int, ...]:
    return local(
        _placed(rules, layout, axes, shape, heads),
        _with_copies(rules, layout, axes, shape, heads),
        layout,
    )


@functools.lru_cache(maxsize=1 << 16)
def _gathered_over(rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...]) -> tuple[str, ...]:
    over = rules.gathered_over(axes, shape, layout)
    return tuple(name for name in layout if layout[name] > 1 and name in over)


def _with_copies(
    rules: Rules, layout: Layout, axes: tuple, shape: tuple[int, ...], heads: int | None
) -> tuple[int, ...]:
    """Return a shape whose key/value heads are repeated until each device has those that its query heads read."""
    if heads is None:
        return shape
    (over,) = _placed(rules, layout, ("act_heads",), (heads,), None)
    shards = layout.over(over)
    return tuple(
        math.lcm(n, shards) if axis in ("kv_heads", "act_kv_heads") else n for axis, n in zip(axes, shape, strict=True)
    )
