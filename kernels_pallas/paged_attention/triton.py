"""Paged attention on NVIDIA GPUs, compiled by Triton: split keys, then a join (Flash-Decoding, PyTorch's blog of
October 2023).

Splits have one size and go round a fixed number of lanes, however long sequences are and however many there are: each
row is computed and added up in one order. One launch gives the sums of each lane, the other joins them. A prompt's tile
has one lane.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import interpretation, launch, target, tuning
from kernels_pallas.core.attention.key_range import KeyRange
from kernels_pallas.core.attention.scores import LOG2_E, LOWEST, FlashSettings, dot, tanh_by_exp2
from kernels_pallas.core.fp8 import from_bytes, is_converted
from kernels_pallas.paged_attention.costs import FEW_QUERIES, LANES, SPLIT, join_cost, lanes, lanes_cost, split_of
from kernels_pallas.paged_attention.key_heads import by_key_head
from kernels_pallas.paged_attention.scales import multiplied

MOST_WIDTH, MOST_LATENT = 256, 512
TILE = 16  # of a matrix unit: pages are multiples


class PagedTritonBlocks(NamedTuple):
    """Tiles of up to `rows` queries of the heads that share a key, and of `keys` tokens, a power of two, computed by
    `warps` of 32 threads, with loads `stages` ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


class PagedJoinBlocks(NamedTuple):
    """The `warps` of 32 threads that join the sums of one row."""

    warps: int


# Defaults until sizes are measured.
_NARROW, _FLOAT32 = PagedTritonBlocks(64, 64, 4, 3), PagedTritonBlocks(32, 32, 4, 2)
_LATENT, _LATENT_FLOAT32 = PagedTritonBlocks(32, 32, 8, 2), PagedTritonBlocks(16, 16, 8, 2)
_INTERPRETED = PagedTritonBlocks(16, 16, 4, 1)


def unsupported_reason(query: Any, key: Any, value: Any) -> str | None:
    """Return why these kernels cannot serve a call, or None."""
    (*_, size), H = key.shape, query.shape[-1]
    if isinstance(value, int):
        if not 0 < value <= MOST_LATENT or H - value > MOST_WIDTH:
            return f"values are {value} of {H} channels of keys: more than {MOST_LATENT}, or than {MOST_WIDTH} beside"
    elif not 0 < min(H, value.shape[3]) <= max(H, value.shape[3]) <= MOST_WIDTH:
        return f"head widths {H} and {value.shape[3]} are not both from 1 to {MOST_WIDTH}"
    if size % TILE:
        return f"pages of {size} tokens are no multiple of {TILE}"
    return None


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | int,
    table: jax.Array,
    *,
    key_range: KeyRange,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention`."""
    settings = FlashSettings(scale, soft_cap, 0, None, "triton")
    return _joined(
        _sums_of_lanes(settings, query, key, value, table, key_range, key_scales, value_scales), query, sinks
    )


def _sums_of_lanes(
    settings: FlashSettings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | int,
    table: jax.Array,
    key_range: KeyRange,
    key_scales: jax.Array | None,
    value_scales: jax.Array | None,
) -> list[jax.Array]:
    """Return, of the keys of each lane, the largest score and the sum of weights, [Q, K, L, R], and the weighted sum of
    values [Q, K, L, R, V], in float32."""
    (Q, T, N, H), (P, K, _, S), (_, M) = query.shape, key.shape, table.shape
    is_part = isinstance(value, int)
    V = value if is_part else value.shape[3]
    G, R = N // K, T * N // K
    query_QKRH = by_key_head(query, K)
    ranges_QR = [jnp.repeat(x, G, axis=1) for x in key_range]
    wide = multiplied(query, key)
    in_float32, of_bits = (_LATENT_FLOAT32, _LATENT) if is_part else (_FLOAT32, _NARROW)
    default = _INTERPRETED if interpretation.current() else in_float32 if wide.itemsize == 4 else of_bits
    sizes = tuning.blocks("paged_attention", "triton", (R, H, V), wide, default)
    rows = min(max(TILE, pl.next_power_of_2(R)), sizes.rows)
    keys, split = min(S & -S, sizes.keys, SPLIT), split_of(value)
    blocks, L = pl.cdiv(R, rows), lanes(T, M * S, value)
    values = [] if is_part else [value]
    scales_PKS = [each[:, :, 0] for each in (key_scales, value_scales) if each is not None]
    in_split = (split if T <= FEW_QUERIES else M * S) // keys
    round_trip, in_page = in_split * LANES, S // keys
    padded_V = pl.next_power_of_2(max(V, TILE))
    # The channels of keys that are values come first, in a part of their own.
    channels = [(first, size) for first, size in ([(0, V), (V, H - V)] if is_part else [(0, H)]) if size]
    parts = [_ChannelPart(first, size, pl.next_power_of_2(max(size, TILE))) for first, size in channels]
    padded_H = max(part.first + part.padded for part in parts)
    is_run = 1 < T <= FEW_QUERIES  # a token and its drafts, whose keys and values those before them do not see
    holds_nan = jnp.issubdtype(key.dtype, jnp.floating)  # of integers the scales alone may be NaN

    chip = target.current()
    by_bytes = key.dtype == jnp.float8_e4m3fn and chip.platform == "gpu" and not is_converted(chip.compute_capability)
    if by_bytes:
        key, *values = (jax.lax.bitcast_convert_type(x, jnp.int8) for x in (key, *values))

    def widened(numbers: jax.Array) -> jax.Array:
        """Return numbers of pages in the dtype `wide`."""
        return (from_bytes(numbers) if by_bytes else numbers).astype(wide)

    def kernel(query, key, table, start, end, *refs) -> None:
        *others, largest, total, attended = refs
        value, of_scales = others[: len(values)], others[len(values) :]
        lane, row = pl.program_id(0), pl.program_id(1) % blocks * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)
        is_row = row < R
        start, end = launch.load(start.at[:], is_row), launch.load(end.at[:], is_row)
        is_seeing = is_row & (end > start)
        last = jnp.minimum(jnp.max(jnp.where(is_seeing, end, 0)), M * S)
        first = jnp.maximum(jnp.min(jnp.where(is_seeing, start, last)), 0)

        def tiles_before(tile: jax.Array) -> jax.Array:
            """Return the number of the lane's tiles of keys in front of a tile."""
            return tile // round_trip * in_split + jnp.clip(tile % round_trip - lane * in_split, 0, in_split)

        queries = [_columns(query, is_row, part).astype(wide) for part in parts]

        def step(i: jax.Array, carry: tuple) -> tuple:
            highest, weight_sum, value_sum = carry
            tile = i // in_split * round_trip + lane * in_split + i % in_split
            # By `div` and `rem` Triton sees that a tile begins at a multiple of its tokens, and loads several at once.
            page = table[jax.lax.div(tile, in_page)]
            at = pl.ds(jax.lax.rem(tile, in_page) * keys, keys)
            index = tile * keys + jax.lax.broadcasted_iota(jnp.int32, (keys,), 0)
            keys_of = [widened(_channels(key, part, keys, page, at)) for part in parts]
            products = [dot(part, key_HS, (1, 0)) for part, key_HS in zip(queries, keys_of, strict=True)]
            scores = functools.reduce(operator.add, products)
            if of_scales:
                scores = scores * launch.load(of_scales[0].at[page, at])[None]
            values, factor, _ = settings.factored(scores, None, tanh_by_exp2)
            seen = is_seeing[:, None] & (start[:, None] <= index[None]) & (index[None] < end[:, None])
            values = jnp.where(seen, values, -jnp.inf)
            higher = jnp.maximum(highest, jnp.max(values, axis=1) * factor)
            kept, weights = jnp.exp2(highest - higher), jnp.exp2(values * factor - higher[:, None])
            # The rest of a page may hold anything, also NaN of a sequence that had it before: 0 · NaN is no 0.
            is_own = (first <= index) & (index < last)
            weight_sum = weight_sum * kept + jnp.sum(weights, axis=1)
            if of_scales:
                weights = weights * launch.load(of_scales[-1].at[page, at], is_own)[None]
                weights = jnp.where(seen, weights, 0.0) if is_run else weights
            if is_part:
                numbers, axis = jnp.where(is_own[None], keys_of[0], jnp.zeros((), wide)), 1
            else:
                numbers, axis = _columns(value[0], is_own, _ChannelPart(0, V, padded_V), page, at), 0
                numbers = widened(numbers) if of_scales else numbers
            if is_run and holds_nan:
                # A draft may be NaN too. Rows that see it get NaN by their sum of weights; for others it is 0.
                zeros = numbers.astype(jnp.float32) * 0.0
                weight_sum += jnp.sum(jnp.where(seen, jnp.sum(zeros, axis=1 - axis)[None], 0.0), axis=1)
                numbers = jnp.where(zeros == 0.0, numbers, jnp.zeros((), numbers.dtype))
            product = dot(weights.astype(numbers.dtype), numbers, (1, axis))
            return higher, weight_sum, value_sum * kept[:, None] + product

        begins = jnp.full((rows,), LOWEST), jnp.zeros((rows,)), jnp.zeros((rows, padded_V))
        bounds = tiles_before(first // keys), tiles_before(pl.cdiv(last, keys))
        highest, weight_sum, value_sum = jax.lax.fori_loop(*bounds, step, begins)
        launch.store(largest.at[:], highest, is_row)
        launch.store(total.at[:], weight_sum, is_row)
        within = jax.lax.broadcasted_iota(jnp.int32, value_sum.shape, 1) < V
        launch.store(attended.at[:, :], value_sum, (weight_sum > 0)[:, None] & within)  # others nobody reads

    def spec(block: tuple, index: Callable[..., tuple]) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda lane, b, q: index(lane, b // blocks, b % blocks, q))

    range_spec = spec((None, rows), lambda lane, k, b, q: (q, b))
    sum_spec = spec((None, None, None, rows), lambda lane, k, b, q: (q, k, lane, b))
    return launch.call(
        kernel,
        [query_QKRH, key, table, *ranges_QR, *values, *scales_PKS],
        [jax.ShapeDtypeStruct((Q, K, L, R, *more), jnp.float32) for more in ((), (), (V,))],
        params=launch.triton(sizes.warps, sizes.stages),
        grid=(L, K * blocks, Q),
        in_specs=[
            spec((None, None, rows, padded_H), lambda lane, k, b, q: (q, k, b, 0)),
            spec((P, None, padded_H, S), lambda lane, k, b, q: (0, k, 0, 0)),
            spec((None, M), lambda lane, k, b, q: (q, 0)),
            range_spec,
            range_spec,
            *[spec((P, None, S, padded_V), lambda lane, k, b, q: (0, k, 0, 0)) for _ in values],
            *[spec((P, None, S), lambda lane, k, b, q: (0, k, 0)) for _ in scales_PKS],
        ],
        out_specs=[
            sum_spec,
            sum_spec,
            spec((None, None, None, rows, padded_V), lambda lane, k, b, q: (q, k, lane, b, 0)),
        ],
        cost=lanes_cost(query, key, value, M * S, L, settings.soft_cap),
        name="paged_attention",
    )


def _joined(sums: list[jax.Array], query: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the attended values [Q, T, N, V] of the sums of all lanes: always of LANES, empty ones where there are
    fewer."""
    (Q, K, L, R, V), T = sums[-1].shape, query.shape[1]
    G = R // T
    sinks_KG = [] if sinks is None else [sinks.reshape(K, G)]
    width = pl.next_power_of_2(max(V, TILE))
    sizes = tuning.blocks("paged_attention_join", "triton", (V,), query.dtype, PagedJoinBlocks(4))

    def kernel(largest, total, attended, *sink_and_out) -> None:
        *sink, out = sink_and_out
        lane = jax.lax.broadcasted_iota(jnp.int32, (LANES,), 0)
        total = launch.load(total.at[:], lane < L)
        largest = launch.load(largest.at[:], lane < L, LOWEST)
        highest = jnp.max(largest)
        if sink:
            score = sink[0][0].astype(jnp.float32) * LOG2_E
            highest = jnp.maximum(highest, score)
        weight = jnp.exp2(largest - highest)
        attended = _columns(attended, total > 0, _ChannelPart(0, V, width))
        whole = jnp.sum(total * weight)
        if sink:
            whole += jnp.exp2(score - highest)
        attended = jnp.sum(attended * weight[:, None], axis=0) / jnp.where(whole == 0, 1.0, whole)
        launch.store(out.at[:], attended, jax.lax.broadcasted_iota(jnp.int32, (width,), 0) < V)

    of_row = pl.BlockSpec((None, None, LANES, None), lambda r, k, q: (q, k, 0, r))
    (out_QTKGV,) = launch.call(
        kernel,
        [*sums, *sinks_KG],
        [jax.ShapeDtypeStruct((Q, T, K, G, V), query.dtype)],
        params=launch.triton(sizes.warps, 1),
        grid=(R, K, Q),
        in_specs=[
            of_row,
            of_row,
            pl.BlockSpec((None, None, LANES, None, width), lambda r, k, q: (q, k, 0, r, 0)),
            *[pl.BlockSpec((None, 1), lambda r, k, q: (k, r % G)) for _ in sinks_KG],
        ],
        out_specs=[pl.BlockSpec((None, None, None, None, width), lambda r, k, q: (q, r // G, k, r % G, 0))],
        cost=join_cost(query, V, L),
        name="paged_attention_join",
    )
    return out_QTKGV.reshape(Q, T, K * G, V)


class _ChannelPart(NamedTuple):
    """Channels of a head that are loaded together: `size` of them from `first` on, padded to a power of two."""

    first: int
    size: int
    padded: int


def _columns(ref: Any, is_row: jax.Array, part: _ChannelPart, *at: Any) -> jax.Array:
    """Load rows [·, padded] of a part, at these indices of a reference or all, with zeros in rows that are not asked
    for and in padding."""
    shape = *is_row.shape, part.padded
    mask = jnp.broadcast_to(is_row[:, None], shape)
    if part.size < part.padded:
        mask &= jax.lax.broadcasted_iota(jnp.int32, shape, 1) < part.size
    return launch.load(ref.at[(*(at or (slice(None),)), pl.ds(part.first, part.padded))], mask)


def _channels(ref: Any, part: _ChannelPart, tokens: int, page: Any, at: Any) -> jax.Array:
    """Load the channels of a part [padded, tokens] of tokens of a page, with zeros in padding."""
    channel = jax.lax.broadcasted_iota(jnp.int32, (part.padded, tokens), 0)
    mask = channel < part.size if part.size < part.padded else None
    return launch.load(ref.at[page, pl.ds(part.first, part.padded), at], mask)
