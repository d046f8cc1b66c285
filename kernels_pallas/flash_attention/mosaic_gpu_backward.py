"""The backward pass of attention on Hopper: FlashAttention-3's single kernel (arXiv:2407.08608, appendix B.1), of five
products. One warpgroup loads blocks and two compute.

A block of the grid has 128 keys, whose gradients it accumulates in registers, and loops over the queries that attend to
them. It adds its part of the query gradient to global memory: to be deterministic, once the blocks before it have; else
in any order. All blocks go from the last queries to the first, and through all heads of some queries before the next
queries, so that each block follows directly after another.

Supported are keys of width 128 with values up to that, and 64 with 64, except with a float32 bias for each query, for
which shared memory is too small; and 256 with 256 without a bias, where a block has 64 keys and each of its warpgroups
one gradient of them in registers. The Triton kernels serve the rest. A block multiplies all queries between the first
and the last that attend to one of its keys: a key that is not finite may reach the gradients of others among them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core.attention.scores import FlashSettings, recomputed, score_gradient, tanh_by_exp2
from kernels_pallas.core.hopper.launch import may_be_zeroed, run_kernel
from kernels_pallas.core.hopper.memory import ROWS, TILE, AddingTurn, Barriers, SharedBuffer
from kernels_pallas.core.hopper.ring import (
    TWO_CONSUMERS,
    BlockPipeline,
    PipelineBlocks,
    References,
    padded,
    stages_that_fit,
    warp_specialize,
)
from kernels_pallas.core.hopper.warpgroup import Warpgroup
from kernels_pallas.flash_attention import triton
from kernels_pallas.flash_attention.blocks import BlockRanges, add_order, key_ranges, query_ranges
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.pipeline import KeyBlocks, bias_of, of_bias, pipeline_of, tiled

# By the width of keys: the widest values whose gradients fit in registers, and queries per step.
_WIDEST_VALUES, _QUERIES = {64: 64, 128: 128, 256: 256}, {64: 128, 128: 64, 256: 64}


def serves(operands: Operands) -> bool:
    """Return whether registers and shared memory hold what heads of these widths need."""
    H, V = operands.sizes[5:]
    if _by_roles(operands) and (H != V or operands.bias is not None):
        return False
    return V <= _WIDEST_VALUES.get(H, 0) and stages_that_fit(_own(operands), _pipeline_buffers(operands)) > 0


def _by_roles(operands: Operands) -> bool:
    """Return whether the consumers divide the work by its kind, as `by_roles` says, since heads are wide."""
    return operands.sizes[5] > 128


def _keys(operands: Operands) -> int:
    """Return the keys of a block."""
    return ROWS if _by_roles(operands) else TWO_CONSUMERS.rows


def _own(operands: Operands) -> dict[str, SharedBuffer | Barriers]:
    """Return a block's arrays in shared memory besides its pipeline."""
    dtype, (H, V), keys = operands.query.dtype, operands.sizes[5:], _keys(operands)
    return _bias_pipeline(operands).shared() | {
        "key_tile": SharedBuffer((keys, H), dtype, tiled=True),
        "value_tile": SharedBuffer((keys, V), dtype, tiled=True),
        "d_scores_tile": SharedBuffer((2, keys, _QUERIES[H]), dtype, tiled=True),  # of a step, and of the one before
        "d_query_tile": SharedBuffer(
            (TWO_CONSUMERS.count, ROWS, max(TILE, H // TWO_CONSUMERS.count)), jnp.float32, tiled=True
        ),
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
        keys = _keys(operands)
        buffers["bias"] = SharedBuffer((queries, keys) if biased else (keys,), bias.dtype, tiled=biased)
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
    in_order = settings.deterministic or not may_be_zeroed(operands.query)
    keys = _keys(operands)
    rows, columns = pl.cdiv(T, queries), pl.cdiv(S, keys)
    shares = operands.shares(columns * K * B)
    heads = N // (K * shares)  # query heads per block
    bias, biased = operands.bias, KeyBlocks(operands).biased
    own, biases = _own(operands), _bias_pipeline(operands)
    pipeline = pipeline_of("gradients", operands, 0, lambda _: _pipeline_buffers(operands), own, together=True)
    ranges = query_ranges(key_ranges(operands.start, operands.end, queries, keys), columns)

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
                sources["bias"] = of_bias(ref, b, n).at[where if biased else 0, pl.ds(column * keys, keys)]
            return sources

        def half(w: Any) -> tuple[Any, Any]:
            """Return rows and columns of the half of a step's query gradient that a warpgroup computes."""
            across = H > TILE
            width = max(TILE, H // TWO_CONSUMERS.count)
            return pl.ds(0 if across else w * ROWS, ROWS), pl.ds(w * width if across else 0, width)

        def add_query_gradient(step: jax.Array, meanwhile: Callable[[], None]) -> None:
            """Add this block's gradient of a step's queries to global memory."""
            n, i = at(step)
            d_query = ref["d_query"].at[b, pl.ds(i * queries, queries), n]
            warpgroup.wait(ref["d_query_ready"].at[0])
            turn = None
            if in_order:
                order = ref["add_order"][b if ref["add_order"].shape[0] > 1 else 0, column, i]
                turn = AddingTurn(ref["counters"].at[b, n, i], order)
            warpgroup.tma_add(
                [(ref["d_query_tile"].at[w], d_query.at[half(w)]) for w in range(TWO_CONSUMERS.count)],
                lambda: warpgroup.arrive(ref["d_query_free"].at[0]),
                meanwhile,
                turn,
            )

        def d_scores_of(step: jax.Array) -> Any:
            return ref["d_scores_tile"].at[lax.rem(step + 1, 2)]

        my_queries, my_columns = half(me)

        def query_terms(step: jax.Array) -> tuple[Any, Any]:
            """Return the operands of this warpgroup's half of a step's query gradient."""
            return d_scores_of(step).at[:, my_queries], ref["key_tile"].at[:, my_columns]

        def put(step: jax.Array, d_query: jax.Array) -> None:
            pl.when(step > 0)(lambda: warpgroup.wait(ref["d_query_free"].at[0]))
            ref["d_query_tile"][me] = d_query

        def slots_of(step: jax.Array) -> dict[str, Any]:
            """Wait for the blocks of a step; return their slots."""
            return dict(
                zip(pipeline.buffers, pipeline.consumer_wait(warpgroup, ref, step, *pipeline.buffers), strict=True)
            )

        def by_query(row: Any) -> jax.Array:
            """Return numbers per query, repeated for the keys of a tile."""
            return warpgroup.broadcast_by_column(warpgroup.load_by_column(row), ROWS)

        def weights_of(
            products: jax.Array, i: jax.Array, slots: dict[str, Any], first_key: jax.Array, bias: Any
        ) -> tuple[jax.Array, jax.Array | None]:
            """Return the weights of a tile of the queries' block i, and the slope of `FlashSettings.factored`."""

            def hide(values: jax.Array) -> jax.Array:
                index = first_key + warpgroup.iota((ROWS, queries), 0)
                interval = slots["interval"]
                unmasked = (by_query(interval.at[0]) <= index) & (index < by_query(interval.at[1]))
                return jnp.where(unmasked, values, -jnp.inf)

            values, factor, slope = settings.factored(products, bias, tanh=tanh_by_exp2)
            whole = (visited.full <= i) & (i < visited.full_end)
            values = lax.cond(whole, lambda values: values, hide, values)
            return recomputed(jnp.exp2(values * factor - by_query(slots["sums"].at[0]))), slope

        def hand_on(step: jax.Array, d_scores: jax.Array | None, own: Any, d_query: jax.Array) -> None:
            """Hand score gradients to the other warpgroup, and the query gradient before them to the producer."""
            if d_scores is not None:
                own[...] = d_scores
            pl.when(step > 0)(lambda: put(step - 1, d_query))
            warpgroup.commit()
            warpgroup.arrive(ref["d_scores_ready"].at[0])
            pl.when(step > 0)(lambda: warpgroup.arrive(ref["d_query_ready"].at[0]))

        def await_d_scores(step: jax.Array) -> None:
            """Wait for the score gradients of the step before; the first has none, and discards their product."""
            pl.when(step > 0)(lambda: warpgroup.wait(ref["d_scores_ready"].at[0]))

        def finish(*results: tuple[jax.Array, Any, Any]) -> None:
            """Give the query gradient of the last step to the producer, and store this block's own gradients."""

            @pl.when(steps > 0)
            def _() -> None:
                warpgroup.wait(ref["d_scores_ready"].at[0])
                warpgroup.wgmma_overlapped(query_terms(steps - 1), lambda d_query: put(steps - 1, d_query))
                warpgroup.commit()
                warpgroup.arrive(ref["d_query_ready"].at[0])
                # Wait until the other warpgroup no longer reads the buffers that the gradients overwrite.
                warpgroup.wait(ref["d_query_free"].at[0])

            if shares == 1:  # the gradients overwrite their own keys and values
                warpgroup.tma_store(*results)
                return
            buffer = ref["d_query_tile"].at[me]
            for x, _, result in results:
                for c in range(0, x.shape[1], buffer.shape[1]):
                    width = min(buffer.shape[1], x.shape[1] - c)
                    warpgroup.tma_store((x[:, c : c + width], buffer, result.at[:, pl.ds(c, width)]))

        def of_keys(name: str, first_key: jax.Array) -> Any:
            """Return this block's keys or values, or their gradient, from a key on."""
            return ref[name].at[b, pl.ds(first_key, ROWS), share if name.startswith("d_") else k]

        def by_roles() -> None:
            """Compute in two roles, each with one sum in registers: weights and d_value, and d_scores and d_key.

            The weights go by way of shared memory, where the scores' gradient then replaces them.
            """
            first, ready = column * ROWS, ref["own_ready"].at[0]
            key, value = ref["key_tile"], ref["value_tile"]

            def multiply(step: jax.Array, total: jax.Array, operand: jax.Array, block: Any, d_scores: Any) -> jax.Array:
                (total,) = warpgroup.wgmma_overlapped(
                    query_terms(step - 1),
                    functools.partial(hand_on, step, d_scores, d_scores_of(step)),
                    (total, operand, block),
                )
                pipeline.consumer_release(warpgroup, ref, step, steps, *pipeline.buffers)
                return total

            def value_step(step: jax.Array, d_value: jax.Array) -> jax.Array:
                _, i = at(step)
                slots = slots_of(step)
                (products,) = warpgroup.wgmma((key, slots["query"]))
                weights, slope = weights_of(products, i, slots, first, None)
                await_d_scores(step)
                d_scores_of(step)[...] = (weights if slope is None else weights * slope).astype(dtype)
                warpgroup.commit()
                warpgroup.arrive(ref["weights_ready"].at[0])
                return multiply(step, d_value, weights.astype(dtype), slots["d_out"], None)

            def key_step(step: jax.Array, d_key: jax.Array) -> jax.Array:
                slots = slots_of(step)
                (d_weights,) = warpgroup.wgmma((value, slots["d_out"]))
                await_d_scores(step)
                warpgroup.wait(ref["weights_ready"].at[0])
                weights = warpgroup.load_tile(d_scores_of(step)).astype(jnp.float32)
                d_scores = score_gradient(weights, d_weights, by_query(slots["sums"].at[1]), None).astype(dtype)
                return multiply(step, d_key, d_scores, slots["query"], d_scores)

            def role(name: str, tile: Any, result_tile: Any, step: Callable, scale: float) -> None:
                warpgroup.tma_load(of_keys(name, first), tile, ready)
                warpgroup.wait(ready)
                result = "d_value" if name == "key" else "d_key"
                zeros = warpgroup.tile(jnp.zeros((ROWS, H), jnp.float32))
                total = lax.fori_loop(0, steps, step, zeros)
                finish((total * scale, result_tile, of_keys(result, first)))

            pl.when(me == 0)(lambda: role("key", key, value, value_step, 1.0))
            pl.when(me == 1)(lambda: role("value", value, key, key_step, settings.scale))

        def by_keys() -> None:
            """Compute everything of this warpgroup's keys."""
            first, mine = (column * TWO_CONSUMERS.count + me) * ROWS, pl.ds(me * ROWS, ROWS)
            key, value, ready = ref["key_tile"].at[mine], ref["value_tile"].at[mine], ref["own_ready"].at[0]
            warpgroup.tma_load(of_keys("key", first), key, ready)
            warpgroup.tma_load(of_keys("value", first), value, ready)
            warpgroup.wait(ready)

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
                slots = slots_of(now)
                products, d_weights = warpgroup.wgmma((key, slots["query"]), (value, slots["d_out"]))
                weights, slope = weights_of(products, i, slots, first, bias_of_scores(now))
                d_scores = score_gradient(weights, d_weights, by_query(slots["sums"].at[1]), slope).astype(dtype)
                await_d_scores(now)
                d_value, d_key = warpgroup.wgmma_overlapped(
                    query_terms(now - 1),
                    functools.partial(hand_on, now, d_scores, d_scores_of(now).at[mine]),
                    (d_value, weights.astype(dtype), slots["d_out"]),
                    (d_key, d_scores, slots["query"]),
                )
                # Reads by other than wgmma were committed in hand_on.
                pipeline.consumer_release(warpgroup, ref, now, steps, *pipeline.buffers)
                return d_key, d_value

            zeros = tuple(warpgroup.tile(jnp.zeros((ROWS, width), jnp.float32)) for width in (H, V))
            d_key, d_value = lax.fori_loop(0, steps, step, zeros)
            finish(
                (d_key * settings.scale, key, of_keys("d_key", first)),
                (d_value, value, of_keys("d_value", first)),
            )

        warp_specialize(
            warpgroup,
            TWO_CONSUMERS,
            lambda: pipeline.producer_loop(warpgroup, ref, steps, sources, (biases,), add_query_gradient),
            by_roles if _by_roles(operands) else by_keys,
        )

    def stacked(*rows: jax.Array) -> jax.Array:
        """Reshape each [..., T] to [..., blocks, 2, queries]."""
        return jnp.stack([tiled(x, queries, queries) for x in rows], axis=-2)

    key, value = (padded(x, keys) for x in (operands.key, operands.value))
    d_query, d_key, d_value = run_kernel(
        kernel,
        {
            "query": padded(operands.query, queries),
            "key": key,
            "value": value,
            "interval": stacked(*operands.intervals),
            "sums": stacked(log_sum_exp, delta),
            "d_out": padded(d_out, queries),
            "ranges": ranges.stacked(B),
        }
        | ({"add_order": add_order(ranges, rows)} if in_order else {})
        | ({} if bias is None else {"bias": bias_of(operands, queries, keys)}),
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
            "own_ready": Barriers(1, arrivals=TWO_CONSUMERS.count if _by_roles(operands) else 2 * TWO_CONSUMERS.count),
            "d_scores_ready": Barriers(1, arrivals=TWO_CONSUMERS.count),
            "d_query_ready": Barriers(1, arrivals=TWO_CONSUMERS.count),
            "d_query_free": Barriers(1),
        }
        | ({"weights_ready": Barriers(1)} if _by_roles(operands) else {}),
        **({"counters": {"counters": (B, N, rows)}} if in_order else {"zeroed": ("d_query",)}),
        cost=operands.backward_cost(settings.unmasked_scores),
        name="flash_attention_gradients",
    )
    start, end = operands.intervals
    some = (start < end)[:, :, None, None]  # gradients of queries that attend to nothing may never have been written
    d_query = jnp.where(some, d_query[:, :T] * settings.scale, 0.0).astype(dtype)
    return d_query, *(operands.joined(x[:, :S], shares) for x in (d_key, d_value))
