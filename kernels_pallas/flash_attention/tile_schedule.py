"""The schedule of a TPU kernel: a list of the tiles of scores that it computes, in order, which its index maps read.

A step of the grid takes about 0.35 µs even if it computes nothing (JAX's documentation of Pallas on TPUs), as long as
the products of a small tile. Without the list, such steps would be half of all with causal attention, and nearly all
with a window.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import pallas as pl

from kernels_pallas.core.attention.key_range import array_module
from kernels_pallas.flash_attention.blocks import key_ranges

# The keys of a tile come in parts, of which some may be fully masked, and others fully unmasked.
PARTS = 2
_EVERY_PART = (1 << PARTS) - 1
# A tile's bits from the lowest: two marks, a mark for each part that is computed and for each that is fully unmasked;
# its block of keys (8 million keys in blocks of 512), and its block of queries, of which a list may have MAX_OUTER.
_FIRST, _LAST, _COMPUTED, _UNMASKED = 0, 1, 2, 2 + PARTS
_MARKS = 2 + 2 * PARTS
_INNER_BITS = 14
MAX_OUTER = 2 ** (31 - _MARKS - _INNER_BITS)
# Tiles that one list may hold: 512 KiB, half of a TPU's scalar memory.
MAX_TILES = 2**17


class TileSchedule(NamedTuple):
    """A list of tiles for each sequence, int32 [B, any length], or [1, …] for all sequences, and a number of steps.

    The steps are the length of the longest list, an int or int32; shorter lists repeat their last tile.
    """

    tiles: Any
    steps: Any


class ScheduledTile:
    """A tile of the list, as a kernel or an index map reads it: block `inner` of keys and `outer` of queries.

    The tiles of one block of queries are consecutive.
    """

    def __init__(self, tile: Any):
        self._tile = tile
        self.outer = tile >> (_MARKS + _INNER_BITS)
        self.inner = (tile >> _MARKS) & ((1 << _INNER_BITS) - 1)
        # Bits, one for each part.
        self.computed, self.unmasked = ((tile >> mark) & _EVERY_PART for mark in (_COMPUTED, _UNMASKED))

    @property
    def is_first(self) -> Any:
        """Return whether it is the first of its block of queries."""
        return (self._tile >> _FIRST) & 1 != 0

    @property
    def is_last(self) -> Any:
        """Return whether it is the last of its block of queries."""
        return (self._tile >> _LAST) & 1 != 0

    def compute(self, step: Callable[[bool, Any, int], None]) -> None:
        """Call step(masked, part, parts) on the parts that are not fully masked: from `part` on so many."""
        whole = self.unmasked == _EVERY_PART
        pl.when(whole)(lambda: step(False, 0, PARTS))

        @pl.when((self.computed != 0) & ~whole)
        def _() -> None:
            @pl.loop(0, PARTS)
            def _(part: Any) -> None:
                computed, unmasked = ((bits >> part) & 1 != 0 for bits in (self.computed, self.unmasked))
                pl.when(unmasked)(lambda: step(False, part, 1))
                pl.when(computed & ~unmasked)(lambda: step(True, part, 1))


def schedule_tiles(start: Any, end: Any, queries: int, keys: int, columns: int) -> TileSchedule:
    """Return the schedule of the tiles of `queries` × `keys` scores that are not fully masked.

    Tiles are grouped by blocks of queries; there are `columns` blocks of keys. A block of queries without unmasked
    scores has one tile, where its zeros are written. The schedule of numpy arrays [B or 1, T] is known while tracing.
    """
    module = array_module(start, end)
    ranges = key_ranges(start, end, queries, keys // PARTS)
    first, full, full_end, last = (x[:, :, None, None] for x in ranges)
    part = np.arange(columns * PARTS, dtype=np.int32).reshape(columns, PARTS)[None, None]
    bits = np.arange(PARTS, dtype=np.int32)[None, None, None]
    parts, whole = (
        module.sum(some << bits, axis=3, dtype=np.int32)
        for some in ((first <= part) & (part < last), (full <= part) & (part < full_end))
    )
    computed = parts != 0
    outer, inner = (np.arange(n, dtype=np.int32) for n in computed.shape[1:])
    outer, inner = outer[None, :, None], inner[None, None]
    is_first = inner == module.min(module.where(computed, inner, inner.size), axis=2, keepdims=True) % inner.size
    is_last = inner == module.max(module.where(computed, inner, 0), axis=2, keepdims=True)
    scheduled = computed | (is_first & is_last)
    marks = (is_first << _FIRST) + (is_last << _LAST) + (parts << _COMPUTED) + (whole << _UNMASKED)
    tiles = (outer << (_MARKS + _INNER_BITS)) + (inner << _MARKS) + marks
    # Tiles that are not scheduled sort last, as copies of the last scheduled tile without its marks.
    tiles, scheduled = (x.reshape(x.shape[0], -1) for x in (tiles, scheduled))
    rest = module.max(module.where(scheduled, tiles, 0), axis=1, keepdims=True) & ~((1 << _MARKS) - 1)
    count = module.sum(scheduled, axis=1, keepdims=True)
    tiles = module.sort(module.where(scheduled, tiles, np.iinfo(np.int32).max), axis=1)
    tiles = module.where(np.arange(tiles.shape[1])[None] < count, tiles, rest).astype(np.int32)
    if module is np:
        return TileSchedule(tiles[:, : count.max()], int(count.max()))
    return TileSchedule(tiles, module.max(count).astype(np.int32))
