"""Attention in plain JAX."""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.core.attention.key_range import KeyRange, clipped
from kernels_pallas.core.attention.scores import LN_2, LOWEST, recomputed


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_range: KeyRange | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    return_log_sum_exp: bool = False,
    query_chunk: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.flash_attention`."""
    (B, T, _, H), S = query.shape, key.shape[1]
    start, end = map(jnp.asarray, clipped(key_range, B, T, S))
    attend = functools.partial(
        _attend, key, value, sinks=sinks, scale=H**-0.5 if scale is None else scale, soft_cap=soft_cap
    )
    if query_chunk is None or query_chunk >= T:
        out, log_sum_exp = attend(query, start, end, bias)
    else:
        chunks = -(-T // query_chunk)

        def split(x: jax.Array, axis: int) -> jax.Array:
            """The axis over T in chunks, which come first; rows beyond T see nothing."""
            rows = [(0, 0)] * x.ndim
            rows[axis] = (0, chunks * query_chunk - T)
            chunked = jnp.pad(x, rows).reshape(*x.shape[:axis], chunks, query_chunk, *x.shape[axis + 1 :])
            return jnp.moveaxis(chunked, axis, 0)

        by_row = bias is not None and bias.shape[2] == T > 1
        xs = (split(query, 1), split(start, 2), split(end, 2), split(bias, 2) if by_row else None)
        # Differentiated, a chunk is computed again: only its operands are kept.
        chunk = jax.checkpoint(lambda x: attend(*x[:3], x[3] if by_row else bias))
        mapped = (jnp.moveaxis(y, 0, 1) for y in jax.lax.map(chunk, xs))
        out, log_sum_exp = (y.reshape(B, chunks * query_chunk, *y.shape[3:])[:, :T] for y in mapped)
    return (out, log_sum_exp) if return_log_sum_exp else out


def _attend(key, value, query, start, end, bias, *, sinks, scale, soft_cap):
    (B, T, N, H), (_, S, K, V) = query.shape, value.shape
    G = N // max(K, 1)  # of no heads there are no groups
    grouped = query.reshape(B, T, K, G, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, N, T, S) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        wide = bias.astype(jnp.float32)
        scores = scores + jnp.where(wide < LOWEST * LN_2, -jnp.inf, wide)  # as in kernels, which count in log₂ e
    index = jnp.arange(S)[None, None, None]
    seen = jnp.any((start[..., None] <= index) & (index < end[..., None]), axis=0)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)

    # A finite floor, so that a row of −∞ gives exp(−∞) = 0 and not NaN.
    largest = jnp.max(scores, axis=-1, initial=jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None, :, None]
        largest = jnp.maximum(largest, sinks)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(scores - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    some = total != 0  # of a NaN too
    total = jnp.where(some, total, 1.0)
    log_sum_exp = jnp.where(some, largest + jnp.log(total), -jnp.inf)

    weights = weights.astype(value.dtype).reshape(B, K, G, T, S)
    output = jnp.einsum("BKGTS,BSKV->BTKGV", weights, value, preferred_element_type=jnp.float32)
    total, log_sum_exp = (jnp.swapaxes(x, 1, 2) for x in (total, log_sum_exp))
    return (output.reshape(B, T, N, V) / total[..., None]).astype(query.dtype), log_sum_exp


def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
    key_range: KeyRange,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value that scores of these keys give, of the log-sum-exp and delta
    [B, N, T] of each row (FlashAttention-2, arXiv:2307.08691, algorithm 2)."""
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    scale = H**-0.5 if scale is None else scale
    start, end = map(jnp.asarray, clipped(key_range, B, T, S))
    query, d_out = (x.reshape(B, T, K, N // K, -1) for x in (query, d_out))
    log_sum_exp, delta = (x.reshape(B, K, N // K, T, 1) for x in (log_sum_exp, delta))
    scores = scale * jnp.einsum("BTKGH,BSKH->BKGTS", query, key, preferred_element_type=jnp.float32)
    slope = scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
        slope = scale * (1.0 - (scores / soft_cap) ** 2)
    index = jnp.arange(S)[None, None, None]
    seen = jnp.any((start[..., None] <= index) & (index < end[..., None]), axis=0)
    weights = jnp.where(seen[:, None, None], recomputed(jnp.exp(scores - log_sum_exp)), 0.0)
    d_weights = jnp.einsum("BTKGV,BSKV->BKGTS", d_out, value, preferred_element_type=jnp.float32)
    d_scores = (slope * jnp.where(weights > 0, weights * (d_weights - delta), 0.0)).astype(key.dtype)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_query = einsum("BKGTS,BSKH->BTKGH", d_scores, key).reshape(B, T, N, H)
    d_key = einsum("BKGTS,BTKGH->BSKH", d_scores, query)
    d_value = einsum("BKGTS,BTKGV->BSKV", weights.astype(value.dtype), d_out)
    return d_query, d_key, d_value
