"""A product with a quantised matrix on NVIDIA GPUs, compiled by Triton.

Of few rows of x, which wait for the bytes, a step multiplies x with inputs of one group, as stored numbers, which x's
dtype holds exactly; the scales of the group multiply the sums. Of bytes with two numbers the low ones are multiplied
with x from the group's first half, and the high ones with x from its second, so that nothing is interleaved.

Many rows wait for the products, and a step has one product alone: Triton gives two, one added to the other, to warps
that each convert all numbers. It is of whole groups, with their halves put one after the other and scales that multiply
the numbers, or of a part of one half of a long group.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.core.fp8 import from_bytes, is_converted
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.quantized.formats import KINDS, halves, largest_divisor, unit_scales
from kernels_pallas.core.tiles import precision_of

_LEAST = 16  # rows and columns of the smallest tiles that tensor cores multiply
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


def unsupported_reason(by_outputs: bool) -> str | None:
    """Return why the kernel cannot serve a matrix, or None."""
    return "it reads matrices by their inputs" if by_outputs else None


def product(x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, cost: KernelCost, name: str) -> jax.Array:
    """Return x [M, K] · matrix, [M, N] in x's dtype; scales are of single outputs."""
    (M, K), (stored, N), groups = x.shape, values.shape, len(scales)
    packed, of_group = KINDS[kind].packed, stored // groups  # rows of values
    default = default_blocks(max(_LEAST, pl.next_power_of_2(M)), x.dtype.itemsize, 2 * of_group if packed else 0)
    blocks = tuning.blocks(name, "triton", (M, N, K), x.dtype, default)
    bm, bn = blocks.m, max(_LEAST, min(blocks.n, pl.next_power_of_2(N)))
    bk = max(_LEAST, min(blocks.k, pl.next_power_of_2(of_group)))
    parts = pl.cdiv(of_group, bk)  # of a group
    together = math.gcd(groups, blocks.k // bk) if bm >= _MANY and of_group == bk else 0  # groups of a step
    apart = packed and bm >= _MANY and not together  # a step multiplies one half
    steps = groups // together if together else groups * parts * (1 + apart)
    # Steps of small groups and few rows are written out, so that more of them are on their way at a time.
    unroll = largest_divisor(steps, max(1, blocks.k // bk)) if bm < _MANY else 1
    contracted = (((1,), (0,)), ((), ()))
    chip = target.current()
    by_bytes = kind == "fp8" and chip.platform == "gpu" and not is_converted(chip.compute_capability)
    if kind in ("fp8", "mxfp4"):  # bytes with a sign, on every chip
        values = jax.lax.bitcast_convert_type(values, jnp.int8)

    def numbers_of(tile: jax.Array) -> tuple[jax.Array, ...]:
        if kind == "mxfp4":
            return _half_units_of(tile)
        if kind == "fp8":
            return (from_bytes(tile) if by_bytes else jax.lax.bitcast_convert_type(tile, jnp.float8_e4m3fn),)
        return halves(tile, kind) if packed else (tile,)

    def kernel(x_ref, values_ref, scales_ref, y_ref) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        is_row = i * bm + jax.lax.broadcasted_iota(jnp.int32, (bm, 1), 0) < M if M % bm else None
        is_column = j * bn + jax.lax.broadcasted_iota(jnp.int32, (1, bn), 1) < N if N % bn else None

        def scales_of(first: jax.Array | int, count: int = 1) -> jax.Array:
            mask = _both(is_column, None, (count, bn))
            return unit_scales(launch.load(scales_ref.at[pl.ds(first, count), :], mask), kind)

        def whole_groups(at: jax.Array, total: jax.Array) -> jax.Array:
            rows, width = together * of_group, together * of_group * (1 + packed)
            x_tile = launch.load(x_ref.at[:, pl.ds(at * width, width)], _both(is_row, None, (bm, width)))
            tile = launch.load(values_ref.at[pl.ds(at * rows, rows), :], _both(is_column, None, (rows, bn)))
            by_half = [each.reshape(together, of_group, bn) for each in numbers_of(tile)]
            numbers = jnp.moveaxis(jnp.stack(by_half, axis=-1), -1, 1) if packed else by_half[0][:, None]
            if together > 1:  # numbers are [together, half, of_group, bn]
                numbers = numbers.astype(jnp.float32) * scales_of(at * together, together).reshape(together, 1, 1, bn)
            sums = _dot(x_tile, numbers.reshape(width, bn).astype(x.dtype), contracted)
            return total + (sums * scales_of(at) if together == 1 < groups else sums)

        def part_of_group(at: jax.Array, total: jax.Array) -> jax.Array:
            at, half = (jax.lax.div(at, 2), jax.lax.rem(at, 2)) if apart else (at, 0)
            group, first = (at, 0) if parts == 1 else (jax.lax.div(at, parts), jax.lax.rem(at, parts) * bk)

            def inside(shape: tuple[int, int], axis: int) -> jax.Array | None:
                return first + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < of_group if of_group % bk else None

            def x_tile(half: jax.Array | int) -> jax.Array:
                start = (group * (1 + packed) + half) * of_group + first
                return launch.load(x_ref.at[:, pl.ds(start, bk)], _both(is_row, inside((1, bk), 1), (bm, bk)))

            mask = _both(inside((bk, 1), 0), is_column, (bk, bn))
            tile = launch.load(values_ref.at[pl.ds(group * of_group + first, bk), :], mask)
            if apart:
                numbers = numbers_of(jax.lax.shift_right_logical(tile.astype(jnp.int32), 4 * half))[:1]
            else:
                numbers = numbers_of(tile)
            sums = sum(_dot(x_tile(half + i), each.astype(x.dtype), contracted) for i, each in enumerate(numbers))
            return total + (sums if groups == 1 else sums * scales_of(group))

        def several(at: jax.Array, total: jax.Array) -> jax.Array:
            for part in range(unroll):
                total = (whole_groups if together else part_of_group)(at * unroll + part, total)
            return total

        total = jax.lax.fori_loop(0, steps // unroll, several, jnp.zeros((bm, bn), jnp.float32))
        if groups == 1:
            total = total * scales_of(0)
        launch.store(y_ref, total, _both(is_row, is_column, (bm, bn)))

    (y,) = launch.call(
        kernel,
        [x, values, scales],
        [jax.ShapeDtypeStruct((M, N), x.dtype)],
        params=launch.triton(blocks.warps, blocks.stages),
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn)),
        in_specs=[
            pl.BlockSpec((bm, K + bk), lambda i, j: (i, 0)),
            pl.BlockSpec((stored + bk, bn), lambda i, j: (0, j)),
            pl.BlockSpec((groups, bn), lambda i, j: (0, j)),
        ],
        out_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j))],
        cost=cost,
        name=name,
    )
    return y


def _half_units_of(byte: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the numbers in E2M1 in the low and in the high nibbles of bytes (int8), in float32 and half units."""
    high = byte.astype(jnp.int16)
    low = (high << 12) >> 8
    # As float16 they have two bits of exponent in the place of five, and 2⁻¹⁵ of the number of half units.
    bits = (each << 5 & (_SIGN | 0x0E00) for each in (low, high))
    low, high = (jax.lax.bitcast_convert_type(each, jnp.float16).astype(jnp.float32) * 2.0**15 for each in bits)
    return low, high


def _both(first: jax.Array | None, second: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """Return the conjunction of two masks; None is True everywhere."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (first, second) if mask is not None]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


def _dot(a: jax.Array, b: jax.Array, contracted: tuple) -> jax.Array:
    return jax.lax.dot_general(a, b, contracted, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)
