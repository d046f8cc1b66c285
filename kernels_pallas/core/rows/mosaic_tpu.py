"""Rows on TPUs, compiled by Mosaic."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost

# The share of the 16 MiB of VMEM, which a kernel may use by default, for blocks and their float32 intermediates. Eight
# of the widest rows take more, up to 16 MiB by this count, which exceeds what compilers for v4 to v7x were found to
# take.
_BUDGET = 10 * 2**20
_INTERMEDIATES = 4


class RowsTpuBlocks(NamedTuple):
    """A block of `rows` × `columns` numbers in VMEM; 0 columns means whole rows."""

    rows: int
    columns: int


def bytes_per_row(columns: int, dtypes: Sequence[Any]) -> int:
    """Return bytes of VMEM per row, for arrays with these dtypes and the intermediates."""
    # Blocks are fetched while others are computed: two buffers each, of whole lanes.
    lanes = pl.cdiv(columns, 128) * 128
    return lanes * (2 * sum(dtype.itemsize for dtype in dtypes) + 4 * (len(dtypes) + _INTERMEDIATES))


def rows_that_fit(rows: int, columns: int, dtypes: Sequence[Any]) -> int:
    """Return the most of these rows that the budget holds, in whole tiles, and no fewer than Mosaic takes."""
    # Numbers narrower than 32 bits are packed along the rows. For 16-bit numbers Mosaic also takes half a tile.
    tile = 8 * 4 // min(dtype.itemsize for dtype in dtypes)
    least = 8 if tile < 32 else tile
    return max(min(rows, _BUDGET // bytes_per_row(columns, dtypes)) // tile * tile, least)


def default_blocks(width: int, dtypes: Sequence[Any], elementwise: bool) -> RowsTpuBlocks:
    """Return blocks with the most rows that the budget holds; columns come in whole tiles, whatever the width."""
    columns = min(pl.next_power_of_2(width), 2048) if elementwise else 0
    return RowsTpuBlocks(rows_that_fit(1024, min(columns or width, width), dtypes), columns)


def run(
    step: Callable[..., tuple[tuple, tuple]],
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    sums: int,
    elementwise: bool,
    cost: KernelCost,
    name: str,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Run step(inside, rows, vectors) → (results, sums over rows) on blocks: results [R, W], float32 sums [W]."""
    R, W = rows[0].shape
    dtypes = [x.dtype for x in (*rows, *outputs)]
    # Mosaic would store bool in 32 bits; 8 bits are used where a tile of them fits.
    mask = jnp.int8 if 32 * bytes_per_row(W, dtypes) <= _BUDGET else jnp.bfloat16
    rows = [x.astype(mask) if x.dtype == jnp.bool else x for x in rows]
    dtypes = [x.dtype for x in (*rows, *outputs)]
    blocks = tuning.blocks(name, "mosaic_tpu", (W,), dtypes[0], default_blocks(W, dtypes, elementwise))
    columns = min(blocks.columns or W, W)
    # The measured size may come from narrower rows, or from fewer arrays.
    block_rows = min(rows_that_fit(blocks.rows, columns, dtypes), R)
    programs, column_blocks = pl.cdiv(R, block_rows), pl.cdiv(W, columns)

    def kernel(*refs) -> None:
        left = iter(refs)
        rows_in, vectors_in, rows_out, sums_out = (
            [next(left) for _ in range(n)] for n in (len(rows), len(vectors), len(outputs), sums)
        )
        values = tuple(launch.widened(ref[...]) for ref in rows_in)
        if sums and R % block_rows:  # beyond the array lie arbitrary values; sums would include them
            row = pl.program_id(1) * block_rows + jax.lax.broadcasted_iota(jnp.int32, (block_rows, columns), 0)
            values = tuple(jnp.where(row < R, x, jnp.zeros_like(x)) for x in values)
        results, added = step(None, values, tuple(launch.widened(ref[...]) for ref in vectors_in))
        for ref, result in zip(rows_out, results, strict=True):
            ref[...] = result.astype(ref.dtype)
        if not sums:
            return

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            for ref in sums_out:
                ref[...] = jnp.zeros_like(ref)

        for ref, more in zip(sums_out, added, strict=True):  # this axis of the grid runs in sequence
            ref[...] += more

    tile = pl.BlockSpec((block_rows, columns), lambda j, i: (i, j))
    vector = pl.BlockSpec((1, columns), lambda j, i: (0, j))
    results = launch.call(
        kernel,
        (*rows, *(v[None] for v in vectors)),
        (*outputs, *[jax.ShapeDtypeStruct((1, W), jnp.float32)] * sums),
        params=launch.mosaic_tpu(("parallel", "arbitrary" if sums else "parallel")),
        grid=(column_blocks, programs),
        in_specs=[tile] * len(rows) + [vector] * len(vectors),
        out_specs=[tile] * len(outputs) + [vector] * sums,
        cost=cost,
        name=name,
    )
    return tuple(results[: len(outputs)]), tuple(s[0] for s in results[len(outputs) :])
