"""The backward pass of attention on Hopper: FlashAttention-2's two kernels (arXiv:2307.08691, algorithm 2), with blocks
that one warpgroup fetches and two compute with.

Heads whose widths are more than 256 together are left to the Triton kernels: sums of both gradients of 64 keys would
not fit a warpgroup's registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import hopper
from kernels_pallas.flash_attention import triton
from kernels_pallas.flash_attention.blocks import key_ranges, query_ranges
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.ring import (
    COMPUTING,
    Order,
    References,
    Ring,
    keys_and_values,
    padded,
    roles,
    tiled,
)
from kernels_pallas.flash_attention.tiles import Settings, score_gradient, tanh_by_exp2
from kernels_pallas.hopper import ROWS, Barriers, Shared, Warpgroup

_BLOCK = COMPUTING * ROWS
_MAX_WIDTHS = 256


def _too_wide(operands: Operands) -> bool:
    return sum(operands.sizes[5:]) > _MAX_WIDTHS


def query_gradient(
    settings: Settings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> jax.Array:
    """Gradient of the query; log_sum_exp in units of log₂ e, and delta: float32 [B, N, T]."""
    if _too_wide(operands):
        return triton.query_gradient(_plain(settings), operands, log_sum_exp, delta, d_out)
    B, T, S, N, K, H, V = operands.sizes
    dtype, rows = operands.query.dtype, pl.cdiv(T, _BLOCK)
    own = {
        "query_tile": Shared((COMPUTING, ROWS, H), dtype, tiled=True),
        "d_out_tile": Shared((COMPUTING, ROWS, V), dtype, tiled=True),
    }
    # As many keys as registers hold scores and their gradients of, besides the sums of all H columns.
    keys = 128 if max(H, V) <= 64 else 64
    ring = Ring.of("query_gradient", operands, keys, functools.partial(keys_and_values, operands), own)
    keys = ring.blocks.rows

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, b, n = warpgroup.index(), warpgroup.index("batch"), warpgroup.index("head")
        i = rows - 1 - warpgroup.index("block")
        order = Order(*(ref["ranges"][b, i, c] for c in range(4)))

        def sources(step: jax.Array) -> dict[str, Any]:
            at = b, pl.ds(order.block(step) * keys, keys), lax.div(n, N // K)
            return {"key": ref["key"].at[at], "value": ref["value"].at[at]}

        def compute() -> None:
            tile, query, d_out = i * COMPUTING + me, ref["query_tile"].at[me], ref["d_out_tile"].at[me]
            at, ready = pl.ds(tile * ROWS, ROWS), ref["own_ready"].at[me]
            warpgroup.fetch(ref["query"].at[b, at, n], query, ready)
            warpgroup.fetch(ref["d_out"].at[b, at, n], d_out, ready)
            start, end = (warpgroup.load_by_row(ref[name].at[b, tile]) for name in ("start", "end"))
            log_sum_exp, delta = (warpgroup.load_by_row(ref[name].at[b, n, tile]) for name in ("log_sum_exp", "delta"))
            warpgroup.wait(ready)

            def step(j: jax.Array, d_query: jax.Array, masked: bool) -> jax.Array:
                key, value = (ring.take(warpgroup, ref, name, j) for name in ("key", "value"))
                products, d_weights = warpgroup.products_of_rows((query, key), (d_out, value))
                ring.leave(warpgroup, ref, j, order.steps, "value")
                values, factor, slope = settings.factored(products, tanh=tanh_by_exp2)
                if masked:
                    index = order.block(j) * keys + warpgroup.count((ROWS, keys), 1)
                    seen = (warpgroup.across(start, keys) <= index) & (index < warpgroup.across(end, keys))
                    values = jnp.where(seen, values, -jnp.inf)
                weights = jnp.exp2(values * factor - warpgroup.across(log_sum_exp, keys))
                d_scores = score_gradient(weights, d_weights, warpgroup.across(delta, keys), slope)
                d_query = warpgroup.add_product(d_query, d_scores.astype(dtype), key)
                ring.leave(warpgroup, ref, j, order.steps, "key")
                return d_query

            d_query = order.over(step, warpgroup.tile(jnp.zeros((ROWS, H), jnp.float32)))
            warpgroup.send((d_query * settings.scale, query, ref["d_query"].at[b, at, n]))

        roles(warpgroup, lambda: ring.fill(warpgroup, ref, order.steps, sources), compute)

    start, end = operands.intervals
    (d_query,) = hopper.run(
        kernel,
        {
            "query": padded(operands.query, _BLOCK),
            "key": padded(operands.key, keys),
            "value": padded(operands.value, keys),
            "start": tiled(start, _BLOCK),
            "end": tiled(end, _BLOCK),
            "log_sum_exp": tiled(log_sum_exp, _BLOCK),
            "delta": tiled(delta, _BLOCK),
            "d_out": padded(d_out, _BLOCK),
            "ranges": key_ranges(operands.start, operands.end, _BLOCK, keys).stacked(B),
        },
        {"d_query": jax.ShapeDtypeStruct((B, rows * _BLOCK, N, H), dtype)},
        grid={"head": N, "block": rows, "batch": B},
        warpgroups=COMPUTING + 1,
        shared=own | ring.shared() | {"own_ready": Barriers(COMPUTING, arrivals=len(own))},
        cost=operands.query_cost(settings.seen),
        name="flash_attention_query_gradient",
        interpret=settings.interpret,
    )
    return d_query[:, :T]


def key_gradient(
    settings: Settings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of key and value: see `query_gradient`. Tiles of scores are transposed, [keys, queries]."""
    if _too_wide(operands):
        return triton.key_gradient(_plain(settings), operands, log_sum_exp, delta, d_out)
    B, T, S, N, K, H, V = operands.sizes
    dtype, columns, group = operands.query.dtype, pl.cdiv(S, _BLOCK), N // K
    own = {
        "key_tile": Shared((COMPUTING, ROWS, H), dtype, tiled=True),
        "value_tile": Shared((COMPUTING, ROWS, V), dtype, tiled=True),
    }

    def parts(queries: int) -> dict[str, Shared]:
        return {
            "query": Shared((queries, H), dtype, tiled=True),
            "log_sum_exp": Shared((queries,), jnp.float32),
            "d_out": Shared((queries, V), dtype, tiled=True),
            "delta": Shared((queries,), jnp.float32),
        }

    ring = Ring.of("key_gradient", operands, ROWS, parts, own)
    queries = ring.blocks.rows
    of_queries = key_ranges(operands.start, operands.end, queries, _BLOCK)

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, b, k, column = (warpgroup.index(*axis) for axis in ((), ("batch",), ("head",), ("block",)))
        order = Order(*(ref["ranges"][b, column, c] for c in range(4)))
        steps = order.steps * group

        def sources(step: jax.Array) -> dict[str, Any]:
            n, i = k * group + lax.div(step, order.steps), order.block(lax.rem(step, order.steps))
            at = pl.ds(i * queries, queries)
            rows = {name: ref[name].at[b, at, n] for name in ("query", "d_out")}
            return rows | {name: ref[name].at[b, n, i] for name in ("log_sum_exp", "delta")}

        def compute() -> None:
            first = (column * COMPUTING + me) * ROWS
            at, ready = (b, pl.ds(first, ROWS), k), ref["own_ready"].at[me]
            key, value = ref["key_tile"].at[me], ref["value_tile"].at[me]
            warpgroup.fetch(ref["key"].at[at], key, ready)
            warpgroup.fetch(ref["value"].at[at], value, ready)
            warpgroup.wait(ready)

            def of_head(g: jax.Array, carry: tuple) -> tuple:
                def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
                    d_key, d_value = carry
                    now = g * order.steps + j
                    query, d_out, log_sum_exp, delta = (
                        ring.take(warpgroup, ref, name, now) for name in ("query", "d_out", "log_sum_exp", "delta")
                    )
                    (products,) = warpgroup.products_of_rows((key, query))
                    values, factor, slope = settings.factored(products, tanh=tanh_by_exp2)
                    if masked:
                        i = order.block(j)
                        start, end = (
                            warpgroup.down(warpgroup.load_by_column(ref[name].at[b, i]), ROWS)
                            for name in ("start", "end")
                        )
                        index = first + warpgroup.count((ROWS, queries), 0)
                        values = jnp.where((start <= index) & (index < end), values, -jnp.inf)
                    sums = warpgroup.down(warpgroup.load_by_column(log_sum_exp), ROWS)
                    weights = jnp.exp2(values * factor - sums)
                    d_value = warpgroup.add_product(d_value, weights.astype(dtype), d_out)
                    (d_weights,) = warpgroup.products_of_rows((value, d_out))
                    means = warpgroup.down(warpgroup.load_by_column(delta), ROWS)
                    d_scores = score_gradient(weights, d_weights, means, slope)
                    d_key = warpgroup.add_product(d_key, d_scores.astype(dtype), query)
                    ring.leave(warpgroup, ref, now, steps, *ring.parts)
                    return d_key, d_value

                return order.over(step, carry)

            zeros = tuple(warpgroup.tile(jnp.zeros((ROWS, width), jnp.float32)) for width in (H, V))
            d_key, d_value = lax.fori_loop(0, group, of_head, zeros) if group > 1 else of_head(jnp.int32(0), zeros)
            warpgroup.send((d_key * settings.scale, key, ref["d_key"].at[at]), (d_value, value, ref["d_value"].at[at]))

        roles(warpgroup, lambda: ring.fill(warpgroup, ref, steps, sources), compute)

    start, end = operands.intervals
    d_key, d_value = hopper.run(
        kernel,
        {
            "query": padded(operands.query, queries),
            "key": padded(operands.key, _BLOCK),
            "value": padded(operands.value, _BLOCK),
            "start": tiled(start, queries, queries),
            "end": tiled(end, queries, queries),
            "log_sum_exp": tiled(log_sum_exp, queries, queries),
            "delta": tiled(delta, queries, queries),
            "d_out": padded(d_out, queries),
            "ranges": query_ranges(of_queries, columns).stacked(B),
        },
        {
            "d_key": jax.ShapeDtypeStruct((B, columns * _BLOCK, K, H), dtype),
            "d_value": jax.ShapeDtypeStruct((B, columns * _BLOCK, K, V), dtype),
        },
        grid={"head": K, "block": columns, "batch": B},
        warpgroups=COMPUTING + 1,
        shared=own | ring.shared() | {"own_ready": Barriers(COMPUTING, arrivals=len(own))},
        cost=operands.key_cost(settings.seen),
        name="flash_attention_key_gradient",
        interpret=settings.interpret,
    )
    return d_key[:, :S], d_value[:, :S]


def _plain(settings: Settings) -> Settings:
    """For Triton's kernels, which know one way to be interpreted."""
    return dataclasses.replace(settings, interpret=bool(settings.interpret))
