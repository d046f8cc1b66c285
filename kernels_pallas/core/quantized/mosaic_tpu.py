"""Products of tiles of rows with quantised matrices, inside kernels that Mosaic compiles for TPUs.

x lies in the order of the stored values: of bytes with two numbers once for the low and once for the high ones. A step
reads many groups of inputs. Scales of long groups multiply the sums of each; those of short ones, which would fill the
matrix unit in part, multiply the numbers, and these are rounded to x's dtype.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core.quantized.formats import KINDS, halves
from kernels_pallas.core.tiles import tpu_precision, until

_LONG = 128  # rows of stored values of a group that fill the depth of a matrix unit


class QuantizedTpuBlocks(NamedTuple):
    """An m × n tile of the result, about k rows of stored values at a time."""

    m: int
    n: int
    k: int


DEFAULT = QuantizedTpuBlocks(256, 512, 1024)


def unsupported_reason(kind: str, stored: int, groups: int) -> str | None:
    """Return why kernels cannot serve a matrix with so many rows of values and groups of inputs, or None."""
    of_group = stored // groups
    is_short = of_group in (8, 16, 32, 64)
    if groups > 1 and not is_short and (of_group % _LONG or of_group > DEFAULT.k):
        return f"its steps do not consist of groups of {of_group * (1 + KINDS[kind].packed)} inputs"
    return None


class QuantizedTpuTiles(NamedTuple):
    """A quantised matrix as a kernel walks over it: `stored` rows of values and `groups` of scales, k rows of values at
    a time, with those of so many groups (`in_step`), of columns n."""

    kind: str
    stored: int
    groups: int
    n: int
    k: int

    @classmethod
    def of(cls, kind: str, stored: int, groups: int, N: int, blocks: QuantizedTpuBlocks) -> "QuantizedTpuTiles":
        """Return the walk over a matrix with N outputs."""
        of_group = stored // groups
        bk = min(blocks.k, stored) if groups == 1 else min(max(blocks.k // of_group, 1) * of_group, stored)
        return cls(kind, stored, groups, min(blocks.n, N), bk)

    @property
    def in_step(self) -> int:
        return max(1, self.k // (self.stored // self.groups))

    @property
    def steps(self) -> int:
        return pl.cdiv(self.stored, self.k)

    @property
    def scale_rows(self) -> int:
        """The groups of all steps; those beyond the matrix have zeros as scales."""
        return self.groups if self.groups == 1 else self.steps * self.in_step


def in_stored_order(x: jax.Array, matrix: QuantizedTpuTiles) -> jax.Array:
    """Return x [M, K] in the order of the stored values, [sides, M, stored]: of the low and of the high numbers."""
    packed = KINDS[matrix.kind].packed
    apart = x.reshape(len(x), matrix.groups, 1 + packed, -1)
    return jnp.moveaxis(apart, 2, 0).reshape(1 + packed, len(x), matrix.stored)


def add_step(matrix: QuantizedTpuTiles, k: jax.Array, x_ref, values_ref, scales_ref, total_ref) -> None:
    """Add step k of the product to `total_ref` [m, n] in float32, inside a kernel.

    x_ref: [sides, m, k], as `in_stored_order` has it. values_ref: [k, n]. scales_ref: float32 [scale rows, n], of which
    the one of a matrix with one group multiplies nothing here.
    """
    kind, stored, groups, bn, bk = matrix
    of_group, in_step = stored // groups, matrix.in_step
    tile = values_ref[...]
    for side, each in enumerate(halves(tile, kind) if KINDS[kind].packed else (tile,)):
        x_tile, wide = x_ref[side], each.astype(jnp.float32)
        if stored % bk:  # a tile holds arbitrary values beyond the matrix
            x_tile, wide = until(x_tile, 1, stored - k * bk), until(wide, 0, stored - k * bk)
        if groups > 1 and of_group < _LONG:
            first = pl.multiple_of(k * in_step, in_step) if matrix.steps > 1 else 0
            per_group = scales_ref[pl.ds(first, in_step), :]
            wide = (wide.reshape(in_step, of_group, bn) * per_group[:, None, :]).reshape(bk, bn)
        narrow = wide.astype(x_tile.dtype)
        if groups == 1 or of_group < _LONG:
            total_ref[...] += _dot(x_tile, narrow)
            continue
        for at in range(in_step):
            part = slice(at * of_group, (at + 1) * of_group)
            sums = _dot(x_tile[:, part], narrow[part])
            total_ref[...] += sums * scales_ref[pl.ds(k * in_step + at, 1), :]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=tpu_precision(a.dtype), preferred_element_type=jnp.float32)
