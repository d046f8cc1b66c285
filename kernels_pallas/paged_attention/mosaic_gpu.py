"""Paged attention on Hopper, compiled by Mosaic GPU: split keys, then a join, as in `triton.py`.

A block of the grid is one warpgroup, which holds up to 64 queries of the heads that share a key. By TMA it loads tiles
of keys and values, each within a page, into a ring in shared memory, as many ahead as there are stages. Two blocks
share an SM where their rings fit: one loads while the other multiplies. The join adds up lanes one after another.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.core.attention.key_range import KeyRange
from kernels_pallas.core.attention.scores import LOG2_E, LOWEST, FlashSettings, tanh_by_exp2
from kernels_pallas.core.hopper.launch import run_kernel
from kernels_pallas.core.hopper.memory import MAX_COLUMNS, ROWS, SHARED_MEMORY, TILE, Barriers, SharedBuffer, extent
from kernels_pallas.core.hopper.warpgroup import Warpgroup
from kernels_pallas.paged_attention.costs import FEW_QUERIES, LANES, SPLIT, join_cost, lanes, lanes_cost
from kernels_pallas.paged_attention.key_heads import by_key_head, by_token, sinks_by_row

KEYS = 64  # of a tile
_MOST_STAGES = 4


def unsupported_reason(query: Any, key: Any, value: Any) -> str | None:
    """Return why this kernel cannot serve a call, or None."""
    if isinstance(value, int):
        return "values are a part of the keys"
    (*_, size, V), H = value.shape, query.shape[-1]
    if query.dtype not in ("bfloat16", "float16") or query.dtype != value.dtype:
        return f"it multiplies bfloat16 and float16, not {query.dtype} and {value.dtype}"
    if any(width % TILE or not 0 < width <= MAX_COLUMNS for width in (H, V)):
        return f"head widths {H} and {V} are not both multiples of {TILE} up to {MAX_COLUMNS}"
    if size % KEYS:
        return f"pages of {size} tokens are no multiple of {KEYS}"
    return None


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    *,
    key_range: KeyRange,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention`. It reads no pages with scales."""
    settings = FlashSettings(scale, soft_cap, 0, None, "mosaic_gpu")
    sums = _sums_of_lanes(settings, query, key, value, table, key_range)
    return by_token(_joined(sums, query, sinks), *query.shape[1:3])


def _sums_of_lanes(
    settings: FlashSettings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    key_range: KeyRange,
) -> list[jax.Array]:
    """Return, of the keys of each lane, the largest score and the sum of weights, [Q, L, K, blocks, 64], and the
    weighted sum of values [Q, L, K, R, V], in float32; R is a multiple of 8, and of 64 where blocks are several."""
    (Q, T, N, H), (_, K, S, V), (_, M) = query.shape, value.shape, table.shape
    G, R = N // K, T * N // K
    L, blocks = lanes(T, M * S, value), pl.cdiv(R, ROWS)
    rows = min(extent(R, 8), ROWS)  # of a block, those that are loaded and written; others hold anything
    query_QKRH = jnp.pad(by_key_head(query, K), [(0, 0), (0, 0), (0, blocks * rows - R), (0, 0)])
    start, end = (
        jnp.pad(jnp.repeat(x, G, axis=1), [(0, 0), (0, blocks * ROWS - R)]).reshape(Q, blocks, ROWS) for x in key_range
    )
    is_seeing = end > start
    last = jnp.minimum(jnp.max(jnp.where(is_seeing, end, 0), axis=-1), M * S)
    first = jnp.maximum(jnp.min(jnp.where(is_seeing, start, last[..., None]), axis=-1), 0)
    in_split = (SPLIT if T <= FEW_QUERIES else M * S) // KEYS
    round_trip, of_page = in_split * LANES, S // KEYS
    own = {
        "query_tile": SharedBuffer((ROWS, H), query.dtype, tiled=True),
        "attended_tile": SharedBuffer((ROWS, TILE), jnp.float32, tiled=True),
        "row_sums": SharedBuffer((2, ROWS), jnp.float32),
    }
    stages = _stages(own, (H + V) * KEYS * key.dtype.itemsize)
    ring = {
        "key_ring": SharedBuffer((stages, H, KEYS), key.dtype, tiled=True),
        "value_ring": SharedBuffer((stages, KEYS, V), key.dtype, tiled=True),
        "ready": Barriers(stages, arrivals=2),
        "query_ready": Barriers(1),
    }

    def kernel(warpgroup: Warpgroup, ref: Mapping[str, Any]) -> None:
        lane, q = warpgroup.index("lane"), warpgroup.index("sequence")
        k, block = lax.div(warpgroup.index("head"), blocks), lax.rem(warpgroup.index("head"), blocks)
        first, last = ref["bounds"][q, block, 0], ref["bounds"][q, block, 1]

        def tiles_before(tile: jax.Array) -> jax.Array:
            """Return the number of the lane's tiles of keys in front of a tile."""
            within = lax.rem(tile, round_trip) - lane * in_split
            return lax.div(tile, round_trip) * in_split + jnp.clip(within, 0, in_split)

        def tile_of(i: jax.Array) -> jax.Array:
            return lax.div(i, in_split) * round_trip + lane * in_split + lax.rem(i, in_split)

        begin, stop = tiles_before(lax.div(first, KEYS)), tiles_before(lax.div(last + KEYS - 1, KEYS))

        def load(i: jax.Array) -> None:
            """Load the keys and values of the lane's tile i, where it has one."""

            @pl.when(i < stop)
            def _() -> None:
                tile, slot = tile_of(i), lax.rem(i, stages)
                page = ref["table"][q, lax.div(tile, of_page)]
                at = pl.ds(lax.rem(tile, of_page) * KEYS, KEYS)  # a multiple, as Mosaic GPU can see
                ready = ref["ready"].at[slot]
                warpgroup.tma_load(ref["key"].at[page, k, :, at], ref["key_ring"].at[slot], ready)
                warpgroup.tma_load(ref["value"].at[page, k, at], ref["value_ring"].at[slot], ready)

        of_block, first_rows = pl.ds(block * rows, rows), pl.ds(0, rows)
        query_tile = ref["query_tile"].at[first_rows]
        warpgroup.tma_load(ref["query"].at[q, k, of_block], query_tile, ref["query_ready"].at[0])
        for ahead in range(stages):
            load(begin + ahead)
        start, end = (warpgroup.load_by_row(ref[name].at[q, block]) for name in ("start", "end"))
        warpgroup.wait(ref["query_ready"].at[0])

        def step(i: jax.Array, carry: tuple) -> tuple:
            largest, total, attended = carry
            slot, token = lax.rem(i, stages), tile_of(i) * KEYS
            key_HS, value_SV = ref["key_ring"].at[slot], ref["value_ring"].at[slot]
            warpgroup.wait(ref["ready"].at[slot])

            @pl.when((token < first) | (last < token + KEYS))
            def _() -> None:
                # The rest of a page may hold anything, also NaN of a sequence that had it before: 0 · NaN is no 0.
                index = token + warpgroup.iota((KEYS, V), 0)
                values = warpgroup.load_tile(value_SV)
                value_SV[...] = jnp.where((first <= index) & (index < last), values, jnp.zeros_like(values))
                warpgroup.commit()

            products = warpgroup.wgmma_by_columns(ref["query_tile"], key_HS)
            values, factor, _ = settings.factored(products, None, tanh=tanh_by_exp2)
            index = token + warpgroup.iota((ROWS, KEYS), 1)
            seen = warpgroup.broadcast_by_row(start, KEYS) <= index
            seen &= index < warpgroup.broadcast_by_row(end, KEYS)
            values = jnp.where(seen, values, -jnp.inf)
            raised = jnp.maximum(largest, jnp.max(values, axis=1) * factor)
            kept = jnp.exp2(largest - raised)
            weights = jnp.exp2(values * factor - warpgroup.broadcast_by_row(raised, KEYS))
            total = total * kept + jnp.sum(weights, axis=1)
            attended = attended * warpgroup.broadcast_by_row(kept, V)
            (attended,) = warpgroup.wgmma_accumulate((attended, weights.astype(key.dtype), value_SV))
            warpgroup.commit()  # all warps have read the slot
            load(i + stages)
            return raised, total, attended

        sums = (
            warpgroup.by_row(jnp.full((ROWS,), LOWEST, jnp.float32)),
            warpgroup.by_row(jnp.zeros((ROWS,), jnp.float32)),
            warpgroup.tile(jnp.zeros((ROWS, V), jnp.float32)),
        )
        largest, total, attended = lax.fori_loop(begin, stop, step, sums)
        warpgroup.tma_store(
            (largest, ref["row_sums"].at[0], ref["largest"].at[q, lane, k, block]),
            (total, ref["row_sums"].at[1], ref["total"].at[q, lane, k, block]),
        )
        for c in range(0, V, TILE):
            columns = ref["attended"].at[q, lane, k, of_block, pl.ds(c, TILE)]
            warpgroup.tma_store((attended[:, c : c + TILE], ref["attended_tile"], columns))

    return run_kernel(
        kernel,
        {
            "query": query_QKRH,
            "key": key,
            "value": value,
            "table": table,
            "start": start,
            "end": end,
            "bounds": jnp.stack([first, last], axis=-1),
        },
        {
            "largest": jax.ShapeDtypeStruct((Q, L, K, blocks, ROWS), jnp.float32),
            "total": jax.ShapeDtypeStruct((Q, L, K, blocks, ROWS), jnp.float32),
            "attended": jax.ShapeDtypeStruct((Q, L, K, blocks * rows, V), jnp.float32),
        },
        grid={"lane": L, "head": K * blocks, "sequence": Q},
        warpgroups=1,
        shared=own | ring,
        cost=lanes_cost(query, key, value, M * S, L, settings.soft_cap),
        name="paged_attention",
    )


def _joined(sums: list[jax.Array], query: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the attended values [Q, K, R, V] of the sums of all lanes: those that saw nothing change no bit."""
    (Q, L, K, R, V), blocks = sums[-1].shape, sums[0].shape[3]
    rows, stages = R // blocks, min(L, _MOST_STAGES)
    inputs = dict(zip(("largest", "total", "attended"), sums, strict=True))
    if sinks is not None:
        inputs["sinks"] = sinks_by_row(sinks, query, K, blocks * ROWS).reshape(K, blocks, ROWS) * LOG2_E

    def kernel(warpgroup: Warpgroup, ref: Mapping[str, Any]) -> None:
        q, columns = warpgroup.index("sequence"), pl.ds(warpgroup.index("column") * TILE, TILE)
        k, block = lax.div(warpgroup.index("head"), blocks), lax.rem(warpgroup.index("head"), blocks)
        of_block, first_rows = pl.ds(block * rows, rows), pl.ds(0, rows)

        def load(lane: jax.Array) -> None:
            slot = lax.rem(lane, stages)
            source = ref["attended"].at[q, lane, k, of_block, columns]
            warpgroup.tma_load(source, ref["ring"].at[slot, first_rows], ref["ready"].at[slot])

        for ahead in range(stages):
            load(jnp.int32(ahead))

        def step(lane: jax.Array, carry: tuple) -> tuple:
            largest, total, attended = carry
            of_lane, weight_sum = (
                warpgroup.load_by_row(ref[name].at[q, lane, k, block]) for name in ("largest", "total")
            )
            slot, raised = lax.rem(lane, stages), jnp.maximum(largest, of_lane)
            kept, weight = jnp.exp2(largest - raised), jnp.exp2(of_lane - raised)
            warpgroup.wait(ref["ready"].at[slot])
            more = warpgroup.load_tile(ref["ring"].at[slot]) * warpgroup.broadcast_by_row(weight, TILE)
            attended = attended * warpgroup.broadcast_by_row(kept, TILE) + more
            warpgroup.commit()  # all warps have read the slot
            pl.when(lane + stages < L)(lambda: load(lane + stages))
            return raised, total * kept + weight_sum * weight, attended

        if sinks is None:
            largest = warpgroup.by_row(jnp.full((ROWS,), LOWEST, jnp.float32))
            total = warpgroup.by_row(jnp.zeros((ROWS,), jnp.float32))
        else:  # as after one key with this score and no value
            largest = warpgroup.load_by_row(ref["sinks"].at[k, block])
            total = warpgroup.by_row(jnp.ones((ROWS,), jnp.float32))
        nothing = warpgroup.tile(jnp.zeros((ROWS, TILE), jnp.float32))
        _, total, attended = lax.fori_loop(0, L, step, (largest, total, nothing))
        attended /= warpgroup.broadcast_by_row(jnp.where(total == 0, 1.0, total), TILE)
        warpgroup.tma_store((attended, ref["out_tile"], ref["out"].at[q, k, of_block, columns]))

    (out_QKRV,) = run_kernel(
        kernel,
        inputs,
        {"out": jax.ShapeDtypeStruct((Q, K, R, V), query.dtype)},
        grid={"column": V // TILE, "head": K * blocks, "sequence": Q},
        warpgroups=1,
        shared={
            "ring": SharedBuffer((stages, ROWS, TILE), jnp.float32, tiled=True),
            "out_tile": SharedBuffer((ROWS, TILE), query.dtype, tiled=True),
            "ready": Barriers(stages),
        },
        cost=join_cost(query, V, L),
        name="paged_attention_join",
    )
    return out_QKRV


def _stages(own: Mapping[str, SharedBuffer], of_stage: int) -> int:
    """Return the stages of the ring: as many as fit beside another block on the SM, if those are two or more."""
    taken = sum(buffer.bytes for buffer in own.values())
    beside = (SHARED_MEMORY // 2 - taken) // of_stage
    return min(beside if beside >= 2 else (SHARED_MEMORY - taken) // of_stage, _MOST_STAGES)
