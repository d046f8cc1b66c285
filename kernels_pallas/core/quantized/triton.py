"""Products of tiles of rows with quantised matrices, inside kernels that Triton compiles.

Of few rows of x, which wait for the bytes, a step multiplies x with inputs of one group, as stored numbers, which x's
dtype holds exactly; the scales of the group multiply the sums. Of bytes with two numbers the low ones are multiplied
with x from the group's first half, and the high ones with x from its second, so that nothing is interleaved.

Many rows wait for the products, and a step has one product alone: Triton gives two, one added to the other, to warps
that each convert all numbers. It is of whole groups, with their halves put one after the other and scales that multiply
the numbers, or of a part of one half of a long group.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import target
from kernels_pallas.core.fp8 import from_bytes, is_converted
from kernels_pallas.core.quantized.formats import KINDS, halves, largest_divisor, unit_scales
from kernels_pallas.core.tiles import precision_of

LEAST = 16  # rows and columns of the smallest tiles that tensor cores multiply
_MANY = 64  # rows of x in a tile, of which the products take longest
_SIGN = -0x8000  # the highest bit of an int16


class QuantizedTritonBlocks(NamedTuple):
    """An m × n tile of the result per program, k rows of stored values at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def default_blocks(rows: int, itemsize: int, inputs: int) -> QuantizedTritonBlocks:
    """Return blocks for so many rows of x and numbers in a group of inputs that a byte holds two of, 0 otherwise.

    Of few rows they are small, so that many programs read the matrix.
    """
    if itemsize == 4:
        return QuantizedTritonBlocks(min(rows, 64), 64, 32, warps=4, stages=2)
    if rows <= _MANY:
        return QuantizedTritonBlocks(rows, 64, 128, warps=4, stages=4)
    # A step of 64 numbers; with 128 a program needs twice the registers, and one group may have as many.
    return QuantizedTritonBlocks(128, 128, 32 if 0 < inputs <= 64 else 64, warps=8, stages=3)


class QuantizedTritonTiles(NamedTuple):
    """A quantised matrix as programs walk over it, each of an m × n tile of the result.

    Attributes:
      stored, groups: the rows of its values and of its scales.
      m, n, k: the rows and columns of a tile, and the rows of values in a step of one group's part.
      together: the whole groups of a step; 0 where a step is a part of one.
      apart: whether a step multiplies one half of a group.
      at_a_time: rows of stored values in the blocks, of which a step of few rows has several parts.
    """

    kind: str
    stored: int
    groups: int
    m: int
    n: int
    k: int
    together: int
    apart: bool
    at_a_time: int

    @classmethod
    def of(cls, kind: str, stored: int, groups: int, N: int, blocks: QuantizedTritonBlocks) -> "QuantizedTritonTiles":
        """Return the walk over a matrix with N outputs."""
        of_group = stored // groups
        bn = max(LEAST, min(blocks.n, pl.next_power_of_2(N)))
        bk = max(LEAST, min(blocks.k, pl.next_power_of_2(of_group)))
        together = math.gcd(groups, blocks.k // bk) if blocks.m >= _MANY and of_group == bk else 0
        apart = KINDS[kind].packed and blocks.m >= _MANY and not together
        return cls(kind, stored, groups, blocks.m, bn, bk, together, apart, blocks.k)


class TileReads(NamedTuple):
    """Functions that load parts of a program's operands.

    Attributes:
      x: (first, width, mask) -> [m, width], of the inputs from `first` on.
      values, scales: (first, rows, mask) -> [rows, n].
    """

    x: Callable[[jax.Array | int, int, jax.Array | None], jax.Array]
    values: Callable[[jax.Array | int, int, jax.Array | None], jax.Array]
    scales: Callable[[jax.Array | int, int, jax.Array | None], jax.Array]


def blocks_for(rows: int, dtype: jnp.dtype, kind: str, stored: int, groups: int) -> QuantizedTritonBlocks:
    """Return the default blocks of so many rows of x in a dtype and a matrix."""
    of_group = stored // groups
    return default_blocks(
        max(LEAST, pl.next_power_of_2(rows)), dtype.itemsize, 2 * of_group if KINDS[kind].packed else 0
    )


def tile_of_product(
    matrix: QuantizedTritonTiles,
    reads: TileReads,
    dtype: jnp.dtype,
    is_row: jax.Array | None,
    is_column: jax.Array | None,
) -> jax.Array:
    """Return an m × n tile of x · matrix in float32, inside a kernel; x is in `dtype`.

    is_row, is_column: [m, 1] and [1, n], the rows and columns that there are; None is all.
    """
    kind, stored, groups, bm, bn, bk, together, apart, at_a_time = matrix
    packed, of_group = KINDS[kind].packed, stored // groups
    parts = pl.cdiv(of_group, bk)  # of a group
    steps = groups // together if together else groups * parts * (1 + apart)
    # Steps of small groups and few rows are written out, so that more of them are on their way at a time.
    unroll = largest_divisor(steps, max(1, at_a_time // bk)) if bm < _MANY else 1
    contracted = (((1,), (0,)), ((), ()))
    chip = target.current()
    by_bytes = kind == "fp8" and chip.platform == "gpu" and not is_converted(chip.compute_capability)

    def numbers_of(tile: jax.Array) -> tuple[jax.Array, ...]:
        if kind == "mxfp4":
            return _half_units_of(tile)
        if kind == "fp8":
            return (from_bytes(tile) if by_bytes else jax.lax.bitcast_convert_type(tile, jnp.float8_e4m3fn),)
        return halves(tile, kind) if packed else (tile,)

    def scales_of(first: jax.Array | int, count: int = 1) -> jax.Array:
        return unit_scales(reads.scales(first, count, both(is_column, None, (count, bn))), kind)

    def whole_groups(at: jax.Array, total: jax.Array) -> jax.Array:
        rows, width = together * of_group, together * of_group * (1 + packed)
        x_tile = reads.x(at * width, width, both(is_row, None, (bm, width)))
        tile = reads.values(at * rows, rows, both(is_column, None, (rows, bn)))
        by_half = [each.reshape(together, of_group, bn) for each in numbers_of(tile)]
        numbers = jnp.moveaxis(jnp.stack(by_half, axis=-1), -1, 1) if packed else by_half[0][:, None]
        if together > 1:  # numbers are [together, half, of_group, bn]
            numbers = numbers.astype(jnp.float32) * scales_of(at * together, together).reshape(together, 1, 1, bn)
        sums = _dot(x_tile, numbers.reshape(width, bn).astype(dtype), contracted)
        return total + (sums * scales_of(at) if together == 1 < groups else sums)

    def part_of_group(at: jax.Array, total: jax.Array) -> jax.Array:
        at, half = (jax.lax.div(at, 2), jax.lax.rem(at, 2)) if apart else (at, 0)
        group, first = (at, 0) if parts == 1 else (jax.lax.div(at, parts), jax.lax.rem(at, parts) * bk)

        def inside(shape: tuple[int, int], axis: int) -> jax.Array | None:
            return first + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < of_group if of_group % bk else None

        def x_tile(half: jax.Array | int) -> jax.Array:
            start = (group * (1 + packed) + half) * of_group + first
            return reads.x(start, bk, both(is_row, inside((1, bk), 1), (bm, bk)))

        mask = both(inside((bk, 1), 0), is_column, (bk, bn))
        tile = reads.values(group * of_group + first, bk, mask)
        if apart:
            numbers = numbers_of(jax.lax.shift_right_logical(tile.astype(jnp.int32), 4 * half))[:1]
        else:
            numbers = numbers_of(tile)
        sums = sum(_dot(x_tile(half + i), each.astype(dtype), contracted) for i, each in enumerate(numbers))
        return total + (sums if groups == 1 else sums * scales_of(group))

    def several(at: jax.Array, total: jax.Array) -> jax.Array:
        for part in range(unroll):
            total = (whole_groups if together else part_of_group)(at * unroll + part, total)
        return total

    total = jax.lax.fori_loop(0, steps // unroll, several, jnp.zeros((bm, bn), jnp.float32))
    return total * scales_of(0) if groups == 1 else total


def as_bytes(values: jax.Array, kind: str) -> jax.Array:
    """Return values as kernels read them: those of floating point as signed bytes."""
    return jax.lax.bitcast_convert_type(values, jnp.int8) if kind in ("fp8", "mxfp4") else values


def _half_units_of(byte: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the numbers in E2M1 in the low and in the high nibbles of bytes (int8), in float32 and half units."""
    high = byte.astype(jnp.int16)
    low = (high << 12) >> 8
    # As float16 they have two bits of exponent in the place of five, and 2⁻¹⁵ of the number of half units.
    bits = (each << 5 & (_SIGN | 0x0E00) for each in (low, high))
    low, high = (jax.lax.bitcast_convert_type(each, jnp.float16).astype(jnp.float32) * 2.0**15 for each in bits)
    return low, high


def both(first: jax.Array | None, second: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """Return the conjunction of two masks; None is True everywhere."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (first, second) if mask is not None]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


def _dot(a: jax.Array, b: jax.Array, contracted: tuple) -> jax.Array:
    return jax.lax.dot_general(a, b, contracted, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)
