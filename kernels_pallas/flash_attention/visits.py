"""Which tiles of scores a TPU's kernel visits, in order: a list that its index maps read.

A step of the grid takes about 0.35 µs even where nothing is computed (JAX's documentation of Pallas on TPUs), as long
as the products of a small tile: of causal attention half of all tiles would be such steps, of a window nearly all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import pallas as pl

from kernels_pallas.flash_attention.blocks import key_ranges
from kernels_pallas.flash_attention.key_range import array_module

# A tile's bits from the lowest: four marks, its inner block (8 million keys or queries in blocks of 512), its outer,
# of which a list may have so many.
_INNER_BITS = 14
MOST_OUTER = 2 ** (31 - 4 - _INNER_BITS)
_OPENS, _CLOSES, _SEEN, _WHOLE = 1, 2, 4, 8
# Tiles that one list may hold: 512 KiB, half of a TPU's scalar memory.
MOST = 2**17


class Visits(NamedTuple):
    """For each sequence of the batch its tiles, int32 [B, any length] or [1, …] for all of them, and how many steps
    visit those of the longest, an int or int32: the others rest at their last tile."""

    tiles: Any
    steps: Any


class Visit:
    """A tile of the list, as a kernel or an index map reads it: `inner` blocks of an `outer` one are neighbours."""

    def __init__(self, tile: Any):
        self._tile = tile
        self.outer = tile >> (4 + _INNER_BITS)
        self.inner = (tile >> 4) & ((1 << _INNER_BITS) - 1)

    @property
    def opens(self) -> Any:
        """Whether it is the first of its outer block."""
        return self._has(_OPENS)

    @property
    def closes(self) -> Any:
        """Whether it is the last."""
        return self._has(_CLOSES)

    def visit(self, step: Callable[[bool], None]) -> None:
        """step(masked), unless nothing is seen."""
        seen, whole = self._has(_SEEN), self._has(_WHOLE)
        pl.when(whole)(lambda: step(False))
        pl.when(seen & ~whole)(lambda: step(True))

    def _has(self, mark: int) -> Any:
        return (self._tile & mark) != 0


def visits(start: Any, end: Any, queries: int, keys: int, columns: int, *, by_keys: bool) -> Visits:
    """The tiles of `queries` × `keys` scores of which something is seen: those of a block of queries one after the
    other, or `by_keys` those of a block of keys, of which there are `columns`. A block that sees nothing, or is not
    seen, has one tile, where its zeros are written. Of numpy arrays [B or 1, T] all is known while tracing."""
    module = array_module(start, end)
    first, full, full_end, last = (x[:, :, None] for x in key_ranges(start, end, queries, keys))
    column = np.arange(columns, dtype=np.int32)[None, None]
    seen, whole = (first <= column) & (column < last), (full <= column) & (column < full_end)
    if by_keys:
        seen, whole = (module.swapaxes(x, 1, 2) for x in (seen, whole))
    outer, inner = (np.arange(n, dtype=np.int32) for n in seen.shape[1:])
    outer, inner = outer[None, :, None], inner[None, None]
    opens = inner == module.min(module.where(seen, inner, inner.size), axis=2, keepdims=True) % inner.size
    closes = inner == module.max(module.where(seen, inner, 0), axis=2, keepdims=True)
    visited = seen | (opens & closes)
    marks = opens * _OPENS + closes * _CLOSES + seen * _SEEN + whole * _WHOLE
    tiles = (outer << (4 + _INNER_BITS)) + (inner << 4) + marks
    # In order the tiles rise: those that are not visited come behind, as the last one that is, without its marks.
    tiles, visited = (x.reshape(x.shape[0], -1) for x in (tiles, visited))
    rest = module.max(module.where(visited, tiles, 0), axis=1, keepdims=True) & ~15
    count = module.sum(visited, axis=1, keepdims=True)
    tiles = module.sort(module.where(visited, tiles, np.iinfo(np.int32).max), axis=1)
    tiles = module.where(np.arange(tiles.shape[1])[None] < count, tiles, rest).astype(np.int32)
    if module is np:
        return Visits(tiles[:, : count.max()], int(count.max()))
    return Visits(tiles, module.max(count).astype(np.int32))
