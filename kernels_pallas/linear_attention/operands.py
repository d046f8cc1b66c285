"""The arrays of a call as kernels read them: heads first, in whole chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ChunkedOperands(NamedTuple):
    """The arrays of a call, of N heads of values and K of keys, in chunks of C tokens; T is a multiple of C.

    Attributes:
      query, key: [B, K, T, H]. value: [B, N, T, V].
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

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, K, G (value heads of a key), the number of chunks, C, H and V."""
        (B, N, _, V), (K, _, H) = self.value.shape, self.query.shape[1:]
        return B, K, N // K, self.decay.shape[2], self.decay.shape[-1], H, V


def heads_first(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, N, …] → [B, N, T, …], T filled up with zeros to a multiple of the chunk."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.swapaxes(x, 1, 2)


def in_rows(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, N] → [B, N, T / C, 1, C], float32."""
    x = heads_first(x.astype(jnp.float32), chunk)
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
) -> ChunkedOperands:
    """Return the arrays of a call as kernels read them; JAX differentiates this."""
    query, key, value = (heads_first(x, chunk) for x in (query, key, value))
    decay, weight = (in_rows(jnp.where(is_token[..., None], x, 0.0), chunk) for x in (log_decay, weight))
    first = in_rows((begins & is_token)[..., None], chunk)[:, 0]
    document = jnp.cumsum(first, axis=-1)
    skip = None if skip is None else skip.astype(jnp.float32)[:, None, None]
    return ChunkedOperands(query, key, value, decay, weight, state.astype(jnp.float32), document, skip)
