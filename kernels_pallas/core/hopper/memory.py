"""Shared memory of a block on Hopper: arrays, barriers, and their sizes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core import interpretation

# Rows of a warpgroup's smallest product (wgmma.m64nNk16), and bytes of a row of a swizzled tile in shared memory.
ROWS = 64
SWIZZLE = 128
# Rows of a swizzled tile.
_TILE_ROWS = 8

# Of a warpgroup.
THREADS = 128

# Two-byte numbers in a row of such a tile: widths of operands are multiples.
TILE = 64
# Most columns of a product.
MAX_COLUMNS = 256
# Bytes of shared memory that a block may have, less those for barriers and the compiler.
SHARED_MEMORY = 232_448 - 6144


class SharedBuffer(NamedTuple):
    """An array in shared memory. `tiled`: an operand of products, [..., rows, columns], columns a multiple of 64."""

    shape: tuple[int, ...]
    dtype: Any
    tiled: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Barriers(NamedTuple):
    """A set of `count` barriers, each of which opens after `arrivals` arrivals, and closes again."""

    count: int
    arrivals: int = 1

    @property
    def bytes(self) -> int:
        return 8 * self.count


class AddingTurn(NamedTuple):
    """A block's turn to add to a sum: a counter, a semaphore in global memory, and how many blocks come before."""

    counter: Any
    order: jax.Array


def extent(length: int, block: int, step: int | None = None) -> int:
    """Return the length that an array of this length needs along an axis of which blocks are copied whole.

    It is whole tiles and at least a block: beyond an array's end the copy engine reads zeros, and writes nothing. The
    interpreter needs whole blocks.

    step: blocks begin at multiples of it; of the block where None.
    """
    tiles = -(-length // _TILE_ROWS) * _TILE_ROWS
    if interpretation.current() is not None and length:
        step = step or block
        tiles = (length - 1) // step * step + block
    return max(tiles, block if length else 0)


def allocation(buffer: SharedBuffer | Barriers, interpret: bool) -> Any:
    """Return an array or barriers as Pallas allocates them."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(buffer, Barriers):
        return plgpu.Barrier(num_arrivals=buffer.arrivals, num_barriers=buffer.count)
    if not buffer.tiled or interpret:
        return plgpu.SMEM(buffer.shape, buffer.dtype)
    columns = SWIZZLE // jnp.dtype(buffer.dtype).itemsize
    transforms = (plgpu.TilingTransform((_TILE_ROWS, columns)), plgpu.SwizzleTransform(SWIZZLE))
    return plgpu.SMEM(buffer.shape, buffer.dtype, transforms=transforms)
