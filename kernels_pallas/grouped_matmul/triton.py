"""A grouped product on NVIDIA GPUs, compiled by Triton.

Tiles begin at the first row of each group; a program whose tile is beyond the last group's does nothing. A gradient has
a program for each tile of each group's matrix, which walks over the group's rows: without rows it stores zeros.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.quantized import triton as quantized
from kernels_pallas.core.quantized.triton import QuantizedTritonTiles, TileReads
from kernels_pallas.core.tiles import precision_of
from kernels_pallas.grouped_matmul import visits

_LEAST = 16  # rows and columns of the smallest tiles that tensor cores multiply


class GroupedTritonBlocks(NamedTuple):
    """An m × n tile of the result per program, k numbers of the contraction at a time; of a gradient k × n, m rows at a
    time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


_PRODUCT = GroupedTritonBlocks(128, 128, 32, warps=4, stages=3)


def tile_rows(rows: int, groups: int, dtype: jnp.dtype) -> int:
    """Return the rows of a tile of a product that is not tuned."""
    return _shrunk(min(_PRODUCT.m, 64) if dtype.itemsize == 4 else _PRODUCT.m, pl.cdiv(rows, groups))


def product(
    x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool, cost: KernelCost, name: str
) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group."""
    (R, K), N, G = x.shape, matrices.shape[1 if transposed else 2], len(sizes)
    each = pl.cdiv(R, G)  # rows of a group on average, beyond which a tile is computed for nothing
    blocks = _blocks(name, (each, N, K), x.dtype, _PRODUCT)
    bm, bn, bk = blocks[:3]
    columns, steps = pl.cdiv(N, bn), pl.cdiv(K, bk)
    walk = visits.of_groups(sizes, R, bm, alignment=1)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def kernel(group_ref, start_ref, end_ref, count_ref, x_ref, matrix_ref, y_ref) -> None:
        j, visit = pl.program_id(0), pl.program_id(1)

        @pl.when(visit < count_ref[0])
        def _() -> None:
            group, start = group_ref[visit], start_ref[visit]
            rows, at_columns = pl.ds(start, bm), pl.ds(j * bn, bn)
            is_row = (start + jax.lax.broadcasted_iota(jnp.int32, (bm, 1), 0)) < end_ref[group]
            is_column = j * bn + jax.lax.broadcasted_iota(jnp.int32, (1, bn), 1) < N

            def step(k: jax.Array, total: jax.Array) -> jax.Array:
                at = pl.ds(k * bk, bk)
                inner = k * bk + jax.lax.broadcasted_iota(jnp.int32, (1, bk), 1) < K
                x_tile = launch.load(x_ref.at[rows, at], _both(is_row, inner))
                if transposed:
                    matrix = launch.load(matrix_ref.at[group, at_columns, at], _both(is_column.reshape(bn, 1), inner))
                else:
                    matrix = launch.load(matrix_ref.at[group, at, at_columns], _both(inner.reshape(bk, 1), is_column))
                return total + _dot(x_tile, matrix, contracted)

            total = jax.lax.fori_loop(0, steps, step, jnp.zeros((bm, bn), jnp.float32))
            launch.store(y_ref.at[rows, at_columns], total, _both(is_row, is_column))

    shape = (G, columns * bn, steps * bk) if transposed else (G, steps * bk, columns * bn)
    operands = [walk.group, walk.start, walk.end, walk.count[None], x, matrices]
    (y,) = launch.call(
        kernel,
        operands,
        [jax.ShapeDtypeStruct((R, N), x.dtype)],
        params=launch.triton(blocks.warps, blocks.stages),
        grid=(columns, len(walk.group)),
        in_specs=[*map(_whole, (each.shape for each in operands[:4])), _whole((R + bm, steps * bk)), _whole(shape)],
        out_specs=[_whole((R + bm, columns * bn))],
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
    outputs."""
    (R, K), (G, stored, N), groups = x.shape, values.shape, scales.shape[1]
    each = pl.cdiv(R, G)
    default = quantized.blocks_for(each, x.dtype, kind, stored, groups)
    blocks = tuning.blocks(name, "triton", (each, N, K), x.dtype, default)
    matrix = QuantizedTritonTiles.of(kind, stored, groups, N, blocks)
    bm, bn = matrix.m, matrix.n
    columns = pl.cdiv(N, bn)
    walk = visits.of_groups(sizes, R, bm, alignment=1)

    def kernel(group_ref, start_ref, end_ref, count_ref, x_ref, values_ref, scales_ref, y_ref) -> None:
        j, visit = pl.program_id(0), pl.program_id(1)

        @pl.when(visit < count_ref[0])
        def _() -> None:
            group, start = group_ref[visit], start_ref[visit]
            rows, at_columns = pl.ds(start, bm), pl.ds(j * bn, bn)
            is_row = (start + jax.lax.broadcasted_iota(jnp.int32, (bm, 1), 0)) < end_ref[group]
            is_column = j * bn + jax.lax.broadcasted_iota(jnp.int32, (1, bn), 1) < N
            reads = TileReads(
                lambda first, width, mask: launch.load(x_ref.at[rows, pl.ds(first, width)], mask),
                lambda first, height, mask: launch.load(values_ref.at[group, pl.ds(first, height), at_columns], mask),
                lambda first, height, mask: launch.load(scales_ref.at[group, pl.ds(first, height), at_columns], mask),
            )
            total = quantized.tile_of_product(matrix, reads, x.dtype, is_row, is_column if N % bn else None)
            launch.store(y_ref.at[rows, at_columns], total, _both(is_row, is_column))

    operands = [walk.group, walk.start, walk.end, walk.count[None], x, quantized.as_bytes(values, kind), scales]
    shapes = (R + bm, K + matrix.k), (G, stored + matrix.k, columns * bn), (G, groups, columns * bn)
    (y,) = launch.call(
        kernel,
        operands,
        [jax.ShapeDtypeStruct((R, N), x.dtype)],
        params=launch.triton(blocks.warps, blocks.stages),
        grid=(columns, len(walk.group)),
        in_specs=[*map(_whole, (each.shape for each in operands[:4])), *map(_whole, shapes)],
        out_specs=[_whole((R + bm, columns * bn))],
        cost=cost,
        name=name,
    )
    return jnp.where(jnp.arange(R)[:, None] < walk.end[-1], y, 0)  # other rows are written by nobody


def matrix_gradient(x: jax.Array, y: jax.Array, sizes: jax.Array, *, cost: KernelCost, name: str) -> jax.Array:
    """Return the sum of xᵀ · y over the rows of each group, [G, K, N] in x's dtype; zeros of an empty group."""
    (R, K), N, G = x.shape, y.shape[1], len(sizes)
    blocks = _blocks(name, (pl.cdiv(R, G), N, K), x.dtype, GroupedTritonBlocks(32, 128, 128, warps=4, stages=3))
    bm, bn, bk = blocks[:3]
    end = jnp.cumsum(sizes, dtype=jnp.int32)

    def kernel(begin_ref, end_ref, x_ref, y_ref, out_ref) -> None:
        i, j, group = (pl.program_id(axis) for axis in range(3))
        begin, end = begin_ref[group], end_ref[group]
        at_k, at_n = pl.ds(i * bk, bk), pl.ds(j * bn, bn)
        is_k = i * bk + jax.lax.broadcasted_iota(jnp.int32, (1, bk), 1) < K
        is_n = j * bn + jax.lax.broadcasted_iota(jnp.int32, (1, bn), 1) < N

        def step(tile: jax.Array, total: jax.Array) -> jax.Array:
            start = begin + tile * bm
            is_row = start + jax.lax.broadcasted_iota(jnp.int32, (bm, 1), 0) < end
            x_tile = launch.load(x_ref.at[pl.ds(start, bm), at_k], _both(is_row, is_k))
            y_tile = launch.load(y_ref.at[pl.ds(start, bm), at_n], _both(is_row, is_n))
            return total + _dot(x_tile, y_tile, (((0,), (0,)), ((), ())))

        total = jax.lax.fori_loop(0, pl.cdiv(end - begin, bm), step, jnp.zeros((bk, bn), jnp.float32))
        launch.store(out_ref.at[group, at_k, at_n], total, _both(is_k.reshape(bk, 1), is_n))

    wide_k, wide_n = pl.cdiv(K, bk) * bk, pl.cdiv(N, bn) * bn
    (sums,) = launch.call(
        kernel,
        [end - sizes, end, x, y],
        [jax.ShapeDtypeStruct((G, K, N), x.dtype)],
        params=launch.triton(blocks.warps, blocks.stages),
        grid=(wide_k // bk, wide_n // bn, G),
        in_specs=[_whole((G,)), _whole((G,)), _whole((R + bm, wide_k)), _whole((R + bm, wide_n))],
        out_specs=[_whole((G, wide_k, wide_n))],
        cost=cost,
        name=name,
    )
    return sums


def _blocks(name: str, sizes: tuple[int, int, int], dtype: jnp.dtype, most: GroupedTritonBlocks) -> GroupedTritonBlocks:
    """Return the blocks of a kernel: by default `most`, or smaller ones of smaller arrays and of float32, whose tiles
    fill twice the registers."""
    if dtype.itemsize == 4:
        most = most._replace(m=min(most.m, 64), n=64, k=min(most.k, 64), stages=2)
    elif target.current().scratchpad > 160_000 and most.m == 128:
        most = most._replace(k=64, warps=8)
    shrunk = map(_shrunk, most[:3], sizes)
    return tuning.blocks(name, "triton", sizes, dtype, GroupedTritonBlocks(*shrunk, *most[3:]))


def _shrunk(block: int, size: int) -> int:
    return max(_LEAST, min(block, pl.next_power_of_2(size)))


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Return the spec of an array of which programs read any part, up to these sizes: beyond its own are masked."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _both(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return the conjunction of a mask [A, 1] and a mask [1, B], in either order."""
    shape = jnp.broadcast_shapes(first.shape, second.shape)
    return jnp.broadcast_to(first, shape) & jnp.broadcast_to(second, shape)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple) -> jax.Array:
    return jax.lax.dot_general(a, b, contracted, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)
