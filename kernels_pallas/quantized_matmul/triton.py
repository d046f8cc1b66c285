"""A product with a quantised matrix on NVIDIA GPUs, compiled by Triton.

A step multiplies x with inputs of one group, as stored numbers, which x's dtype holds exactly; the scales of the group
multiply the sums. Of bytes with two numbers the low ones are multiplied with x from the group's first half, and the
high ones with x from its second, so that nothing is interleaved.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.tiles import precision_of
from kernels_pallas.quantized_matmul.formats import KINDS, halves, unit_scales

_LEAST = 16  # rows and columns of the smallest tiles that tensor cores multiply
_FEW = 64  # rows of x
_FP8 = (8, 9)  # the first compute capability that converts it


class QuantizedTritonBlocks(NamedTuple):
    """An m × n tile of the result per program, k rows of stored values at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def default_blocks(rows: int, itemsize: int) -> QuantizedTritonBlocks:
    """Return blocks for so many rows of x: of few, small ones, so that many programs read the matrix."""
    if itemsize == 4:
        return QuantizedTritonBlocks(min(rows, 64), 64, 32, warps=4, stages=2)
    if rows <= _FEW:
        return QuantizedTritonBlocks(rows, 64, 128, warps=4, stages=4)
    return QuantizedTritonBlocks(128, 128, 64, warps=8, stages=3)


def unsupported_reason(by_outputs: bool) -> str | None:
    """Return why the kernel cannot serve a matrix, or None."""
    return "it reads matrices by their inputs" if by_outputs else None


def product(x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, cost: KernelCost, name: str) -> jax.Array:
    """Return x [M, K] · matrix, [M, N] in x's dtype; scales are of single outputs."""
    (M, K), (stored, N), groups = x.shape, values.shape, len(scales)
    packed, of_group = KINDS[kind].packed, stored // groups  # rows of values
    default = default_blocks(max(_LEAST, pl.next_power_of_2(M)), x.dtype.itemsize)
    blocks = tuning.blocks(name, "triton", (M, N, K), x.dtype, default)
    bm, bn = blocks.m, max(_LEAST, min(blocks.n, pl.next_power_of_2(N)))
    bk = max(_LEAST, min(blocks.k, pl.next_power_of_2(of_group)))
    parts = pl.cdiv(of_group, bk)  # of a group
    # Steps of small groups and few rows are written out, so that more of them are on their way at a time.
    unroll = math.gcd(groups * parts, max(1, blocks.k // bk)) if bm <= _FEW else 1
    contracted = (((1,), (0,)), ((), ()))
    chip = target.current()
    by_bytes = kind == "fp8" and chip.platform == "gpu" and (chip.compute_capability or _FP8) < _FP8
    if by_bytes:
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)

    def kernel(x_ref, values_ref, scales_ref, y_ref) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        is_row = i * bm + jax.lax.broadcasted_iota(jnp.int32, (bm, 1), 0) < M if M % bm else None
        is_column = j * bn + jax.lax.broadcasted_iota(jnp.int32, (1, bn), 1) < N if N % bn else None

        def step(at: jax.Array, total: jax.Array) -> jax.Array:
            group, first = (at, 0) if parts == 1 else (jax.lax.div(at, parts), jax.lax.rem(at, parts) * bk)

            def inside(shape: tuple[int, int], axis: int) -> jax.Array | None:
                return first + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < of_group if of_group % bk else None

            def x_tile(half: int) -> jax.Array:
                start = group * of_group * (1 + packed) + half * of_group + first
                return launch.load(x_ref.at[:, pl.ds(start, bk)], _both(is_row, inside((1, bk), 1), (bm, bk)))

            mask = _both(inside((bk, 1), 0), is_column, (bk, bn))
            tile = launch.load(values_ref.at[pl.ds(group * of_group + first, bk), :], mask)
            numbers = halves(tile, kind) if packed else (_fp8_of(tile) if by_bytes else tile,)
            sums = [_dot(x_tile(half), each.astype(x.dtype), contracted) for half, each in enumerate(numbers)]
            sums = sums[0] + sums[1] if packed else sums[0]
            if groups == 1:
                return total + sums
            return total + sums * scale_of(group)

        def scale_of(group) -> jax.Array:
            return unit_scales(launch.load(scales_ref.at[pl.ds(group, 1), :], is_column), kind)

        def several(at: jax.Array, total: jax.Array) -> jax.Array:
            for part in range(unroll):
                total = step(at * unroll + part, total)
            return total

        total = jax.lax.fori_loop(0, groups * parts // unroll, several, jnp.zeros((bm, bn), jnp.float32))
        if groups == 1:
            total = total * scale_of(0)
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


def _fp8_of(byte: jax.Array) -> jax.Array:
    """Return the numbers of bytes in E4M3, in float32, where the chip has no instruction for it."""
    wide = byte.astype(jnp.int32)
    magnitude = wide & 127
    exponent, mantissa = magnitude >> 3, magnitude & 7
    units = jnp.where(exponent == 0, mantissa, (8 + mantissa) << jnp.maximum(exponent - 1, 0))  # of 2⁻⁹
    number = units.astype(jnp.float32) * jnp.where(wide >= 128, -(2.0**-9), 2.0**-9)
    return jnp.where(magnitude == 127, jnp.nan, number)


def _both(first: jax.Array | None, second: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """Return the conjunction of two masks; None is True everywhere."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (first, second) if mask is not None]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


def _dot(a: jax.Array, b: jax.Array, contracted: tuple) -> jax.Array:
    return jax.lax.dot_general(a, b, contracted, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)
