"""Paged attention as XLA runs it fast: a loop over the pages that somebody sees, with an online softmax; on a GPU,
where each trip of a loop is several launches, all pages at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import target
from kernels_pallas.core.attention.key_range import KeyRange
from kernels_pallas.core.products import einsum_in_float32
from kernels_pallas.core.slopes import soft_capped
from kernels_pallas.paged_attention.scales import multiplied

# XLA computes products of fewer rows, or smaller ones, on a CPU by other kernels, which add up in another order; and
# where columns do not fill two vectors of AVX2, by kernels that change with the number of rows.
_ROWS, _MULTIPLICATIONS, _COLUMNS = 2, 2048, 16
# Columns that do not fill four vectors of AVX-512 have another kernel from so many rows on.
_FULL_COLUMNS, _MANY_ROWS = 64, 64
_VECTOR = 16  # numbers of a vector of AVX-512
_BLOCK = 128  # rows of prompts that read pages together: those that see about as many
_LOWEST = float(np.finfo(np.float32).min)


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
    """See `kernels_pallas.paged_attention`.

    Pages begin at multiples of S, whoever reads them, so that each row adds the same numbers in the same order. A page
    of which a row sees nothing leaves its sums as they are.
    """
    (Q, T, *_), S = query.shape, key.shape[3]

    def attend(query: jax.Array, table: jax.Array, *key_range: jax.Array) -> jax.Array:
        options = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks}
        options |= {"key_scales": key_scales, "value_scales": value_scales}
        return _attended(query, key, value, table, key_range=KeyRange(*key_range), **options)

    if (N := block_sequences(Q, T)) == Q or target.platform() == "gpu":
        return attend(query, table, *key_range)
    pages_Q = _SeenKeys.of(*_within(key_range, table, S)).pages(S)
    return _in_blocks(attend, N, pages_Q, query, table, *key_range)


def _in_blocks(attend: Callable, N: int, pages_Q: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Return what `attend` returns of arrays [Q, ...], of N sequences after another. Sequences are sorted by the pages
    that they see, so that those that see few, or are padding, do not wait for those that see many."""
    Q = len(pages_Q)
    B = -(-Q // N)

    def of_all_blocks(x_Q: jax.Array) -> jax.Array:
        return jnp.pad(x_Q, [(0, B * N - Q), *[(0, 0)] * (x_Q.ndim - 1)])

    order_Q = jnp.argsort(of_all_blocks(pages_Q))
    blocks = (of_all_blocks(x_Q)[order_Q].reshape(B, N, *x_Q.shape[1:]) for x_Q in arrays)
    out_BN = jax.lax.map(lambda block: attend(*block), tuple(blocks))
    return out_BN.reshape(B * N, *out_BN.shape[2:])[jnp.argsort(order_Q)[:Q]]


def _within(key_range: KeyRange, table: jax.Array, S: int) -> KeyRange:
    """Return the keys of a range that are in the pages of a table."""
    return KeyRange(jnp.maximum(key_range.start, 0), jnp.minimum(key_range.end, table.shape[1] * S))


def _attended(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | int,
    table: jax.Array,
    *,
    key_range: KeyRange,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    key_scales: jax.Array | None,
    value_scales: jax.Array | None,
) -> jax.Array:
    """Return `paged_attention` of sequences that read their pages together."""
    (Q, T, N, H), (_, K, _, S) = query.shape, key.shape
    V = value if isinstance(value, int) else value.shape[3]
    G = N // K
    if more := padded_queries(T, G, H, V, S) - T:
        query = jnp.pad(query, [(0, 0), (0, more), (0, 0), (0, 0)])
        key_range = KeyRange(*(jnp.pad(x, [(0, 0), (0, more)]) for x in key_range))
        options = {"key_range": key_range, "scale": scale, "soft_cap": soft_cap, "sinks": sinks}
        options |= {"key_scales": key_scales, "value_scales": value_scales}
        return _attended(query, key, value, table, **options)[:, :T]
    key_range = _within(key_range, table, S)
    pages = _Pages(key, value, key_scales, value_scales, multiplied_by_xla(query, key, target.platform()))
    # Heads first, so that devices with heads of their own, which share a key head, have rows that follow one another.
    query_QKRH = query.astype(pages.dtype).reshape(Q, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(Q, K, G * T, H)

    def scored(query_QKRH: jax.Array, page: _PageOfEach) -> jax.Array:
        """Return the scores [Q, K, R, S] of a page of each sequence."""
        scores = _product(query_QKRH, page.key_QKHS) * scale
        scores = scores if page.key_scale_QK1S is None else scores * page.key_scale_QK1S
        return scores if soft_cap is None else soft_capped(scores, soft_cap)

    sums = _of_all_pages if target.platform() == "gpu" else _page_after_page
    sinks_1KG1 = None if sinks is None else sinks.astype(jnp.float32).reshape(1, K, G, 1)
    total, attended = sums(query_QKRH, pages, table, _SeenKeys.of(*key_range), scored, sinks_1KG1)
    attended = attended[..., :V] / jnp.where(total == 0.0, 1.0, total)[..., None]
    return attended.transpose(0, 3, 1, 2, 4).reshape(Q, T, N, V).astype(query.dtype)


class _SeenKeys(NamedTuple):
    """The positions from `start_QT` to before `end_QT` that each query sees, and all of a sequence's see together."""

    start_QT: jax.Array
    end_QT: jax.Array
    first_Q: jax.Array
    last_Q: jax.Array

    @classmethod
    def of(cls, start_QT: jax.Array, end_QT: jax.Array) -> "_SeenKeys":
        is_seen_QT = end_QT > start_QT
        last_Q = jnp.max(jnp.where(is_seen_QT, end_QT, 0), axis=1)
        return cls(start_QT, end_QT, jnp.min(jnp.where(is_seen_QT, start_QT, last_Q[:, None]), axis=1), last_Q)

    def pages(self, S: int) -> jax.Array:
        """Return the number of pages of S tokens in which each sequence sees keys."""
        return (self.last_Q + S - 1) // S - self.first_Q // S

    def masked(self, scores_QKRS: jax.Array, index_QS: jax.Array) -> jax.Array:
        """Return the scores [Q, K, G, T, S] of the keys at these positions, the lowest of all where none is seen."""
        (Q, K, _, S), T = scores_QKRS.shape, self.start_QT.shape[1]
        seen_QTS = (self.start_QT[..., None] <= index_QS[:, None]) & (index_QS[:, None] < self.end_QT[..., None])
        return jnp.where(seen_QTS[:, None, None], scores_QKRS.reshape(Q, K, -1, T, S), _LOWEST)

    def values(self, page: "_PageOfEach", weights_QKRS: jax.Array, index_QS: jax.Array) -> jax.Array:
        """Return the sum of the values at these positions with these weights, with zeros in columns beyond V."""
        # The rest of a page may hold anything, also NaN of a sequence that had it before: 0 · NaN is no 0.
        mine = (self.first_Q[:, None] <= index_QS) & (index_QS < self.last_Q[:, None])
        value_QKSV, V = jnp.where(mine[:, None, :, None], page.value_QKSV, 0), page.value_QKSV.shape[-1]
        value_QKSV = jnp.pad(value_QKSV, [*[(0, 0)] * 3, (0, padded_columns(V) - V)])
        if page.value_scale_QK1S is not None:
            weights_QKRS = weights_QKRS * jnp.where(mine[:, None, None], page.value_scale_QK1S, 0.0)
        return _product(weights_QKRS.astype(value_QKSV.dtype), value_QKSV)


class _PageOfEach(NamedTuple):
    """A page of each sequence, and the scales of its numbers, if they have scales."""

    key_QKHS: jax.Array
    value_QKSV: jax.Array
    key_scale_QK1S: jax.Array | None
    value_scale_QK1S: jax.Array | None


class _Pages(NamedTuple):
    """All pages, as `paged_attention` takes them, and the dtype in which they are multiplied."""

    key: jax.Array
    value: jax.Array | int
    key_scales: jax.Array | None
    value_scales: jax.Array | None
    dtype: jnp.dtype

    @property
    def columns(self) -> int:
        """The columns of the product with values that are computed."""
        return padded_columns(self.value if isinstance(self.value, int) else self.value.shape[3])

    def of_each(self, take: Callable[[jax.Array], jax.Array]) -> _PageOfEach:
        """Return the page of each sequence that `take` takes of an array of pages."""
        key = take(self.key)
        value = _part(key, self.value) if isinstance(self.value, int) else take(self.value)
        if self.key_scales is None:
            return _PageOfEach(key, value, None, None)
        of_key = take(self.key_scales)
        of_value = of_key if self.value_scales is None else take(self.value_scales)
        return _PageOfEach(key.astype(self.dtype), value.astype(self.dtype), of_key, of_value)


def multiplied_by_xla(query: Any, key: Any, platform: str | None) -> jnp.dtype:
    """Return the dtype in which queries are multiplied with keys: of pages of eight bits on a CPU float32."""
    return jnp.dtype("float32") if key.dtype.itemsize == 1 and platform == "cpu" else multiplied(query, key)


def _page_after_page(
    query_QKRH: jax.Array,
    pages: _Pages,
    table: jax.Array,
    seen: _SeenKeys,
    scored: Callable,
    sinks_1KG1: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of weights [Q, K, G, T], and of weighted values, of which the columns from V on are zeros."""
    (Q, K, R, _), S, T = query_QKRH.shape, pages.key.shape[3], seen.start_QT.shape[1]
    page_Q = seen.first_Q // S
    trips = jnp.max(seen.pages(S))

    def read(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        largest, total, attended = carry
        at_Q = page_Q + i
        there_Q = jnp.take_along_axis(table, jnp.minimum(at_Q, table.shape[1] - 1)[:, None], axis=1)[:, 0]
        index_QS = at_Q[:, None] * S + jnp.arange(S)[None]
        page = pages.of_each(lambda x: x[there_Q])
        scores = seen.masked(scored(query_QKRH, page), index_QS)
        larger = jnp.maximum(largest, _largest(scores))
        weights = _weights(scores, larger)
        kept = jnp.exp(largest - larger)
        product = seen.values(page, weights.reshape(Q, K, R, S), index_QS)
        attended = attended * kept[..., None] + product.reshape(*attended.shape)
        return larger, total * kept + jnp.sum(weights, axis=-1), attended

    sizes = Q, K, R // T, T
    if sinks_1KG1 is None:
        begins = jnp.full(sizes, _LOWEST), jnp.zeros(sizes)
    else:  # as after one key with this score and no value
        begins = jnp.broadcast_to(sinks_1KG1, sizes), jnp.ones(sizes)
    _, total, attended = jax.lax.fori_loop(0, trips, read, (*begins, jnp.zeros((*sizes, pages.columns))))
    return total, attended


def _of_all_pages(
    query_QKRH: jax.Array,
    pages: _Pages,
    table: jax.Array,
    seen: _SeenKeys,
    scored: Callable,
    sinks_1KG1: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return what `_page_after_page` does, of all pages of the table, gathered at once.

    Products are of one page each. The sums of pages are added in pairs, so that pages beyond those that a row sees,
    which are zeros, change none of its bits.
    """
    (Q, M), (_, K, _, S), (_, _, R, H) = table.shape, pages.key.shape, query_QKRH.shape
    every = _SeenKeys(*(jnp.repeat(x, M, axis=0) for x in seen))
    page_P, index_PS = table.reshape(Q * M), jnp.tile(jnp.arange(M * S).reshape(M, S), (Q, 1))
    query_PKRH = jnp.broadcast_to(query_QKRH[:, None], (Q, M, K, R, H)).reshape(Q * M, K, R, H)
    page = pages.of_each(lambda x: x.at[page_P].get(mode="clip"))
    scores = every.masked(scored(query_PKRH, page), index_PS)
    scores = scores.reshape(Q, M, *scores.shape[1:])
    largest = jnp.max(scores, axis=(1, -1), keepdims=True)[..., 0]
    if sinks_1KG1 is not None:
        largest = jnp.maximum(largest, sinks_1KG1[None])
    weights = _weights(scores, largest)
    attended = every.values(page, weights.reshape(Q * M, K, R, S), index_PS)
    of_pages = _in_pairs(jnp.moveaxis(weights, -1, 1))  # XLA's sum depends on the number of rows
    total = _in_pairs(of_pages)
    if sinks_1KG1 is not None:
        total = total + jnp.exp(sinks_1KG1 - largest[:, 0])
    return total, _in_pairs(attended.reshape(*weights.shape[:-1], -1))


def _part(key_QKHS: jax.Array, width: int) -> jax.Array:
    """Return the first channels of the keys of pages as values, [Q, K, S, V]."""
    return jnp.swapaxes(key_QKHS[:, :, :width], 2, 3)


def _largest(x_QS: jax.Array) -> jax.Array:
    """Return the largest of the last axis. Halves are compared first: XLA's reduction on a CPU takes eight times as
    long, number by number."""
    while x_QS.shape[-1] > _VECTOR and x_QS.shape[-1] % 2 == 0:
        x_QS = jnp.maximum(*jnp.split(x_QS, 2, axis=-1))
    return jnp.max(x_QS, axis=-1)


def _weights(scores: jax.Array, largest: jax.Array) -> jax.Array:
    """Return eˢ⁻ˡ of scores [..., S], 0 of what is not seen."""
    return jnp.exp(scores - jnp.where(largest == _LOWEST, 0.0, largest)[..., None])


def _in_pairs(x_QM: jax.Array) -> jax.Array:
    """Return the sum over the second axis: of neighbours, then of neighbouring sums, and so on."""
    while (M := x_QM.shape[1]) > 1:
        x_QM = jnp.pad(x_QM, [(0, 0), (0, M % 2), *[(0, 0)] * (x_QM.ndim - 2)])
        x_QM = x_QM[:, ::2] + x_QM[:, 1::2]
    return x_QM[:, 0]


def block_sequences(Q: int, T: int) -> int:
    """Return how many of Q sequences with T queries each read pages together: all that decode, or a block of the runs
    of prompts."""
    return Q if T == 1 else min(Q, max(1, _BLOCK // T))


def padded_queries(T: int, G: int, H: int, V: int, S: int) -> int:
    """Return the queries of each sequence that are computed for T of them, in groups of G heads that share keys."""
    rows = max(_ROWS, -(-_MULTIPLICATIONS // (min(H, V) * S)))
    return T if T * G >= rows else -(-rows // G)


def padded_columns(V: int) -> int:
    """Return the columns of the product with values of width V that are computed."""
    return -(-V // _COLUMNS) * _COLUMNS


def _product(a_QKRS: jax.Array, b_QKSV: jax.Array) -> jax.Array:
    """Return a · b, [Q, K, R, V], in float32. On a CPU each row is computed in one way, however many there are."""
    rows, columns = a_QKRS.shape[2], b_QKSV.shape[3]
    is_cut = columns % _FULL_COLUMNS and target.platform() in ("cpu", None)
    at_once = _MANY_ROWS // 2 if is_cut else rows
    parts = [a_QKRS[:, :, first : first + at_once] for first in range(0, rows, at_once)]
    return jnp.concatenate([einsum_in_float32("QKRS,QKSV->QKRV", part, b_QKSV) for part in parts], axis=2)
