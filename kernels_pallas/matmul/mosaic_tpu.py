"""A matrix product on TPUs, compiled by Mosaic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.target import TargetChip
from kernels_pallas.core.tiles import tpu_precision, until
from kernels_pallas.matmul.tiles import MatmulProduct


class MatmulTpuBlocks(NamedTuple):
    """An m × n tile of the result, k numbers of the contraction at a time."""

    m: int
    n: int
    k: int


def default_blocks(dtype: jnp.dtype, chip: TargetChip) -> MatmulTpuBlocks:
    """Return the default blocks.

    Two buffers of each operand's and the result's tile, and the float32 sum, take 10 of the 16 MiB that a kernel may
    use in bfloat16, and 7 in float32, which may add a residual. The longer k, the less often the sum is read and
    written. A v4 has no more VMEM than 16 MiB, of which some compilers take 7 more in bfloat16: there k is half.
    """
    narrow = 2048 if chip.scratchpad > launch.TPU_VMEM else 1024
    return MatmulTpuBlocks(512, 512, narrow if dtype.itemsize == 2 else 512)


def _held(blocks: MatmulTpuBlocks, product: MatmulProduct, dtype: jnp.dtype) -> int:
    """Return the most bytes of VMEM that compilers for v4 and v5e were found to need.

    They are two buffers of each tile, the sum, and the operands' tiles once more in 32 bits, transposed or masked.
    """
    m, n, k = blocks
    results = 1 + product.added + product.keeps_sum
    return (2 * dtype.itemsize + 4) * (m + n) * k + (2 * dtype.itemsize * results + 4) * m * n


def run(
    product: MatmulProduct,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    cost: KernelCost,
    name: str,
) -> list[jax.Array]:
    """Return the results [M, N] of a product, in a's dtype."""
    M, N, K = product.sizes(a, b)
    default = default_blocks(a.dtype, target.current())
    blocks = tuning.blocks(name, "mosaic_tpu", (M, N, K), a.dtype, default)
    blocks, default = (MatmulTpuBlocks(*map(min, each, (M, N, K))) for each in (blocks, default))
    # The measured size may come from a call without a residual, or one that saves nothing for a derivative.
    bm, bn, bk = blocks if _held(blocks, product, a.dtype) <= launch.TPU_VMEM else default

    def kernel(*refs) -> None:
        a_ref, b_ref, *others = refs
        bias_ref = others.pop(0) if product.biased else None
        residual_ref = others.pop(0) if product.added else None
        *outputs, total_ref = others
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)

        a_tile, b_tile = a_ref[...], b_ref[...]
        if K % bk:  # a tile holds arbitrary values beyond the matrix
            a_tile = until(a_tile, 0 if product.transposed[0] else 1, K - k * bk)
            b_tile = until(b_tile, 1 if product.transposed[1] else 0, K - k * bk)
        if bn == 1 and product.transposed[1]:  # a product of a row with narrow numbers, which Mosaic does not support
            a_tile, b_tile = a_tile.astype(jnp.float32), b_tile.astype(jnp.float32)
        total_ref[...] += product.of_tiles(a_tile, b_tile, tpu_precision(a.dtype))

        @pl.when(k == pl.num_programs(2) - 1)
        def _() -> None:
            results = product.epilogue(
                total_ref[...],
                None if bias_ref is None else bias_ref[...],
                None if residual_ref is None else residual_ref[...],
            )
            for ref, result in zip(outputs, results, strict=True):
                ref[...] = result.astype(ref.dtype)

    a_spec = pl.BlockSpec((bm, bk), lambda i, j, k: (i, k))
    if product.transposed[0]:
        a_spec = pl.BlockSpec((bk, bm), lambda i, j, k: (k, i))
    b_spec = pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))
    if product.transposed[1]:
        b_spec = pl.BlockSpec((bn, bk), lambda i, j, k: (j, k))
    result = pl.BlockSpec((bm, bn), lambda i, j, k: (i, j))
    operands, in_specs = [a, b], [a_spec, b_spec]
    if bias is not None:
        operands.append(bias[None])
        in_specs.append(pl.BlockSpec((1, bn), lambda i, j, k: (0, j)))
    if residual is not None:
        operands.append(residual)
        in_specs.append(result)
    shapes = [jax.ShapeDtypeStruct((M, N), a.dtype)] * (1 + product.keeps_sum)
    return launch.call(
        kernel,
        operands,
        shapes,
        params=launch.mosaic_tpu(("parallel", "parallel", "arbitrary")),
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), pl.cdiv(K, bk)),
        in_specs=in_specs,
        out_specs=[result] * len(shapes),
        scratch=[launch.vmem((bm, bn), jnp.float32)],
        cost=cost,
        name=name,
    )
