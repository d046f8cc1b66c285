"""A product with a quantised matrix on TPUs, compiled by Mosaic."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.quantized.formats import KINDS, unit_scales
from kernels_pallas.core.quantized.mosaic_tpu import DEFAULT, QuantizedTpuTiles, add_step, in_stored_order


def product(x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, cost: KernelCost, name: str) -> jax.Array:
    """Return x [M, K] · matrix, [M, N] in x's dtype; scales are of single outputs."""
    (M, K), (stored, N), groups = x.shape, values.shape, len(scales)
    blocks = tuning.blocks(name, "mosaic_tpu", (M, N, K), x.dtype, DEFAULT)
    matrix = QuantizedTpuTiles.of(kind, stored, groups, N, blocks)
    bm, bn, bk = min(blocks.m, M), matrix.n, matrix.k
    sides, scales = in_stored_order(x, matrix), unit_scales(scales, kind)
    scales = jnp.pad(scales, ((0, matrix.scale_rows - groups), (0, 0))) if groups > 1 else scales

    def kernel(x_ref, values_ref, scales_ref, y_ref, total_ref) -> None:
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)

        add_step(matrix, k, x_ref, values_ref, scales_ref, total_ref)

        @pl.when(k == pl.num_programs(2) - 1)
        def _() -> None:
            total = total_ref[...]
            y_ref[...] = (total * scales_ref[...] if groups == 1 else total).astype(y_ref.dtype)

    (y,) = launch.call(
        kernel,
        [sides, values, scales],
        [jax.ShapeDtypeStruct((M, N), x.dtype)],
        params=launch.mosaic_tpu(("parallel", "parallel", "arbitrary")),
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), matrix.steps),
        in_specs=[
            pl.BlockSpec((1 + KINDS[kind].packed, bm, bk), lambda i, j, k: (0, i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
            pl.BlockSpec((len(scales), bn), lambda i, j, k: (0, j)),
        ],
        out_specs=[pl.BlockSpec((bm, bn), lambda i, j, k: (i, j))],
        scratch=[launch.vmem((bm, bn), jnp.float32)],
        cost=cost,
        name=name,
    )
    return y
