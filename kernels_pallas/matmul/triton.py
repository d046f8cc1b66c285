"""A matrix product on NVIDIA GPUs, compiled by Triton."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.target import TargetChip
from kernels_pallas.core.tiles import precision_of
from kernels_pallas.matmul.tiles import MatmulProduct

_EPILOGUE = 64  # columns of a tile whose epilogue runs at a time


class MatmulTritonBlocks(NamedTuple):
    """An m × n tile of the result per program, k numbers of the contraction at a time.

    `group` rows of tiles are finished before the next columns, so that operands they share are still in the L2 cache.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


def default_blocks(m: int, n: int, k: int, itemsize: int, chip: TargetChip) -> MatmulTritonBlocks:
    """Return the largest tiles that registers hold, and the most stages in flight that shared memory holds."""
    if itemsize == 4:
        most = MatmulTritonBlocks(64, 64, 32, warps=4, stages=2)
    elif chip.scratchpad > 160_000:
        most = MatmulTritonBlocks(128, 256, 64, warps=8, stages=3)
    else:
        most = MatmulTritonBlocks(128, 128, 32, warps=4, stages=3)
    sizes = (max(16, min(block, pl.next_power_of_2(size))) for block, size in zip(most[:3], (m, n, k), strict=True))
    return MatmulTritonBlocks(*sizes, *most[3:])


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
    safe = default_blocks(M, N, K, a.dtype.itemsize, target.current())
    blocks = tuning.blocks(name, "triton", (M, N, K), a.dtype, safe)
    bm, bn, bk = blocks[:3]
    rows, columns, steps = pl.cdiv(M, bm), pl.cdiv(N, bn), pl.cdiv(K, bk)

    def place(program) -> tuple:
        """Return row and column of a program's tile: down `group` rows, then one column to the right."""
        per_group = blocks.group * columns
        first = program // per_group * blocks.group
        height = jnp.minimum(rows - first, blocks.group)
        inside = program % per_group
        return first + inside % height, inside // height

    def kernel(*refs) -> None:
        a_ref, b_ref, *others = refs
        bias_ref = others.pop(0) if product.biased else None
        residual_ref = others.pop(0) if product.added else None
        i, j = place(pl.program_id(0))
        row = i * bm + jax.lax.broadcasted_iota(jnp.int32, (bm, 1), 0) < M if M % bm else None
        column = j * bn + jax.lax.broadcasted_iota(jnp.int32, (1, bn), 1) < N if N % bn else None

        def tile(ref, flipped: bool, outer: jax.Array | None, outer_first: bool, step) -> jax.Array:
            """Load one operand's tile of this step; zeros beyond the matrix, which add nothing."""
            at = pl.ds(step * bk, bk)
            outer_first = outer_first != flipped
            inner = None
            if K % bk:
                shape, axis = ((1, bk), 1) if outer_first else ((bk, 1), 0)
                inner = step * bk + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < K
            if outer is not None and flipped:
                outer = outer.reshape(outer.shape[::-1])
            size = bm if ref is a_ref else bn
            mask = _both(outer, inner, (size, bk) if outer_first else (bk, size))
            return launch.load(ref.at[:, at] if outer_first else ref.at[at, :], mask)

        def step(k, total: jax.Array) -> jax.Array:
            a_tile = tile(a_ref, product.transposed[0], row, True, k)
            b_tile = tile(b_ref, product.transposed[1], column, False, k)
            return total + product.of_tiles(a_tile, b_tile, precision_of(a.dtype))

        total = jax.lax.fori_loop(0, steps, step, jnp.zeros((bm, bn), jnp.float32))
        # Some columns at a time: an activation's intermediates do not fit into registers alongside all the sums.
        width = min(bn, _EPILOGUE)
        for part, sums in enumerate(jnp.split(total, bn // width, axis=1)):
            at = pl.ds(part * width, width)
            column = j * bn + part * width + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1) < N if N % bn else None
            inside = _both(row, column, (bm, width))
            bias_tile = None if bias_ref is None else launch.load(bias_ref.at[:, at], column)
            residual_tile = None if residual_ref is None else launch.load(residual_ref.at[:, at], inside)
            for ref, result in zip(others, product.epilogue(sums, bias_tile, residual_tile), strict=True):
                launch.store(ref.at[:, at], result, inside)

    whole = steps * bk
    a_spec = pl.BlockSpec((bm, whole), lambda p: (place(p)[0], 0))
    if product.transposed[0]:
        a_spec = pl.BlockSpec((whole, bm), lambda p: (0, place(p)[0]))
    b_spec = pl.BlockSpec((whole, bn), lambda p: (0, place(p)[1]))
    if product.transposed[1]:
        b_spec = pl.BlockSpec((bn, whole), lambda p: (place(p)[1], 0))
    result = pl.BlockSpec((bm, bn), place)
    operands, in_specs = [a, b], [a_spec, b_spec]
    if bias is not None:
        operands.append(bias[None])
        in_specs.append(pl.BlockSpec((1, bn), lambda p: (0, place(p)[1])))
    if residual is not None:
        operands.append(residual)
        in_specs.append(result)
    outputs = [jax.ShapeDtypeStruct((M, N), a.dtype)] * (1 + product.keeps_sum)
    return launch.call(
        kernel,
        operands,
        outputs,
        params=launch.triton(blocks.warps, blocks.stages),
        grid=(rows * columns,),
        in_specs=in_specs,
        out_specs=[result] * len(outputs),
        cost=cost,
        name=name,
    )


def _both(first: jax.Array | None, second: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """Return the conjunction of two masks; None is True everywhere."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (first, second) if mask is not None]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
