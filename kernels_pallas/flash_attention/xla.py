"""Attention as XLA runs it fast: heads in front of the sequence for its products, in chunks on a CPU."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.core import target
from kernels_pallas.core.attention.key_range import KeyRange, narrowed
from kernels_pallas.core.products import einsum_in_float32
from kernels_pallas.core.slopes import soft_capped
from kernels_pallas.flash_attention import causal_chunks
from kernels_pallas.flash_attention.operands import Operands


def unsupported_reason(
    operands: Operands, key_range: Any, return_log_sum_exp: bool, query_chunk: int | None
) -> str | None:
    """Return why a call is left to the reference, or None where it is served."""
    if operands.bias is not None:
        return "it has no bias"
    if return_log_sum_exp:
        return "it does not return the log-sum-exp"
    if query_chunk is not None:
        return "it holds the scores of all queries"
    if key_range is not None and key_range[0].ndim == 3:
        return "it takes one interval per query, and no union"
    return None


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_range: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `kernels_pallas.flash_attention`."""
    T, S = query.shape[1], key.shape[1]
    start, end = (jnp.zeros((1, T), jnp.int32), jnp.full((1, T), S)) if key_range is None else map(narrowed, key_range)
    attend = _in_causal_chunks if is_causal and target.platform() == "cpu" else _attend
    return attend(query, key, value, KeyRange(start, end), scale, soft_cap, sinks)


def _in_causal_chunks(query, key, value, key_range: KeyRange, scale, soft_cap, sinks) -> jax.Array:
    """`_attend` where no query sees a key after its own: a chunk leaves out the keys after its last query."""

    def chunk(first: int, end: int) -> jax.Array:
        intervals = KeyRange(*(x[:, first:end] for x in key_range))
        return _attend(query[:, first:end], key[:, :end], value[:, :end], intervals, scale, soft_cap, sinks)

    return jnp.concatenate([chunk(*bounds) for bounds in causal_chunks.bounds(query.shape[1])], axis=1)


def _attend(query, key, value, key_range: KeyRange, scale, soft_cap, sinks) -> jax.Array:
    (B, T, N, H), (_, S, K, V) = query.shape, value.shape
    G = N // K
    query_BKQH = query.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    key_BKSH, value_BKSV = (x.transpose(0, 2, 1, 3) for x in (key, value))
    scores = einsum_in_float32("BKQH,BKSH->BKQS", query_BKQH, key_BKSH)
    scores = scores * (H**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_capped(scores, soft_cap)
    scores = scores.reshape(B, K, G, T, S)

    index_S = jnp.arange(S)[None, None]
    seen_BTS = (key_range.start[..., None] <= index_S) & (index_S < key_range.end[..., None])
    # The largest negative finite number, not −∞: a row that sees nothing must not become NaN.
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)

    # Divided after the product with the values, as in FlashAttention (arXiv:2205.14135): V numbers per row, not S.
    largest = jnp.max(scores, axis=-1)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(1, K, G, 1)
    largest = jax.lax.stop_gradient(largest if sinks is None else jnp.maximum(largest, sinks))
    weights = jnp.exp(scores - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    total = jnp.where(jnp.any(seen_BTS, axis=-1)[:, None, None], total, jnp.inf)
    weights = weights.reshape(B, K, G * T, S).astype(value.dtype)
    attended = einsum_in_float32("BKQS,BKSH->BKQH", weights, value_BKSV)
    attended = attended.reshape(B, K, G, T, V) / total[..., None]
    return attended.transpose(0, 3, 1, 2, 4).reshape(B, T, N, V).astype(query.dtype)
