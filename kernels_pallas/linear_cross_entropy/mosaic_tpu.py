"""Statistics and gradients of a chunk's logits on TPUs, compiled by Mosaic."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.linear_cross_entropy import block
from kernels_pallas.linear_cross_entropy.costs import gradient_cost, statistics_cost

# Numbers of the largest blocks: of logits, and of four numbers per row, each of which takes 128 lanes. With double
# buffers, the result and a soft cap's intermediates, 2 MiB of float32 fit into VMEM's default 16 on v4 to v7x.
_MAX_NUMBERS, _EXTRA_COLUMNS = 2**19, 4 * 128


class CrossEntropyTpuBlocks(NamedTuple):
    """A block of `rows` × `columns` logits in VMEM."""

    rows: int = 128
    columns: int = 2048


def statistics(logits_CV: jax.Array, at_C: jax.Array, labels: int, soft_cap: float | None) -> block.LogitStatistics:
    """Return the statistics of the first `labels` logits of each row, [C] each.

    The grid runs along the rows in sequence, and adds to the statistics so far.
    """
    C, V = logits_CV.shape
    rows, columns = _block("statistics", C, V, logits_CV.dtype)

    def kernel(logits_ref, at_ref, *out_refs) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            for ref, x in zip(out_refs, block.nothing(jnp.zeros((rows, 1), jnp.float32)), strict=True):
                ref[...] = x

        column = pl.program_id(1) * columns + jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
        inside = column < labels if labels % columns else None  # a block holds arbitrary values beyond the array
        row_statistics = block.LogitStatistics(*(ref[...] for ref in out_refs))
        row_statistics = block.add(row_statistics, logits_ref[...], column == at_ref[...], soft_cap, inside)
        for ref, x in zip(out_refs, row_statistics, strict=True):
            ref[...] = x

    tile, number = pl.BlockSpec((rows, columns), lambda i, j: (i, j)), pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    outputs = launch.call(
        kernel,
        (logits_CV, at_C[:, None]),
        [jax.ShapeDtypeStruct((C, 1), jnp.float32)] * 3,
        params=launch.mosaic_tpu(("parallel", "arbitrary")),
        grid=(pl.cdiv(C, rows), pl.cdiv(labels, columns)),
        in_specs=[tile, number],
        out_specs=[number] * 3,
        cost=statistics_cost(C, V, soft_cap),
        name="linear_cross_entropy_statistics",
    )
    return block.LogitStatistics(*(x[:, 0] for x in outputs))


def gradient(
    logits_CV: jax.Array,
    at_C: jax.Array,
    log_z_C: jax.Array,
    of_z_C: jax.Array,
    of_target_C: jax.Array,
    labels: int,
    soft_cap: float | None,
    dtype: Any,
) -> jax.Array:
    """Return the logits' cotangent [C, V] in this dtype: see `block.gradient`."""
    C, V = logits_CV.shape
    rows, columns = _block("gradient", C, V, dtype)

    def kernel(logits_ref, at_ref, log_z_ref, of_z_ref, of_target_ref, out_ref) -> None:
        column = pl.program_id(1) * columns + jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
        numbers = (ref[...] for ref in (log_z_ref, of_z_ref, of_target_ref))
        inside = column < labels if labels < V else None
        out = block.gradient(logits_ref[...], column == at_ref[...], *numbers, soft_cap, inside)
        out_ref[...] = out.astype(out_ref.dtype)

    tile, number = pl.BlockSpec((rows, columns), lambda i, j: (i, j)), pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    return launch.call(
        kernel,
        (logits_CV, *(x[:, None] for x in (at_C, log_z_C, of_z_C, of_target_C))),
        [jax.ShapeDtypeStruct((C, V), dtype)],
        params=launch.mosaic_tpu(("parallel", "parallel")),
        grid=(pl.cdiv(C, rows), pl.cdiv(V, columns)),
        in_specs=[tile] + [number] * 4,
        out_specs=[tile],
        cost=gradient_cost(C, V, soft_cap, dtype),
        name="linear_cross_entropy_gradient",
    )[0]


def _block(kernel: str, C: int, V: int, dtype: Any) -> tuple[int, int]:
    """Return rows and columns of the blocks of logits [C, V]."""
    blocks = tuning.blocks(f"linear_cross_entropy_{kernel}", "mosaic_tpu", (V,), dtype, CrossEntropyTpuBlocks())
    columns = min(V, blocks.columns, _MAX_NUMBERS // 16)
    return min(C, blocks.rows, _MAX_NUMBERS // (columns + _EXTRA_COLUMNS) // 8 * 8), columns
