"""Statistics and gradients of a chunk's logits on NVIDIA GPUs, compiled by Triton."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.linear_cross_entropy import block
from kernels_pallas.linear_cross_entropy.costs import gradient_cost, statistics_cost


class CrossEntropyTritonBlocks(NamedTuple):
    """A block of `columns` logits of a row (a power of two) in registers, computed by `warps` of 32 threads.

    The default is 16 logits for each thread, four loads of 16 bytes. `stages` of a loop along the row overlap; 0 where
    there is no loop.
    """

    columns: int = 4096
    warps: int = 8
    stages: int = 3


def statistics(logits_CV: jax.Array, at_C: jax.Array, labels: int, soft_cap: float | None) -> block.LogitStatistics:
    """Return the statistics of the first `labels` logits of each row, [C] each: a program reads one row once."""
    C, V = logits_CV.shape
    blocks = tuning.blocks(
        "linear_cross_entropy_statistics", "triton", (V,), logits_CV.dtype, CrossEntropyTritonBlocks()
    )
    columns = min(pl.next_power_of_2(V), blocks.columns)
    whole, rest = divmod(labels, columns)

    def kernel(logits_ref, at_ref, *out_refs) -> None:
        at = at_ref[...].reshape(1, 1)

        def one_block(
            i: jax.Array | int, row_statistics: block.LogitStatistics, masked: bool = False
        ) -> block.LogitStatistics:
            column = i * columns + jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)
            ref = logits_ref.at[:, pl.ds(i * columns, columns)]
            inside = column < labels if masked else None
            # The load's mask ends at V, not at `labels`, so that it does not end within 16 bytes.
            return block.add(
                row_statistics, launch.load(ref, column < V if masked else None), column == at, soft_cap, inside
            )

        row_statistics = block.nothing(jnp.zeros((1, 1), jnp.float32))
        if whole:
            row_statistics = jax.lax.fori_loop(0, whole, one_block, row_statistics)
        if rest:
            row_statistics = one_block(whole, row_statistics, masked=True)
        for ref, x in zip(out_refs, row_statistics, strict=True):
            launch.store(ref, x.reshape(1))

    row = pl.BlockSpec((1, pl.cdiv(V, columns) * columns), lambda i: (i, 0))
    number = pl.BlockSpec((1,), lambda i: (i,))
    return block.LogitStatistics(
        *launch.call(
            kernel,
            (logits_CV, at_C),
            [jax.ShapeDtypeStruct((C,), jnp.float32)] * 3,
            params=launch.triton(blocks.warps, blocks.stages),
            grid=(C,),
            in_specs=[row, number],
            out_specs=[number] * 3,
            cost=statistics_cost(C, V, soft_cap),
            name="linear_cross_entropy_statistics",
        )
    )


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
    blocks = tuning.blocks("linear_cross_entropy_gradient", "triton", (V,), dtype, CrossEntropyTritonBlocks(stages=0))
    columns = min(pl.next_power_of_2(V), blocks.columns)

    def kernel(logits_ref, at_ref, log_z_ref, of_z_ref, of_target_ref, out_ref) -> None:
        column = pl.program_id(1) * columns + jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        mask = column < V if V % columns else None
        at, log_z, of_z, of_target = (ref[...].reshape(1, 1) for ref in (at_ref, log_z_ref, of_z_ref, of_target_ref))
        inside = column < labels if labels < V else None
        logits = launch.load(logits_ref, mask)
        launch.store(out_ref, block.gradient(logits, column == at, log_z, of_z, of_target, soft_cap, inside), mask)

    tile, number = pl.BlockSpec((1, columns), lambda i, j: (i, j)), pl.BlockSpec((1,), lambda i, j: (i,))
    return launch.call(
        kernel,
        (logits_CV, at_C, log_z_C, of_z_C, of_target_C),
        [jax.ShapeDtypeStruct((C, V), dtype)],
        params=launch.triton(blocks.warps),
        grid=(C, pl.cdiv(V, columns)),
        in_specs=[tile] + [number] * 4,
        out_specs=[tile],
        cost=gradient_cost(C, V, soft_cap, dtype),
        name="linear_cross_entropy_gradient",
    )[0]
