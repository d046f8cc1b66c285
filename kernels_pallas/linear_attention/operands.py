"""The arrays of a call as kernels read them: heads first, in whole chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ChunkedOperands(NamedTuple):
    """The arrays of a call, of N heads of values and K of keys, in chunks of C tokens; T is a multiple of C.

    Attributes:
      query, key: [B, K, T, H]; value: [B, N, T, V]; or, of kernels that read heads in their place, [B, T, K, H] and
        [B, T, N, V].
      decay, weight: [B, N, T / C, 1, C], float32, 0 for padding.
      state: [B, N, H, V], float32, before the first token.
      document: the documents that have begun in a chunk up to each token, [B, T / C, 1, C], float32.
      skip: [N, 1, 1], float32, of the state space.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    weight: jax.Array
    state: jax.Array
    document: jax.Array
    skip: jax.Array | None

    def sizes(self, heads_axis: int) -> tuple[int, int, int, int, int, int, int]:
        """B, K, G (value heads of a key), the number of chunks, C, H and V; `heads_axis`: of query, key and value."""
        (B, N, H, V), K = self.state.shape, self.query.shape[heads_axis]
        return B, K, N // K, self.decay.shape[2], self.decay.shape[-1], H, V


def in_chunks(x: jax.Array, chunk: int, heads_axis: int = 1) -> jax.Array:
    """[B, T, N, …] → [B, N, T, …] or, of heads in axis 2, [B, T, N, …]; T filled up with zeros to a multiple of the
    chunk."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x, 2, heads_axis)


def in_rows(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, N] → [B, N, T / C, 1, C], float32."""
    x = in_chunks(x.astype(jnp.float32), chunk)
    return x.reshape(*x.shape[:2], -1, 1, chunk)


def chunked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    weight: jax.Array,
    skip: jax.Array | None,
    state: jax.Array,
    is_token: jax.Array,
    begins: jax.Array,
    chunk: int,
    heads_axis: int,
) -> ChunkedOperands:
    """Return the arrays of a call as kernels read them; JAX differentiates this. `heads_axis`: 1, or 2 where heads stay
    in their place."""
    query, key, value = (in_chunks(x, chunk, heads_axis) for x in (query, key, value))
    decay, weight = (in_rows(jnp.where(is_token[..., None], x, 0.0), chunk) for x in (log_decay, weight))
    first = in_rows((begins & is_token)[..., None], chunk)[:, 0]
    document = jnp.cumsum(first, axis=-1)
    skip = None if skip is None else skip.astype(jnp.float32)[:, None, None]
    return ChunkedOperands(query, key, value, decay, weight, state.astype(jnp.float32), document, skip)
