"""A product with a quantised matrix on TPUs, compiled by Mosaic.

x lies in the order of the stored values: of bytes with two numbers once for the low and once for the high ones. A step
reads many groups of inputs. Scales of long groups multiply the sums of each; those of short ones, which would fill the
matrix unit in part, multiply the numbers, and these are rounded to x's dtype.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.quantized.formats import KINDS, halves, unit_scales
from kernels_pallas.core.tiles import tpu_precision, until

_LONG = 128  # rows of stored values of a group that fill the depth of a matrix unit


class QuantizedTpuBlocks(NamedTuple):
    """An m × n tile of the result, about k rows of stored values at a time."""

    m: int
    n: int
    k: int


_DEFAULT = QuantizedTpuBlocks(256, 512, 1024)


def unsupported_reason(kind: str, by_outputs: bool, stored: int, groups: int) -> str | None:
    """Return why the kernel cannot serve a matrix with so many rows of values and groups of inputs, or None."""
    if by_outputs:
        return "it reads matrices by their inputs"
    of_group = stored // groups
    is_short = of_group in (8, 16, 32, 64)
    if groups > 1 and not is_short and (of_group % _LONG or of_group > _DEFAULT.k):
        return f"its steps do not consist of groups of {of_group * (1 + KINDS[kind].packed)} inputs"
    return None


def product(x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, cost: KernelCost, name: str) -> jax.Array:
    """Return x [M, K] · matrix, [M, N] in x's dtype; scales are of single outputs."""
    (M, K), (stored, N), groups = x.shape, values.shape, len(scales)
    packed, of_group = KINDS[kind].packed, stored // groups
    blocks = tuning.blocks(name, "mosaic_tpu", (M, N, K), x.dtype, _DEFAULT)
    bm, bn = min(blocks.m, M), min(blocks.n, N)
    bk = min(blocks.k, stored) if groups == 1 else min(max(blocks.k // of_group, 1) * of_group, stored)
    in_step = max(1, bk // of_group)  # groups
    steps = pl.cdiv(stored, bk)
    sides = jnp.moveaxis(x.reshape(M, groups, 1 + packed, of_group), 2, 0).reshape(1 + packed, M, stored)
    # Groups beyond the matrix, of the last step, have zeros as scales.
    scales = unit_scales(scales, kind)
    scales = jnp.pad(scales, ((0, steps * in_step - groups), (0, 0))) if groups > 1 else scales

    def kernel(x_ref, values_ref, scales_ref, y_ref, total_ref) -> None:
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)

        tile = values_ref[...]
        numbers = halves(tile, kind) if packed else (tile,)
        for side, each in enumerate(numbers):
            x_tile, wide = x_ref[side], each.astype(jnp.float32)
            if stored % bk:  # a tile holds arbitrary values beyond the matrix
                x_tile, wide = until(x_tile, 1, stored - k * bk), until(wide, 0, stored - k * bk)
            if groups > 1 and of_group < _LONG:
                first = pl.multiple_of(k * in_step, in_step) if steps > 1 else 0
                per_group = scales_ref[pl.ds(first, in_step), :]
                wide = (wide.reshape(in_step, of_group, bn) * per_group[:, None, :]).reshape(bk, bn)
            narrow = wide.astype(x.dtype)
            if groups == 1 or of_group < _LONG:
                total_ref[...] += _dot(x_tile, narrow)
                continue
            for at in range(in_step):
                part = slice(at * of_group, (at + 1) * of_group)
                sums = _dot(x_tile[:, part], narrow[part])
                total_ref[...] += sums * scales_ref[pl.ds(k * in_step + at, 1), :]

        @pl.when(k == pl.num_programs(2) - 1)
        def _() -> None:
            total = total_ref[...]
            y_ref[...] = (total * scales_ref[...] if groups == 1 else total).astype(y_ref.dtype)

    (y,) = launch.call(
        kernel,
        [sides, values, scales],
        [jax.ShapeDtypeStruct((M, N), x.dtype)],
        params=launch.mosaic_tpu(("parallel", "parallel", "arbitrary")),
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), steps),
        in_specs=[
            pl.BlockSpec((1 + packed, bm, bk), lambda i, j, k: (0, i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
            pl.BlockSpec((len(scales), bn), lambda i, j, k: (0, j)),
        ],
        out_specs=[pl.BlockSpec((bm, bn), lambda i, j, k: (i, j))],
        scratch=[launch.vmem((bm, bn), jnp.float32)],
        cost=cost,
        name=name,
    )
    return y


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=tpu_precision(a.dtype), preferred_element_type=jnp.float32)
