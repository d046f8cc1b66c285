"""Rows on NVIDIA GPUs, compiled by Triton."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, target, tuning
from kernels_pallas.core.launch import KernelCost

# Numbers that a 32-bit offset can address.
_REACH = 2**31

# The widest rows whose next one is loaded while one is computed: it takes registers, which wider ones fill.
_AHEAD = 8192


class RowsTritonBlocks(NamedTuple):
    """A block of `rows` × `columns` numbers (powers of two) in registers, computed by `warps` of 32 threads.

    0 columns means whole rows. `programs` run along the rows, each with a loop over its share of blocks; 0 gives each
    one block.
    """

    rows: int
    columns: int
    warps: int
    programs: int = 0


def default_blocks(rows: int, width: int, sums: int, elementwise: bool, cores: int) -> RowsTritonBlocks:
    """Return blocks of about 4096 numbers and 16 per thread: two loads of 16 bytes in bfloat16.

    With sums, rows of more than 1024 are blocks of their own, of 8 numbers per thread: operands, scale and sums then
    leave room for 32 warps on an SM.
    """
    columns = min(pl.next_power_of_2(width), 1024) if elementwise else pl.next_power_of_2(width)
    block_rows = min(max(1, 4096 // columns), pl.next_power_of_2(rows))
    per_thread = 16
    if sums and columns > 1024:
        block_rows, per_thread = 1, 8
    warps = min(max(block_rows * columns // (32 * per_thread), 1), 32)
    # Each program writes a partial sum of W float32 numbers: no more programs than run at once.
    programs = cores * (4 if columns <= 1024 else 32 // warps)
    return RowsTritonBlocks(block_rows, columns if elementwise else 0, warps, programs if sums else 0)


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
    # Pallas counts in 32 bits for arrays of at most 2³² bytes, twice as many as 32-bit offsets reach in a mask.
    rows = [x.astype(jnp.int16) if x.dtype.itemsize == 1 and x.size > _REACH else x for x in rows]
    safe = default_blocks(R, W, sums, elementwise, target.current().cores)
    blocks = tuning.blocks(name, "triton", (W,), rows[0].dtype, safe)
    columns = blocks.columns or pl.next_power_of_2(W)
    steps = pl.cdiv(pl.cdiv(R, blocks.rows), blocks.programs) if blocks.programs else 1
    share = blocks.rows * steps
    programs, column_blocks = pl.cdiv(R, share), pl.cdiv(W, columns)

    def kernel(*refs) -> None:
        rows_in, vectors_in, rows_out, sums_out = _split(refs, len(rows), len(vectors), len(outputs), sums)
        first_row, first_column = pl.program_id(0) * share, pl.program_id(1) * columns
        # A block may extend beyond the array, and only these masks keep accesses inside.
        inside = None
        if W % columns:
            inside = first_column + jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1) < W

        def mask_of(i: jax.Array | int) -> jax.Array | None:
            mask = inside
            if R % share:
                row = first_row + i * blocks.rows + jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, 1), 0)
                mask = row < R if inside is None else (row < R) & inside
            return mask if mask is None else jnp.broadcast_to(mask, (blocks.rows, columns))

        def loaded(i: jax.Array | int) -> tuple:
            at, mask = pl.ds(i * blocks.rows, blocks.rows), mask_of(i)
            return tuple(launch.load(ref.at[at, :], mask) for ref in rows_in)

        def scales() -> tuple:
            return tuple(launch.widened(launch.load(ref, inside)) for ref in vectors_in)

        # In whole rows their registers are better used by the next row; a block of columns has few of them, and Triton
        # computes an activation twice where they are loaded in the loop.
        kept = scales() if elementwise else None

        def one_block(i: jax.Array | int, values: tuple, totals: tuple) -> tuple:
            results, added = step(inside, tuple(map(launch.widened, values)), scales() if kept is None else kept)
            for ref, result in zip(rows_out, results, strict=True):
                launch.store(ref.at[pl.ds(i * blocks.rows, blocks.rows), :], result, mask_of(i))
            return tuple(total + more for total, more in zip(totals, added, strict=True))

        def with_the_next(i: jax.Array, carry: tuple) -> tuple:
            values, totals = carry
            following = loaded(jnp.minimum(i + 1, steps - 1))  # in flight while this block is computed
            return following, one_block(i, values, totals)

        totals = (jnp.zeros((1, columns), jnp.float32),) * sums
        if steps == 1:
            totals = one_block(0, loaded(0), totals)
        elif columns <= _AHEAD:
            _, totals = jax.lax.fori_loop(0, steps, with_the_next, (loaded(0), totals))
        else:
            totals = jax.lax.fori_loop(0, steps, lambda i, totals: one_block(i, loaded(i), totals), totals)
        for ref, total in zip(sums_out, totals, strict=True):
            launch.store(ref, total, inside)

    tile = pl.BlockSpec((share, columns), lambda i, j: (i, j))
    vector = pl.BlockSpec((1, columns), lambda i, j: (0, j))
    partial = pl.BlockSpec((None, 1, columns), lambda i, j: (i, 0, j))
    results = launch.call(
        kernel,
        (*rows, *(v[None] for v in vectors)),
        (*outputs, *[jax.ShapeDtypeStruct((programs, 1, W), jnp.float32)] * sums),
        params=launch.triton(blocks.warps),
        grid=(programs, column_blocks),
        in_specs=[tile] * len(rows) + [vector] * len(vectors),
        out_specs=[tile] * len(outputs) + [partial] * sums,
        cost=cost,
        name=name,
    )
    partials = results[len(outputs) :]
    return tuple(results[: len(outputs)]), tuple(jnp.sum(p, axis=(0, 1)) for p in partials)


def _split(refs: Sequence, *counts: int) -> list[tuple]:
    left = iter(refs)
    return [tuple(next(left) for _ in range(n)) for n in counts]
