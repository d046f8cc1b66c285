"""A product with a quantised matrix on NVIDIA GPUs, compiled by Triton: a program for each tile of the result."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.quantized.triton import (
    QuantizedTritonTiles,
    TileReads,
    as_bytes,
    blocks_for,
    both,
    tile_of_product,
)


def product(x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, cost: KernelCost, name: str) -> jax.Array:
    """Return x [M, K] · matrix, [M, N] in x's dtype; scales are of single outputs."""
    (M, K), (stored, N), groups = x.shape, values.shape, len(scales)
    blocks = tuning.blocks(name, "triton", (M, N, K), x.dtype, blocks_for(M, x.dtype, kind, stored, groups))
    matrix = QuantizedTritonTiles.of(kind, stored, groups, N, blocks)
    bm, bn, bk = matrix.m, matrix.n, matrix.k

    def kernel(x_ref, values_ref, scales_ref, y_ref) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        is_row = i * bm + jax.lax.broadcasted_iota(jnp.int32, (bm, 1), 0) < M if M % bm else None
        is_column = j * bn + jax.lax.broadcasted_iota(jnp.int32, (1, bn), 1) < N if N % bn else None
        reads = TileReads(
            lambda first, width, mask: launch.load(x_ref.at[:, pl.ds(first, width)], mask),
            lambda first, rows, mask: launch.load(values_ref.at[pl.ds(first, rows), :], mask),
            lambda first, rows, mask: launch.load(scales_ref.at[pl.ds(first, rows), :], mask),
        )
        total = tile_of_product(matrix, reads, x.dtype, is_row, is_column)
        launch.store(y_ref, total, both(is_row, is_column, (bm, bn)))

    (y,) = launch.call(
        kernel,
        [x, as_bytes(values, kind), scales],
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
