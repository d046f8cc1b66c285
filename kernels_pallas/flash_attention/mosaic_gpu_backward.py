"""The backward pass of attention on Hopper: FlashAttention-3's single kernel (arXiv:2407.08608, appendix B.1), of five
products. One warpgroup loads blocks and two compute.

A block of the grid has 128 keys, whose gradients it accumulates in registers, and loops over the queries that attend to
them. It adds its part of the query gradient to global memory once the blocks before it have: the kernel is
deterministic. All blocks go from the last queries to the first, and through all heads of some queries before the next
queries, so that each block follows directly after another.

Supported are keys of width 128 with values up to that, and 64 with 64, except with a float32 bias for each query, for
which shared memory is too small; the Triton kernels serve the rest. A block multiplies all queries between the first
and the last that attend to one of its keys: a key that is not finite may reach the gradients of others among them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core import hopper
from kernels_pallas.core.hopper import ROWS, Barriers, SharedBuffer, Warpgroup
from kernels_pallas.flash_attention import triton
from kernels_pallas.flash_attention.blocks import BlockRanges, add_order, key_ranges, query_ranges
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.pipeline import (
    TILE,
    TWO_CONSUMERS,
    BlockPipeline,
    KeyBlocks,
    PipelineBlocks,
    References,
    bias_of,
    of_bias,
    padded,
    stages_that_fit,
    tiled,
    warp_specialize,
)
from kernels_pallas.flash_attention.tiles import FlashSettings, recomputed, score_gradient, tanh_by_exp2

_KEYS = TWO_CONSUMERS.rows
# By the width of keys: the widest values whose gradients fit in registers, and queries per step.
_WIDEST_VALUES, _QUERIES = {64: 64, 128: 128}, {64: 128, 128: 64}


def serves(operands: Operands) -> bool:
    """Return whether registers and shared memory hold what heads of these widths need."""
    H, V = operands.sizes[5:]
    return V <= _WIDEST_VALUES.get(H, 0) and stages_that_fit(_own(operands), _pipeline_buffers(operands)) > 0


def _own(operands: Operands) -> dict[str, SharedBuffer | Barriers]:
    """Return a block's arrays in shared memory besides its pipeline."""
    dtype, (H, V) = operands.query.dtype, operands.sizes[5:]
    return _bias_pipeline(operands).shared() | {
        "key_tile": SharedBuffer((_KEYS, H), dtype, tiled=True),
        "value_tile": SharedBuffer((_KEYS, V), dtype, tiled=True),
        "d_scores_tile": SharedBuffer((2, _KEYS, _QUERIES[H]), dtype, tiled=True),  # of a step, and of the one before
        "d_query_tile": SharedBuffer((TWO_CONSUMERS.count, ROWS, TILE), jnp.float32, tiled=True),
    }


def _pipeline_buffers(operands: Operands) -> dict[str, SharedBuffer]:
    """Return the buffers of the pipeline, which are loaded for a step."""
    dtype, (H, V) = operands.query.dtype, operands.sizes[5:]
    queries = _QUERIES[H]
    return {
        "query": SharedBuffer((queries, H), dtype, tiled=True),
        "d_out": SharedBuffer((queries, V), dtype, tiled=True),
        "interval": SharedBuffer((2, queries), jnp.int32),
        "sums": SharedBuffer((2, queries), jnp.float32),
    }


def _bias_pipeline(operands: Operands) -> BlockPipeline:
    """Return the pipeline of the bias: of one stage, since it is read early in a step."""
    bias, queries = operands.bias, _QUERIES[operands.sizes[5]]
    buffers = {}
    if bias is not None:
        biased = KeyBlocks(operands).biased
        buffers["bias"] = SharedBuffer((queries, _KEYS) if biased else (_KEYS,), bias.dtype, tiled=biased)
    return BlockPipeline(PipelineBlocks(queries, 1), buffers)


def backward(
    settings: FlashSettings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value.

    log_sum_exp, in units of log₂ e, and delta are float32 [B, N, T]. Tiles of scores are transposed, [keys, queries].
    """
    if not serves(operands):
        return triton.backward(settings, operands, log_sum_exp, delta, d_out)
    B, T, S, N, K, H, V = operands.sizes
    dtype, queries = operands.query.dtype, _QUERIES[H]
    rows, columns = pl.cdiv(T, queries), pl.cdiv(S, _KEYS)
    shares = operands.shares(columns * K * B)
    heads = N // (K * shares)  # query heads per block
    bias, biased = operands.bias, KeyBlocks(operands).biased
    own, biases = _own(operands), _bias_pipeline(operands)
    pipeline = BlockPipeline.of("gradients", operands, 0, lambda _: _pipeline_buffers(operands), own, together=True)
    ranges = query_ranges(key_ranges(operands.start, operands.end, queries, _KEYS), columns)

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, b, share, column = (warpgroup.index(*axis) for axis in ((), ("batch",), ("head",), ("block",)))
        k = lax.div(share, shares)
        visited = BlockRanges(*(ref["ranges"][b, column, c] for c in range(4)))
        steps = (visited.last - visited.first) * heads

        def at(step: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the head and block of queries of a step."""
            return share * heads + lax.rem(step, heads), visited.last - 1 - lax.div(step, heads)

        def sources(step: jax.Array) -> dict[str, Any]:
            n, i = at(step)
            where = pl.ds(i * queries, queries)
            sources = {name: ref[name].at[b, where, n] for name in ("query", "d_out")}
            sources |= {"interval": ref["interval"].at[b, i], "sums": ref["sums"].at[b, n, i]}
            if bias is not None:
                sources["bias"] = of_bias(ref, b, n).at[where if biased else 0, pl.ds(column * _KEYS, _KEYS)]
            return sources

        def half(w: Any) -> tuple[Any, Any]:
            """Return rows and columns of the half of a step's query gradient that a warpgroup computes."""
            across = H > TILE
            return pl.ds(0 if across else w * ROWS, ROWS), pl.ds(w * TILE if across else 0, TILE)

        def add_query_gradient(step: jax.Array, meanwhile: Callable[[], None]) -> None:
            """Add this block's gradient of a step's queries to global memory."""
            n, i = at(step)
            d_query = ref["d_query"].at[b, pl.ds(i * queries, queries), n]
            warpgroup.wait(ref["d_query_ready"].at[0])
            warpgroup.tma_add_in_order(
                [(ref["d_query_tile"].at[w], d_query.at[half(w)]) for w in range(TWO_CONSUMERS.count)],
                ref["counters"].at[b, n, i],
                ref["add_order"][b if ref["add_order"].shape[0] > 1 else 0, column, i],
                lambda: warpgroup.arrive(ref["d_query_free"].at[0]),
                meanwhile,
            )

        def compute() -> None:
            first, mine = (column * TWO_CONSUMERS.count + me) * ROWS, pl.ds(me * ROWS, ROWS)
            key, value, ready = ref["key_tile"].at[mine], ref["value_tile"].at[mine], ref["own_ready"].at[0]
            warpgroup.tma_load(ref["key"].at[b, pl.ds(first, ROWS), k], key, ready)
            warpgroup.tma_load(ref["value"].at[b, pl.ds(first, ROWS), k], value, ready)
            warpgroup.wait(ready)
            my_queries, my_columns = half(me)

            def d_scores_of(step: jax.Array) -> Any:
                return ref["d_scores_tile"].at[lax.rem(step + 1, 2)]

            def query_terms(step: jax.Array) -> tuple[Any, Any]:
                """Return the operands of this warpgroup's half of a step's query gradient."""
                return d_scores_of(step).at[:, my_queries], ref["key_tile"].at[:, my_columns]

            def put(step: jax.Array, d_query: jax.Array) -> None:
                pl.when(step > 0)(lambda: warpgroup.wait(ref["d_query_free"].at[0]))
                ref["d_query_tile"][me] = d_query

            def bias_of_scores(step: jax.Array) -> jax.Array | None:
                if bias is None:
                    return None
                (slot,) = biases.consumer_wait(warpgroup, ref, step, "bias")
                if biased:
                    of_scores = warpgroup.load_transposed(slot.at[:, mine])
                else:
                    of_scores = warpgroup.broadcast_by_row(warpgroup.load_by_row(slot.at[mine]), queries)
                biases.consumer_release(warpgroup, ref, step, steps, "bias", loaded=True)
                return of_scores

            def step(now: jax.Array, carry: tuple) -> tuple:
                d_key, d_value = carry
                _, i = at(now)
                slots = dict(
                    zip(pipeline.buffers, pipeline.consumer_wait(warpgroup, ref, now, *pipeline.buffers), strict=True)
                )

                def down(name: str, row: int) -> jax.Array:
                    return warpgroup.broadcast_by_column(warpgroup.load_by_column(slots[name].at[row]), ROWS)

                def hide(values: jax.Array) -> jax.Array:
                    index = first + warpgroup.iota((ROWS, queries), 0)
                    unmasked = (down("interval", 0) <= index) & (index < down("interval", 1))
                    return jnp.where(unmasked, values, -jnp.inf)

                products, d_weights = warpgroup.wgmma((key, slots["query"]), (value, slots["d_out"]))
                values, factor, slope = settings.factored(products, bias_of_scores(now), tanh=tanh_by_exp2)
                whole = (visited.full <= i) & (i < visited.full_end)
                values = lax.cond(whole, lambda values: values, hide, values)
                weights = recomputed(jnp.exp2(values * factor - down("sums", 0)))
                d_scores = score_gradient(weights, d_weights, down("sums", 1), slope).astype(dtype)

                def hand_on(d_query: jax.Array) -> None:
                    """Hand score gradients to the other warpgroup, and the finished query gradient to the producer."""
                    d_scores_of(now)[mine] = d_scores
                    pl.when(now > 0)(lambda: put(now - 1, d_query))
                    warpgroup.commit()
                    warpgroup.arrive(ref["d_scores_ready"].at[0])
                    pl.when(now > 0)(lambda: warpgroup.arrive(ref["d_query_ready"].at[0]))

                # The first step has no step before it, and its product with earlier scores is discarded.
                pl.when(now > 0)(lambda: warpgroup.wait(ref["d_scores_ready"].at[0]))
                d_value, d_key = warpgroup.wgmma_overlapped(
                    query_terms(now - 1),
                    hand_on,
                    (d_value, weights.astype(dtype), slots["d_out"]),
                    (d_key, d_scores, slots["query"]),
                )
                # Reads by other than wgmma were committed in hand_on.
                pipeline.consumer_release(warpgroup, ref, now, steps, *pipeline.buffers)
                return d_key, d_value

            zeros = tuple(warpgroup.tile(jnp.zeros((ROWS, width), jnp.float32)) for width in (H, V))
            d_key, d_value = lax.fori_loop(0, steps, step, zeros)

            @pl.when(steps > 0)
            def _() -> None:
                warpgroup.wait(ref["d_scores_ready"].at[0])
                warpgroup.wgmma_overlapped(query_terms(steps - 1), lambda d_query: put(steps - 1, d_query))
                warpgroup.commit()
                warpgroup.arrive(ref["d_query_ready"].at[0])
                # Wait until the other warpgroup no longer reads the buffers that the gradients overwrite.
                warpgroup.wait(ref["d_query_free"].at[0])

            results = [(d_key * settings.scale, key, "d_key"), (d_value, value, "d_value")]
            results = [(x, buffer, ref[name].at[b, pl.ds(first, ROWS), share]) for x, buffer, name in results]
            if shares == 1:  # the gradients overwrite their own keys and values
                warpgroup.tma_store(*results)
                return
            buffer = ref["d_query_tile"].at[me]
            for x, _, result in results:
                for c in range(0, x.shape[1], TILE):
                    warpgroup.tma_store((x[:, c : c + TILE], buffer, result.at[:, pl.ds(c, TILE)]))

        warp_specialize(
            warpgroup,
            TWO_CONSUMERS,
            lambda: pipeline.producer_loop(warpgroup, ref, steps, sources, (biases,), add_query_gradient),
            compute,
        )

    def stacked(*rows: jax.Array) -> jax.Array:
        """Reshape each [..., T] to [..., blocks, 2, queries]."""
        return jnp.stack([tiled(x, queries, queries) for x in rows], axis=-2)

    key, value = (padded(x, _KEYS) for x in (operands.key, operands.value))
    d_query, d_key, d_value = hopper.run(
        kernel,
        {
            "query": padded(operands.query, queries),
            "key": key,
            "value": value,
            "interval": stacked(*operands.intervals),
            "sums": stacked(log_sum_exp, delta),
            "d_out": padded(d_out, queries),
            "ranges": ranges.stacked(B),
            "add_order": add_order(ranges, rows),
        }
        | ({} if bias is None else {"bias": bias_of(operands, queries, _KEYS)}),
        {
            "d_query": jax.ShapeDtypeStruct((B, rows * queries, N, H), jnp.float32),
            "d_key": operands.of_shares(key, shares),
            "d_value": operands.of_shares(value, shares),
        },
        grid={"head": K * shares, "block": columns, "batch": B},
        warpgroups=TWO_CONSUMERS.warpgroups,
        shared=own
        | pipeline.shared()
        | {
            "own_ready": Barriers(1, arrivals=2 * TWO_CONSUMERS.count),
            "d_scores_ready": Barriers(1, arrivals=TWO_CONSUMERS.count),
            "d_query_ready": Barriers(1, arrivals=TWO_CONSUMERS.count),
            "d_query_free": Barriers(1),
        },
        counters={"counters": (B, N, rows)},
        cost=operands.backward_cost(settings.unmasked_scores),
        name="flash_attention_gradients",
    )
    start, end = operands.intervals
    some = (start < end)[:, :, None, None]  # gradients of queries that attend to nothing may never have been written
    d_query = jnp.where(some, d_query[:, :T] * settings.scale, 0.0).astype(dtype)
    return d_query, *(operands.joined(x[:, :S], shares) for x in (d_key, d_value))
