"""Queries and results by key head: the rows of a head are those of all query heads that share it, token by token."""

import jax
import jax.numpy as jnp


def by_key_head(query_QTNH: jax.Array, key_heads: int) -> jax.Array:
    """Return queries as [Q, K, R, H] for K key heads, where R = T · N / K."""
    Q, T, N, H = query_QTNH.shape
    by_head = query_QTNH.reshape(Q, T, key_heads, N // key_heads, H).transpose(0, 2, 1, 3, 4)
    return by_head.reshape(Q, key_heads, T * N // key_heads, H)


def by_token(attended_QKRV: jax.Array, tokens: int, heads: int) -> jax.Array:
    """Return results as [Q, T, N, V] for so many tokens and query heads; rows beyond theirs are padding."""
    Q, K, _, V = attended_QKRV.shape
    of_tokens = attended_QKRV[:, :, : tokens * heads // K].reshape(Q, K, tokens, heads // K, V)
    return of_tokens.transpose(0, 2, 1, 3, 4).reshape(Q, tokens, heads, V)


def sinks_by_row(sinks_N: jax.Array, query_QTNH: jax.Array, key_heads: int, rows: int) -> jax.Array:
    """Return the sink of each row of `by_key_head`, float32 [K, rows]; rows from R on are padding."""
    _, T, N, _ = query_QTNH.shape
    sinks_KR = jnp.tile(sinks_N.astype(jnp.float32).reshape(key_heads, N // key_heads), (1, T))
    return jnp.pad(sinks_KR, [(0, 0), (0, rows - sinks_KR.shape[1])])
