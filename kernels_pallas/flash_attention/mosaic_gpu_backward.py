"""The backward pass of attention on Hopper: FlashAttention-2's two kernels (arXiv:2307.08691, algorithm 2), with blocks
that one warpgroup fetches and two compute with.

Heads whose widths are more than 256 together are left to the Triton kernels: sums of both gradients of 64 keys would
not fit a warpgroup's registers.
"""

import dataclasses
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
    QUERIES,
    TILE,
    Keys,
    Order,
    References,
    Ring,
    bias_of,
    of_bias,
    padded,
    roles,
    tiled,
)
from kernels_pallas.flash_attention.tiles import Settings, score_gradient, tanh_by_exp2
from kernels_pallas.hopper import ROWS, Barriers, Shared, Warpgroup

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
    dtype, rows = operands.query.dtype, pl.cdiv(T, QUERIES)
    own = {
        "query_tile": Shared((COMPUTING, ROWS, H), dtype, tiled=True),
        "d_out_tile": Shared((COMPUTING, ROWS, V), dtype, tiled=True),
    }
    # As many keys as registers hold scores and their gradients of, besides the sums of all H columns.
    of_keys = Keys(operands)
    keys = 128 if max(H, V) <= 64 and not of_keys.biased else 64
    # A block of keys is left when the next has been taken.
    ring = Ring.of("query_gradient", operands, keys, of_keys.parts, own, least=2)
    keys = ring.blocks.rows

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, b, n = warpgroup.index(), warpgroup.index("batch"), warpgroup.index("head")
        i = rows - 1 - warpgroup.index("block")
        order = Order(*(ref["ranges"][b, i, c] for c in range(4))).at_least_one()

        def sources(step: jax.Array) -> dict[str, Any]:
            return of_keys.sources(ref, b, n, i, order.block(step), keys)

        def compute() -> None:
            tile, query, d_out = i * COMPUTING + me, ref["query_tile"].at[me], ref["d_out_tile"].at[me]
            at, ready = pl.ds(tile * ROWS, ROWS), ref["own_ready"].at[me]
            warpgroup.fetch(ref["query"].at[b, at, n], query, ready)
            warpgroup.fetch(ref["d_out"].at[b, at, n], d_out, ready)
            start, end = (warpgroup.load_by_row(ref[name].at[b, tile]) for name in ("start", "end"))
            log_sum_exp, delta = (warpgroup.load_by_row(ref[name].at[b, n, tile]) for name in ("log_sum_exp", "delta"))
            warpgroup.wait(ready)

            def differentiate(j: jax.Array, masked: bool, products: jax.Array, d_weights: jax.Array) -> jax.Array:
                """The gradient of a step's scores."""
                ring.leave(warpgroup, ref, j, order.steps, "value")
                bias = of_keys.bias(warpgroup, ref, ring, j, order.steps)
                values, factor, slope = settings.factored(products, bias, tanh=tanh_by_exp2)
                if masked:
                    index = order.block(j) * keys + warpgroup.count((ROWS, keys), 1)
                    seen = (warpgroup.across(start, keys) <= index) & (index < warpgroup.across(end, keys))
                    values = jnp.where(seen, values, -jnp.inf)
                weights = jnp.exp2(values * factor - warpgroup.across(log_sum_exp, keys))
                return score_gradient(weights, d_weights, warpgroup.across(delta, keys), slope).astype(dtype)

            def pairs(j: jax.Array) -> list[tuple[Any, Any]]:
                key, value = ring.take(warpgroup, ref, j, "key", "value")
                return [(query, key), (d_out, value)]

            def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
                """The scores of a step and the sum of that before: the first are differentiated beside the second."""
                d_query, d_scores = carry
                (before,) = ring.places(ref, j - 1, "key")
                d_scores, d_query = warpgroup.products_beside_sum(
                    pairs(j), d_query, (d_scores, before), lambda *products: differentiate(j, masked, *products)
                )
                ring.leave(warpgroup, ref, j - 1, order.steps, "key")
                return d_query, d_scores

            # Always masked, as in the forward pass.
            d_scores = differentiate(jnp.int32(0), True, *warpgroup.products_of_rows(*pairs(jnp.int32(0))))
            d_query = warpgroup.tile(jnp.zeros((ROWS, H), jnp.float32))
            d_query, d_scores = order.over(step, (d_query, d_scores), begin=1)
            (before,) = ring.places(ref, order.steps - 1, "key")
            (d_query,) = warpgroup.add_products((d_query, d_scores, before))
            warpgroup.send((d_query * settings.scale, query, ref["d_query"].at[b, at, n]))

        roles(warpgroup, lambda: ring.fill(warpgroup, ref, order.steps, sources), compute)

    start, end = operands.intervals
    (d_query,) = hopper.run(
        kernel,
        {
            "query": padded(operands.query, QUERIES),
            "start": tiled(start, QUERIES),
            "end": tiled(end, QUERIES),
            "log_sum_exp": tiled(log_sum_exp, QUERIES),
            "delta": tiled(delta, QUERIES),
            "d_out": padded(d_out, QUERIES),
            "ranges": key_ranges(operands.start, operands.end, QUERIES, keys).stacked(B),
        }
        | of_keys.inputs(keys),
        {"d_query": jax.ShapeDtypeStruct((B, rows * QUERIES, N, H), dtype)},
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
    dtype, columns = operands.query.dtype, pl.cdiv(S, QUERIES)
    shares = operands.shares(columns * K * B)
    heads = N // (K * shares)  # of queries, to a block
    own = {
        "key_tile": Shared((COMPUTING, ROWS, H), dtype, tiled=True),
        "value_tile": Shared((COMPUTING, ROWS, V), dtype, tiled=True),
    }
    d_key, d_value = (operands.of_shares(padded(x, QUERIES), shares) for x in (operands.key, operands.value))
    if shares > 1:  # else the gradients take the places of what they are of
        own["gradient_tile"] = Shared((COMPUTING, ROWS, TILE), d_key.dtype, tiled=True)
    bias, biased = operands.bias, Keys(operands).biased

    def parts(queries: int) -> dict[str, Shared]:
        parts = {
            "query": Shared((queries, H), dtype, tiled=True),
            "d_out": Shared((queries, V), dtype, tiled=True),
            "interval": Shared((2, queries), jnp.int32),
            "sums": Shared((2, queries), jnp.float32),
        }
        return parts | ({"bias": Shared((queries, QUERIES), bias.dtype, tiled=True)} if biased else {})

    ring = Ring.of("key_gradient", operands, ROWS, parts, own, together=True)
    queries = ring.blocks.rows
    of_queries = key_ranges(operands.start, operands.end, queries, QUERIES)

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, b, share, column = (warpgroup.index(*axis) for axis in ((), ("batch",), ("head",), ("block",)))
        k = lax.div(share, shares)
        order = Order(*(ref["ranges"][b, column, c] for c in range(4)))
        steps = order.steps * heads

        def sources(step: jax.Array) -> dict[str, Any]:
            n, i = share * heads + lax.div(step, order.steps), order.block(lax.rem(step, order.steps))
            at = pl.ds(i * queries, queries)
            sources = {name: ref[name].at[b, at, n] for name in ("query", "d_out")}
            sources |= {"interval": ref["interval"].at[b, i], "sums": ref["sums"].at[b, n, i]}
            if biased:
                sources["bias"] = of_bias(ref, b, n).at[at, pl.ds(column * QUERIES, QUERIES)]
            return sources

        def compute() -> None:
            first = (column * COMPUTING + me) * ROWS
            at, ready = pl.ds(first, ROWS), ref["own_ready"].at[me]
            key, value = ref["key_tile"].at[me], ref["value_tile"].at[me]
            warpgroup.fetch(ref["key"].at[b, at, k], key, ready)
            warpgroup.fetch(ref["value"].at[b, at, k], value, ready)
            warpgroup.wait(ready)

            def of_head(g: jax.Array, carry: tuple) -> tuple:
                of_keys = None
                if bias is not None and not biased:
                    of_keys = warpgroup.load_by_row(of_bias(ref, b, share * heads + g).at[0, at])
                    of_keys = warpgroup.across(of_keys, queries)

                def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
                    d_key, d_value = carry
                    now = g * order.steps + j

                    def down(name: str, row: int) -> jax.Array:
                        return warpgroup.down(warpgroup.load_by_column(place[name].at[row]), ROWS)

                    place = dict(zip(ring.parts, ring.take(warpgroup, ref, now, *ring.parts), strict=True))
                    bias = of_keys
                    if biased:
                        bias = warpgroup.load_turned(place["bias"].at[:, pl.ds(me * ROWS, ROWS)])
                    products, d_weights = warpgroup.products_of_rows((key, place["query"]), (value, place["d_out"]))
                    values, factor, slope = settings.factored(products, bias, tanh=tanh_by_exp2)
                    if masked:
                        index = first + warpgroup.count((ROWS, queries), 0)
                        seen = (down("interval", 0) <= index) & (index < down("interval", 1))
                        values = jnp.where(seen, values, -jnp.inf)
                    weights = jnp.exp2(values * factor - down("sums", 0))
                    d_scores = score_gradient(weights, d_weights, down("sums", 1), slope)
                    d_value, d_key = warpgroup.add_products(
                        (d_value, weights.astype(dtype), place["d_out"]),
                        (d_key, d_scores.astype(dtype), place["query"]),
                    )
                    ring.leave(warpgroup, ref, now, steps, *ring.parts, loaded=True)
                    return d_key, d_value

                return order.over(step, carry)

            zeros = tuple(warpgroup.tile(jnp.zeros((ROWS, width), jnp.float32)) for width in (H, V))
            d_key, d_value = lax.fori_loop(0, heads, of_head, zeros) if heads > 1 else of_head(jnp.int32(0), zeros)
            results = [(d_key * settings.scale, key, "d_key"), (d_value, value, "d_value")]
            results = [(x, place, ref[name].at[b, at, share]) for x, place, name in results]
            if shares == 1:
                warpgroup.send(*results)
                return
            place = ref["gradient_tile"].at[me]
            for x, _, result in results:
                for part in range(0, x.shape[1], TILE):
                    warpgroup.send((x[:, part : part + TILE], place, result.at[:, pl.ds(part, TILE)]))

        roles(warpgroup, lambda: ring.fill(warpgroup, ref, steps, sources), compute)

    def stacked(*rows: jax.Array) -> jax.Array:
        """[..., T] each as [..., blocks, 2, queries]."""
        return jnp.stack([tiled(x, queries, queries) for x in rows], axis=-2)

    gradients = hopper.run(
        kernel,
        {
            "query": padded(operands.query, queries),
            "key": padded(operands.key, QUERIES),
            "value": padded(operands.value, QUERIES),
            "interval": stacked(*operands.intervals),
            "sums": stacked(log_sum_exp, delta),
            "d_out": padded(d_out, queries),
            "ranges": query_ranges(of_queries, columns).stacked(B),
        }
        | ({} if bias is None else {"bias": bias_of(operands, queries, QUERIES)}),
        {"d_key": d_key, "d_value": d_value},
        grid={"head": K * shares, "block": columns, "batch": B},
        warpgroups=COMPUTING + 1,
        shared=own | ring.shared() | {"own_ready": Barriers(COMPUTING, arrivals=2)},
        cost=operands.key_cost(settings.seen),
        name="flash_attention_key_gradient",
        interpret=settings.interpret,
    )
    return tuple(operands.joined(x[:, :S], shares) for x in gradients)


def _plain(settings: Settings) -> Settings:
    """For Triton's kernels, which know one way to be interpreted."""
    return dataclasses.replace(settings, interpret=bool(settings.interpret))
