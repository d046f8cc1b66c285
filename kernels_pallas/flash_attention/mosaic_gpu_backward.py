"""The backward pass of attention on Hopper: FlashAttention-3's one kernel (arXiv:2407.08608, appendix B.1), of five
products, with blocks that one warpgroup fetches and two compute with.

A block of the grid has 128 keys, whose gradients it adds up in registers, and goes through the queries that see them.
What it knows of the gradient of queries it adds to global memory once the blocks before it have: the kernel is
deterministic. So that one block follows right behind another all go through the queries from the last to the first, and
through all heads of some before they go to the next.

Served are keys of width 128 with values up to that, and 64 with 64, but there no bias in float32 for each query, for
which shared memory is too small; others are left to the Triton kernels. A block multiplies all queries between the
first and the last that see one of its keys: a key that is not finite may reach the gradients of others among them.
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
from kernels_pallas.flash_attention.blocks import BlockRanges, key_ranges, query_ranges, turns
from kernels_pallas.flash_attention.operands import Operands
from kernels_pallas.flash_attention.ring import (
    COMPUTING,
    TILE,
    KeyBlocks,
    References,
    Ring,
    RingBlocks,
    bias_of,
    fit,
    of_bias,
    padded,
    roles,
    tiled,
)
from kernels_pallas.flash_attention.tiles import FlashSettings, score_gradient, tanh_by_exp2

_KEYS = COMPUTING * ROWS
# By the width of keys: the widest values of which registers hold the gradients, and queries to a step.
_WIDEST_VALUES, _QUERIES = {64: 64, 128: 128}, {64: 128, 128: 64}


def serves(operands: Operands) -> bool:
    """Whether registers and shared memory hold what heads of these widths take."""
    H, V = operands.sizes[5:]
    return V <= _WIDEST_VALUES.get(H, 0) and fit(_own(operands), _parts(operands)) > 0


def _own(operands: Operands) -> dict[str, SharedBuffer | Barriers]:
    """What a block has in shared memory besides its ring."""
    dtype, (H, V) = operands.query.dtype, operands.sizes[5:]
    return _ring_of_bias(operands).shared() | {
        "key_tile": SharedBuffer((_KEYS, H), dtype, tiled=True),
        "value_tile": SharedBuffer((_KEYS, V), dtype, tiled=True),
        "d_scores_tile": SharedBuffer((2, _KEYS, _QUERIES[H]), dtype, tiled=True),  # of a step, and of that before
        "d_query_tile": SharedBuffer((COMPUTING, ROWS, TILE), jnp.float32, tiled=True),
    }


def _parts(operands: Operands) -> dict[str, SharedBuffer]:
    """Of the ring: what is fetched for a step."""
    dtype, (H, V) = operands.query.dtype, operands.sizes[5:]
    queries = _QUERIES[H]
    return {
        "query": SharedBuffer((queries, H), dtype, tiled=True),
        "d_out": SharedBuffer((queries, V), dtype, tiled=True),
        "interval": SharedBuffer((2, queries), jnp.int32),
        "sums": SharedBuffer((2, queries), jnp.float32),
    }


def _ring_of_bias(operands: Operands) -> Ring:
    """Which is read early in a step: the next has most of it to come to the same place."""
    bias, queries = operands.bias, _QUERIES[operands.sizes[5]]
    parts = {}
    if bias is not None:
        biased = KeyBlocks(operands).biased
        parts["bias"] = SharedBuffer((queries, _KEYS) if biased else (_KEYS,), bias.dtype, tiled=biased)
    return Ring(RingBlocks(queries, 1), parts, together=False)


def backward(
    settings: FlashSettings, operands: Operands, log_sum_exp: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value; log_sum_exp in units of log₂ e, and delta: float32 [B, N, T]. Tiles of scores
    are transposed, [keys, queries]."""
    if not serves(operands):
        return triton.backward(settings, operands, log_sum_exp, delta, d_out)
    B, T, S, N, K, H, V = operands.sizes
    dtype, queries = operands.query.dtype, _QUERIES[H]
    rows, columns = pl.cdiv(T, queries), pl.cdiv(S, _KEYS)
    shares = operands.shares(columns * K * B)
    heads = N // (K * shares)  # of queries, to a block
    bias, biased = operands.bias, KeyBlocks(operands).biased
    own, biases = _own(operands), _ring_of_bias(operands)
    ring = Ring.of("gradients", operands, 0, lambda _: _parts(operands), own, together=True)
    ranges = query_ranges(key_ranges(operands.start, operands.end, queries, _KEYS), columns)

    def kernel(warpgroup: Warpgroup, ref: References) -> None:
        me, b, share, column = (warpgroup.index(*axis) for axis in ((), ("batch",), ("head",), ("block",)))
        k = lax.div(share, shares)
        visited = BlockRanges(*(ref["ranges"][b, column, c] for c in range(4)))
        steps = (visited.last - visited.first) * heads

        def at(step: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Head and block of queries of a step."""
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
            """Rows and columns of the half of the gradient of a step's queries that a warpgroup makes."""
            across = H > TILE
            return pl.ds(0 if across else w * ROWS, ROWS), pl.ds(w * TILE if across else 0, TILE)

        def send(step: jax.Array, meanwhile: Callable[[], None]) -> None:
            """What is known of the gradient of a step's queries."""
            n, i = at(step)
            d_query = ref["d_query"].at[b, pl.ds(i * queries, queries), n]
            warpgroup.wait(ref["d_query_ready"].at[0])
            warpgroup.add_in_turn(
                [(ref["d_query_tile"].at[w], d_query.at[half(w)]) for w in range(COMPUTING)],
                ref["counters"].at[b, n, i],
                ref["turns"][b if ref["turns"].shape[0] > 1 else 0, column, i],
                lambda: warpgroup.arrive(ref["d_query_free"].at[0]),
                meanwhile,
            )

        def compute() -> None:
            first, mine = (column * COMPUTING + me) * ROWS, pl.ds(me * ROWS, ROWS)
            key, value, ready = ref["key_tile"].at[mine], ref["value_tile"].at[mine], ref["own_ready"].at[0]
            warpgroup.fetch(ref["key"].at[b, pl.ds(first, ROWS), k], key, ready)
            warpgroup.fetch(ref["value"].at[b, pl.ds(first, ROWS), k], value, ready)
            warpgroup.wait(ready)
            my_queries, my_columns = half(me)

            def d_scores_of(step: jax.Array) -> Any:
                return ref["d_scores_tile"].at[lax.rem(step + 1, 2)]

            def query_terms(step: jax.Array) -> tuple[Any, Any]:
                """What is multiplied for this warpgroup's half of the gradient of a step's queries."""
                return d_scores_of(step).at[:, my_queries], ref["key_tile"].at[:, my_columns]

            def put(step: jax.Array, d_query: jax.Array) -> None:
                pl.when(step > 0)(lambda: warpgroup.wait(ref["d_query_free"].at[0]))
                ref["d_query_tile"][me] = d_query

            def bias_of_scores(step: jax.Array) -> jax.Array | None:
                if bias is None:
                    return None
                (place,) = biases.take(warpgroup, ref, step, "bias")
                if biased:
                    of_scores = warpgroup.load_turned(place.at[:, mine])
                else:
                    of_scores = warpgroup.across(warpgroup.load_by_row(place.at[mine]), queries)
                biases.leave(warpgroup, ref, step, steps, "bias", loaded=True)
                return of_scores

            def step(now: jax.Array, carry: tuple) -> tuple:
                d_key, d_value = carry
                _, i = at(now)
                place = dict(zip(ring.parts, ring.take(warpgroup, ref, now, *ring.parts), strict=True))

                def down(name: str, row: int) -> jax.Array:
                    return warpgroup.down(warpgroup.load_by_column(place[name].at[row]), ROWS)

                def hide(values: jax.Array) -> jax.Array:
                    index = first + warpgroup.count((ROWS, queries), 0)
                    seen = (down("interval", 0) <= index) & (index < down("interval", 1))
                    return jnp.where(seen, values, -jnp.inf)

                products, d_weights = warpgroup.products_of_rows((key, place["query"]), (value, place["d_out"]))
                values, factor, slope = settings.factored(products, bias_of_scores(now), tanh=tanh_by_exp2)
                whole = (visited.full <= i) & (i < visited.full_end)
                values = lax.cond(whole, lambda values: values, hide, values)
                weights = jnp.exp2(values * factor - down("sums", 0))
                d_scores = score_gradient(weights, d_weights, down("sums", 1), slope).astype(dtype)

                def hand_on(d_query: jax.Array) -> None:
                    """To the other warpgroup what it is to multiply in the next step, and to who sends what is made."""
                    d_scores_of(now)[mine] = d_scores
                    pl.when(now > 0)(lambda: put(now - 1, d_query))
                    warpgroup.commit()
                    warpgroup.arrive(ref["d_scores_ready"].at[0])
                    pl.when(now > 0)(lambda: warpgroup.arrive(ref["d_query_ready"].at[0]))

                # In the first step there is none before, and what is multiplied goes nowhere.
                pl.when(now > 0)(lambda: warpgroup.wait(ref["d_scores_ready"].at[0]))
                d_value, d_key = warpgroup.add_products_behind(
                    query_terms(now - 1),
                    hand_on,
                    (d_value, weights.astype(dtype), place["d_out"]),
                    (d_key, d_scores, place["query"]),
                )
                # What wgmma did not read was committed as it was handed on.
                ring.leave(warpgroup, ref, now, steps, *ring.parts)
                return d_key, d_value

            zeros = tuple(warpgroup.tile(jnp.zeros((ROWS, width), jnp.float32)) for width in (H, V))
            d_key, d_value = lax.fori_loop(0, steps, step, zeros)

            @pl.when(steps > 0)
            def _() -> None:
                warpgroup.wait(ref["d_scores_ready"].at[0])
                warpgroup.add_products_behind(query_terms(steps - 1), lambda d_query: put(steps - 1, d_query))
                warpgroup.commit()
                warpgroup.arrive(ref["d_query_ready"].at[0])
                # Then the other warpgroup has multiplied what the gradient of these keys takes the place of.
                warpgroup.wait(ref["d_query_free"].at[0])

            results = [(d_key * settings.scale, key, "d_key"), (d_value, value, "d_value")]
            results = [(x, place, ref[name].at[b, pl.ds(first, ROWS), share]) for x, place, name in results]
            if shares == 1:  # the gradients take the places of what they are of
                warpgroup.send(*results)
                return
            place = ref["d_query_tile"].at[me]
            for x, _, result in results:
                for part in range(0, x.shape[1], TILE):
                    warpgroup.send((x[:, part : part + TILE], place, result.at[:, pl.ds(part, TILE)]))

        roles(warpgroup, lambda: ring.fill(warpgroup, ref, steps, sources, (biases,), send), compute)

    def stacked(*rows: jax.Array) -> jax.Array:
        """[..., T] each as [..., blocks, 2, queries]."""
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
            "turns": turns(ranges, rows),
        }
        | ({} if bias is None else {"bias": bias_of(operands, queries, _KEYS)}),
        {
            "d_query": jax.ShapeDtypeStruct((B, rows * queries, N, H), jnp.float32),
            "d_key": operands.of_shares(key, shares),
            "d_value": operands.of_shares(value, shares),
        },
        grid={"head": K * shares, "block": columns, "batch": B},
        warpgroups=COMPUTING + 1,
        shared=own
        | ring.shared()
        | {
            "own_ready": Barriers(1, arrivals=2 * COMPUTING),
            "d_scores_ready": Barriers(1, arrivals=COMPUTING),
            "d_query_ready": Barriers(1, arrivals=COMPUTING),
            "d_query_free": Barriers(1),
        },
        counters={"counters": (B, N, rows)},
        cost=operands.backward_cost(settings.unmasked_scores),
        name="flash_attention_gradients",
    )
    start, end = operands.intervals
    some = (start < end)[:, :, None, None]  # of what sees nothing nobody may have written
    d_query = jnp.where(some, d_query[:, :T] * settings.scale, 0.0).astype(dtype)
    return d_query, *(operands.joined(x[:, :S], shares) for x in (d_key, d_value))
