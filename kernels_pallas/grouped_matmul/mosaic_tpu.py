"""A grouped product on TPUs, compiled by Mosaic.

Tiles lie at multiples of their rows. The grid has one step for each tile and group that share rows; their number is
known at run time, and small arrays in scalar memory name them. Of a tile with rows of several groups each step writes
its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.quantized import mosaic_tpu as quantized
from kernels_pallas.core.quantized.formats import KINDS, unit_scales
from kernels_pallas.core.tiles import tpu_precision, until
from kernels_pallas.grouped_matmul import visits


class GroupedTpuBlocks(NamedTuple):
    """An m × n tile of the result, k numbers of the contraction at a time; of a gradient k × n, m rows at a time."""

    m: int
    n: int
    k: int


_DEFAULT = GroupedTpuBlocks(128, 512, 512)


def tile_rows(rows: int, groups: int, dtype: jnp.dtype) -> int:
    """Return the rows of a tile of a product that is not tuned."""
    return min(_DEFAULT.m, rows)


def product(
    x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool, cost: KernelCost, name: str
) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group."""
    (R, K), N = x.shape, matrices.shape[1 if transposed else 2]
    bm, bn, bk = _blocks(name, (R, N, K), x.dtype)
    walk = visits.of_groups(sizes, R, bm, alignment=bm)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def kernel(group, start, begin, end, x_ref, matrix_ref, y_ref, total_ref) -> None:
        visit, k = pl.program_id(1), pl.program_id(2)

        @pl.when(k == 0)
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)

        x_tile, matrix = x_ref[...], matrix_ref[...]
        if K % bk:  # a tile holds arbitrary values beyond the matrix
            x_tile, matrix = until(x_tile, 1, K - k * bk), until(matrix, 1 if transposed else 0, K - k * bk)
        total_ref[...] += jax.lax.dot_general(
            x_tile, matrix, contracted, precision=tpu_precision(x.dtype), preferred_element_type=jnp.float32
        )

        @pl.when(k == pl.num_programs(2) - 1)
        def _() -> None:
            is_own = _own_rows(visit, group, start, begin, end, (bm, bn))
            y_ref[...] = jnp.where(is_own, total_ref[...], y_ref[...].astype(jnp.float32)).astype(y_ref.dtype)

    matrix_spec = pl.BlockSpec((None, bk, bn), lambda j, v, k, group, *_: (group[v], k, j))
    if transposed:
        matrix_spec = pl.BlockSpec((None, bn, bk), lambda j, v, k, group, *_: (group[v], j, k))
    (y,) = launch.call(
        kernel,
        [walk.group, walk.start, walk.begin, walk.end, x, matrices],
        [jax.ShapeDtypeStruct((R, N), x.dtype)],
        params=launch.mosaic_tpu(("parallel", "arbitrary", "arbitrary")),
        grid=(pl.cdiv(N, bn), jnp.maximum(walk.count, 1), pl.cdiv(K, bk)),
        in_specs=[pl.BlockSpec((bm, bk), lambda j, v, k, group, start, *_: (start[v] // bm, k)), matrix_spec],
        out_specs=[pl.BlockSpec((bm, bn), lambda j, v, k, group, start, *_: (start[v] // bm, j))],
        scratch=[launch.vmem((bm, bn), jnp.float32)],
        prefetched=4,
        cost=cost,
        name=name,
    )
    return jnp.where(jnp.arange(R)[:, None] < walk.end[-1], y, 0)  # other rows are written by nobody


def quantized_product(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    sizes: jax.Array,
    *,
    kind: str,
    cost: KernelCost,
    name: str,
) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group. Scales are of single
    outputs, and become float32 in the kernel."""
    (R, K), (_, stored, N), groups = x.shape, values.shape, scales.shape[1]
    blocks = tuning.blocks(name, "mosaic_tpu", (R, N, K), x.dtype, quantized.DEFAULT._replace(m=_DEFAULT.m))
    matrix = quantized.QuantizedTpuTiles.of(kind, stored, groups, N, blocks)
    bm, bn, bk = min(blocks.m, R), matrix.n, matrix.k
    walk = visits.of_groups(sizes, R, bm, alignment=bm)

    def kernel(group, start, begin, end, x_ref, values_ref, scales_ref, y_ref, total_ref, wide_scales_ref) -> None:
        visit, k = pl.program_id(1), pl.program_id(2)

        @pl.when(k == 0)
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)
            if matrix.scale_rows > groups:
                wide_scales_ref[...] = jnp.zeros_like(wide_scales_ref)
            wide_scales_ref[:groups, :] = unit_scales(scales_ref[...], kind)

        quantized.add_step(matrix, k, x_ref, values_ref, wide_scales_ref, total_ref)

        @pl.when(k == pl.num_programs(2) - 1)
        def _() -> None:
            total = total_ref[...] * wide_scales_ref[...] if groups == 1 else total_ref[...]
            is_own = _own_rows(visit, group, start, begin, end, (bm, bn))
            y_ref[...] = jnp.where(is_own, total, y_ref[...].astype(jnp.float32)).astype(y_ref.dtype)

    (y,) = launch.call(
        kernel,
        [walk.group, walk.start, walk.begin, walk.end, quantized.in_stored_order(x, matrix), values, scales],
        [jax.ShapeDtypeStruct((R, N), x.dtype)],
        params=launch.mosaic_tpu(("parallel", "arbitrary", "arbitrary")),
        grid=(pl.cdiv(N, bn), jnp.maximum(walk.count, 1), matrix.steps),
        in_specs=[
            pl.BlockSpec((1 + KINDS[kind].packed, bm, bk), lambda j, v, k, group, start, *_: (0, start[v] // bm, k)),
            pl.BlockSpec((None, bk, bn), lambda j, v, k, group, *_: (group[v], k, j)),
            pl.BlockSpec((None, groups, bn), lambda j, v, k, group, *_: (group[v], 0, j)),
        ],
        out_specs=[pl.BlockSpec((bm, bn), lambda j, v, k, group, start, *_: (start[v] // bm, j))],
        scratch=[launch.vmem((bm, bn), jnp.float32), launch.vmem((matrix.scale_rows, bn), jnp.float32)],
        prefetched=4,
        cost=cost,
        name=name,
    )
    return jnp.where(jnp.arange(R)[:, None] < walk.end[-1], y, 0)  # other rows are written by nobody


def matrix_gradient(x: jax.Array, y: jax.Array, sizes: jax.Array, *, cost: KernelCost, name: str) -> jax.Array:
    """Return the sum of xᵀ · y over the rows of each group, [G, K, N] in x's dtype; zeros of an empty group."""
    (R, K), N, G = x.shape, y.shape[1], len(sizes)
    bm, bn, bk = _blocks(name, (R, N, K), x.dtype)
    walk = visits.of_groups(sizes, R, bm, alignment=bm)

    def kernel(group, start, begin, end, count, x_ref, y_ref, out_ref, total_ref) -> None:
        visit = pl.program_id(2)
        last = jnp.maximum(count[0], 1) - 1

        @pl.when((visit == 0) | (group[visit] != group[jnp.maximum(visit - 1, 0)]))
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)

        # Both are masked: a zero times a NaN of another group's row is a NaN.
        x_tile, y_tile = (_own(ref, _own_rows(visit, group, start, begin, end, ref.shape)) for ref in (x_ref, y_ref))
        total_ref[...] += jax.lax.dot_general(
            x_tile,
            y_tile,
            (((0,), (0,)), ((), ())),
            precision=tpu_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )

        @pl.when((visit == last) | (group[visit] != group[jnp.minimum(visit + 1, last)]))
        def _() -> None:
            out_ref[...] = total_ref[...].astype(out_ref.dtype)

    (sums,) = launch.call(
        kernel,
        [walk.group, walk.start, walk.begin, walk.end, walk.count[None], x, y],
        [jax.ShapeDtypeStruct((G, K, N), x.dtype)],
        params=launch.mosaic_tpu(("parallel", "parallel", "arbitrary")),
        grid=(pl.cdiv(K, bk), pl.cdiv(N, bn), jnp.maximum(walk.count, 1)),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, v, group, start, *_: (start[v] // bm, i)),
            pl.BlockSpec((bm, bn), lambda i, j, v, group, start, *_: (start[v] // bm, j)),
        ],
        out_specs=[pl.BlockSpec((None, bk, bn), lambda i, j, v, group, *_: (group[v], i, j))],
        scratch=[launch.vmem((bk, bn), jnp.float32)],
        prefetched=5,
        cost=cost,
        name=name,
    )
    return jnp.where((sizes > 0)[:, None, None], sums, 0)  # those of an empty group are written by nobody


def _blocks(name: str, sizes: tuple[int, int, int], dtype: jnp.dtype) -> GroupedTpuBlocks:
    blocks = tuning.blocks(name, "mosaic_tpu", sizes, dtype, _DEFAULT)
    return GroupedTpuBlocks(*map(min, blocks, sizes))


def _own_rows(visit: jax.Array, group, start, begin, end, shape: tuple[int, int]) -> jax.Array:
    """Return which numbers of a visit's tile lie in rows of its group."""
    row = start[visit] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (begin[group[visit]] <= row) & (row < end[group[visit]])


def _own(ref, is_own: jax.Array) -> jax.Array:
    """Return a tile with zeros in place of the rows of other groups."""
    return jnp.where(is_own, ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)
