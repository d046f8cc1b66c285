"""A grouped product on Hopper, compiled by Mosaic GPU.

A block of the grid computes one tile: of a product, rows of one group; of a gradient, a part of one group's matrix,
summed over all of its rows. A warpgroup loads parts of both operands by TMA into a ring in shared memory, several
stages ahead, and one or two others multiply them, 64 rows of the tile each.

Tiles of rows begin at a multiple of 8, which the copy engine needs: the first of a group may begin with rows of the
group before, and the last reach into the next. A product writes its group's own rows alone; a gradient puts zeros in
place of all others.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core import tuning
from kernels_pallas.core.hopper.launch import run_kernel
from kernels_pallas.core.hopper.memory import ROWS, TILE, Barriers, SharedBuffer, extent
from kernels_pallas.core.hopper.ring import (
    BlockPipeline,
    Consumers,
    PipelineBlocks,
    padded,
    stages_that_fit,
    warp_specialize,
)
from kernels_pallas.core.hopper.warpgroup import Warpgroup
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.grouped_matmul import visits

_ALIGNMENT = 8  # of the first row of a tile
_MOST_STAGES = 4
_BAND = 8  # most tiles side by side whose blocks run at the same time: they share rows in the cache

References = Mapping[str, Any]


class GroupedGpuBlocks(NamedTuple):
    """A tile of `m` × `n` numbers, of a product or a gradient, and the stages of the ring."""

    m: int
    n: int
    stages: int


def unsupported_reason(x: Any, columns: int) -> str | None:
    """Return why this kernel cannot serve rows like x [R, K] and matrices of so many columns, or None."""
    if x.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, not {x.dtype}"
    if x.shape[1] % TILE or columns % TILE:
        return f"matrices of {x.shape[1]} × {columns} numbers are not both ways a multiple of {TILE}"
    return None


def product(
    x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool, cost: KernelCost, name: str
) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group."""
    (R, K), N, G = x.shape, matrices.shape[1 if transposed else 2], len(sizes)
    blocks = _blocks(name, (pl.cdiv(R, G), N, K), x.dtype, N, ROWS if R <= ROWS * G else 2 * ROWS)
    pipeline, out_tile = _ring(blocks, x.dtype, matrix_rows=transposed, tiled=False)
    consumers, columns = pipeline.consumers, N // blocks.n
    band = max(size for size in range(1, _BAND + 1) if columns % size == 0)
    # The rows past the last group are one more, which has no matrix: of no products the sum is zero.
    rest = jnp.maximum(R - jnp.sum(sizes, dtype=jnp.int32), 0)
    walk = visits.of_groups(jnp.append(sizes, rest), R, blocks.m, _ALIGNMENT)
    begin, end = (jnp.clip(edge[walk.group] - walk.start, 0, blocks.m) for edge in (walk.begin, walk.end))
    end = jnp.where(jnp.arange(len(end)) < walk.count, end, 0)
    of_visit = jnp.stack([walk.group, walk.start // _ALIGNMENT, begin, end], axis=1)

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        visit, me = warpgroup.index("visit"), warpgroup.index()
        j = (warpgroup.index("band") * band + warpgroup.index("column")) * blocks.n
        group, eighth, begin, end = (ref["visits"][visit, c] for c in range(4))
        start, matrix = eighth * _ALIGNMENT, jnp.minimum(group, G - 1)
        steps = jnp.where(group < G, K // TILE, 0)

        def sources(step: jax.Array) -> dict[str, Any]:
            inner, outer = pl.ds(step * TILE, TILE), pl.ds(j, blocks.n)
            at = (outer, inner) if transposed else (inner, outer)
            return {"a": ref["x"].at[pl.ds(start, blocks.m), inner], "b": ref["matrices"].at[matrix, *at]}

        def operands(step: jax.Array) -> tuple[Any, Any]:
            x_tile, matrix_tile = pipeline.consumer_wait(warpgroup, ref, step, "a", "b")
            return x_tile.at[pl.ds(me * ROWS, ROWS)], matrix_tile

        def compute() -> None:
            total = warpgroup.wgmma_sum(
                steps,
                blocks.n,
                operands,
                (1, 1 if transposed else 0),
                lambda step: pipeline.consumer_release(warpgroup, ref, step, steps, "a", "b"),
            )
            first, last = (jnp.clip(edge - me * ROWS, 0, ROWS) for edge in (begin, end))
            for c in range(0, blocks.n, TILE):
                y_tile = ref["y"].at[pl.ds(start + me * ROWS, min(ROWS, R)), pl.ds(j + c, TILE)]
                warpgroup.tma_store_rows(total[:, c : c + TILE], ref["out_tile"].at[me], y_tile, first, last)

        @pl.when(begin < end)
        def _() -> None:
            warp_specialize(
                warpgroup, consumers, lambda: pipeline.producer_loop(warpgroup, ref, steps, sources), compute
            )

    (y,) = run_kernel(
        kernel,
        {"x": padded(x, extent(R, blocks.m, _ALIGNMENT), 0), "matrices": matrices, "visits": of_visit},
        {"y": jax.ShapeDtypeStruct((R, N), x.dtype)},
        grid={"column": band, "visit": len(of_visit), "band": columns // band},
        warpgroups=consumers.warpgroups,
        shared=out_tile | pipeline.shared(),
        cost=cost,
        name=name,
    )
    return y


def matrix_gradient(x: jax.Array, y: jax.Array, sizes: jax.Array, *, cost: KernelCost, name: str) -> jax.Array:
    """Return the sum of xᵀ · y over the rows of each group, [G, K, N] in x's dtype; zeros of an empty group."""
    (R, K), N, G = x.shape, y.shape[1], len(sizes)
    blocks = _blocks(name, (pl.cdiv(R, G), N, K), x.dtype, N, ROWS if K % (2 * ROWS) else 2 * ROWS)
    pipeline, out_tile = _ring(blocks, x.dtype, matrix_rows=False, tiled=True, x_rows=False)
    consumers, parts = pipeline.consumers, blocks.n // TILE
    end = jnp.cumsum(sizes, dtype=jnp.int32)

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, group = warpgroup.index(), warpgroup.index("group")
        i, j = warpgroup.index("row") * blocks.m, warpgroup.index("column") * blocks.n
        begin, end = ref["begin"][group], ref["end"][group]
        eighth = lax.div(begin, _ALIGNMENT)
        steps = jnp.where(begin < end, lax.div(end - eighth * _ALIGNMENT + TILE - 1, TILE), 0)

        def rows(step: jax.Array) -> jax.Array:
            """Return the first row of a step."""
            return (eighth + step * (TILE // _ALIGNMENT)) * _ALIGNMENT

        def sources(step: jax.Array) -> dict[str, Any]:
            at = pl.ds(rows(step), TILE)
            return {"a": ref["x"].at[at, pl.ds(i, blocks.m)], "b": ref["y"].at[at, pl.ds(j, blocks.n)]}

        def operands(step: jax.Array) -> tuple[Any, Any]:
            x_tile, y_tile = pipeline.consumer_wait(warpgroup, ref, step, "a", "b")
            mine = x_tile.at[:, pl.ds(me * ROWS, ROWS)]

            @pl.when((rows(step) < begin) | (end < rows(step) + TILE))
            def _() -> None:
                row = rows(step) + warpgroup.iota((TILE, TILE), 0)
                is_own = (begin <= row) & (row < end)

                def clear(tile: Any) -> None:
                    # Both operands, for a zero times a NaN of another group's row is a NaN.
                    values = warpgroup.load_tile(tile)
                    tile[...] = jnp.where(is_own, values, jnp.zeros_like(values))

                clear(mine)
                for c in range(parts):
                    part = y_tile.at[:, pl.ds(c * TILE, TILE)]
                    pl.when(me == c % consumers.count)(lambda part=part: clear(part))
                warpgroup.commit()
                warpgroup.arrive(ref["cleared"].at[0])
                warpgroup.wait(ref["cleared"].at[0])

            return mine, y_tile

        def compute() -> None:
            total = warpgroup.wgmma_sum(
                steps,
                blocks.n,
                operands,
                (0, 0),
                lambda step: pipeline.consumer_release(warpgroup, ref, step, steps, "a", "b"),
            )
            for c in range(0, blocks.n, TILE):
                tile = ref["out"].at[group, pl.ds(i + me * ROWS, ROWS), pl.ds(j + c, TILE)]
                warpgroup.tma_store((total[:, c : c + TILE], ref["out_tile"].at[me], tile))

        warp_specialize(warpgroup, consumers, lambda: pipeline.producer_loop(warpgroup, ref, steps, sources), compute)

    long = extent(R, TILE, _ALIGNMENT)
    (sums,) = run_kernel(
        kernel,
        {"x": padded(x, long, 0), "y": padded(y, long, 0), "begin": end - sizes, "end": end},
        {"out": jax.ShapeDtypeStruct((G, K, N), x.dtype)},
        grid={"row": K // blocks.m, "column": N // blocks.n, "group": G},
        warpgroups=consumers.warpgroups,
        shared=out_tile | pipeline.shared() | {"cleared": Barriers(1, arrivals=consumers.count)},
        cost=cost,
        name=name,
    )
    return sums


def _blocks(name: str, sizes: tuple[int, int, int], dtype: jnp.dtype, columns: int, rows: int) -> GroupedGpuBlocks:
    """Return the blocks of a kernel: at most `rows` rows of a tile, and tiles that divide so many columns.

    One warpgroup holds 64 × 128 sums, so that two blocks share an SM. Two hold 64 × 256 each, which multiply the most
    for each byte that is loaded.
    """
    blocks = tuning.blocks(name, "mosaic_gpu", sizes, dtype, GroupedGpuBlocks(rows, 2 * rows, _MOST_STAGES))
    n = max(n for n in (TILE, 2 * TILE, 4 * TILE) if columns % n == 0 and n <= max(blocks.n, TILE))
    return blocks._replace(m=min(blocks.m, rows), n=n)


def _ring(
    blocks: GroupedGpuBlocks, dtype: jnp.dtype, *, matrix_rows: bool, tiled: bool, x_rows: bool = True
) -> tuple[BlockPipeline, dict[str, SharedBuffer]]:
    """Return the ring of parts of the operands, and the buffers through which consumers write their tiles.

    A part has TILE numbers of what products contract: along the rows of the matrix, or of x, or else along the columns.
    """
    consumers = Consumers(blocks.m // ROWS)
    out_tile = {"out_tile": SharedBuffer((consumers.count, ROWS, TILE), dtype, tiled=tiled)}
    shapes = {
        "a": (blocks.m, TILE) if x_rows else (TILE, blocks.m),
        "b": (blocks.n, TILE) if matrix_rows else (TILE, blocks.n),
    }
    buffers = {key: SharedBuffer(shape, dtype, tiled=True) for key, shape in shapes.items()}
    stages = max(2, min(blocks.stages, stages_that_fit(out_tile, buffers)))
    return BlockPipeline(PipelineBlocks(TILE, stages), buffers, together=True, consumers=consumers), out_tile
