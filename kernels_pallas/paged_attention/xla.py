"""Paged attention as XLA runs it fast: a loop over the pages that somebody sees, with an online softmax."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import target
from kernels_pallas.core.products import einsum_in_float32
from kernels_pallas.core.slopes import soft_capped
from kernels_pallas.flash_attention.key_range import KeyRange

# XLA computes products of fewer rows, or smaller ones, on a CPU by other kernels, which add up in another order; and
# where columns do not fill two vectors of AVX2, by kernels that change with the number of rows.
_ROWS, _MULTIPLICATIONS, _COLUMNS = 2, 2048, 16
# Columns that do not fill four vectors of AVX-512 have another kernel from so many rows on.
_FULL_COLUMNS, _MANY_ROWS = 64, 64
_LOWEST = float(np.finfo(np.float32).min)


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    *,
    key_range: KeyRange,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention`.

    Pages begin at multiples of S, whoever reads them, so that each row adds the same numbers in the same order. A page
    of which a row sees nothing leaves its sums as they are.
    """
    (Q, T, N, H), (_, K, S, V) = query.shape, value.shape
    G = N // K
    if more := padded_queries(T, G, H, V, S) - T:
        query = jnp.pad(query, [(0, 0), (0, more), (0, 0), (0, 0)])
        key_range = KeyRange(*(jnp.pad(x, [(0, 0), (0, more)]) for x in key_range))
        options = {"key_range": key_range, "scale": scale, "soft_cap": soft_cap}
        return paged_attention(query, key, value, table, **options)[:, :T]
    columns = padded_columns(V)
    wide = jnp.promote_types(query.dtype, key.dtype)
    query_QKRH = query.astype(wide).reshape(Q, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(Q, K, T * G, H)
    start_QT, end_QT = key_range
    is_seen_QT = end_QT > start_QT
    last_Q = jnp.max(jnp.where(is_seen_QT, end_QT, 0), axis=1)
    first_Q = jnp.min(jnp.where(is_seen_QT, start_QT, last_Q[:, None]), axis=1)
    page_Q = first_Q // S
    pages = jnp.max((last_Q + S - 1) // S - page_Q)

    def read(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        largest, total, attended = carry
        at_Q = page_Q + i
        there_Q = jnp.take_along_axis(table, jnp.minimum(at_Q, table.shape[1] - 1)[:, None], axis=1)[:, 0]
        index_QS = at_Q[:, None] * S + jnp.arange(S)[None]
        seen_QTS = (start_QT[..., None] <= index_QS[:, None]) & (index_QS[:, None] < end_QT[..., None])
        scores = _product(query_QKRH, key[there_Q]) * scale
        if soft_cap is not None:
            scores = soft_capped(scores, soft_cap)
        scores = jnp.where(seen_QTS[:, None, :, None], scores.reshape(Q, K, T, G, S), _LOWEST)
        larger = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - jnp.where(larger == _LOWEST, 0.0, larger)[..., None])  # 0 of what is not seen
        kept = jnp.exp(largest - larger)
        # The rest of a page may hold anything, also NaN of a sequence that had it before: 0 · NaN is no 0.
        mine = (first_Q[:, None] <= index_QS) & (index_QS < last_Q[:, None])
        value_QKSV = jnp.where(mine[:, None, :, None], value[there_Q], 0)
        value_QKSV = jnp.pad(value_QKSV, [*[(0, 0)] * 3, (0, columns - V)])
        product = _product(weights.reshape(Q, K, T * G, S).astype(value.dtype), value_QKSV)
        attended = attended * kept[..., None] + product.reshape(Q, K, T, G, columns)
        return larger, total * kept + jnp.sum(weights, axis=-1), attended

    sizes = Q, K, T, G
    zeros = jnp.full(sizes, _LOWEST), jnp.zeros(sizes), jnp.zeros((*sizes, columns))
    _, total, attended = jax.lax.fori_loop(0, pages, read, zeros)
    attended = attended[..., :V] / jnp.where(total == 0.0, 1.0, total)[..., None]
    return attended.transpose(0, 2, 1, 3, 4).reshape(Q, T, N, V).astype(query.dtype)


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
