"""Decays of states, exp(−rate · softplus(time + bias)) for each token (Mamba-2, arXiv:2405.21060): their first values,
and what several together leave."""

import jax
import jax.numpy as jnp

_RATES = 1.0, 16.0
_TIMES = 1e-3, 0.1  # softplus(bias)


def log_rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Return logarithms of uniform rates."""
    return jnp.log(jax.random.uniform(key, shape, dtype, *_RATES))


def time_biases(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Return biases whose softplus is uniform in its logarithm."""
    low, high = jnp.log(jnp.asarray(_TIMES))
    time = jnp.exp(jax.random.uniform(key, shape, dtype) * (high - low) + low)
    return time + jnp.log(-jnp.expm1(-time))


def decays_in_chunk(document_BC: jax.Array, total_BKGC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what each token (row) sees of every token of a chunk, [B, K, G, C, C], zero of later ones and of other
    documents; and what it sees of the state before the chunk, [B, K, G, C].

    Args:
      document_BC: of each token, 0 for the one that the state is of.
      total_BKGC: the sums of the logarithms of decays from the first token on, float32.
    """
    C = document_BC.shape[1]
    is_read_BCC = (document_BC[:, :, None] == document_BC[:, None, :]) & jnp.tril(jnp.ones((C, C), bool))[None]
    between_BKGCC = total_BKGC[..., :, None] - total_BKGC[..., None, :]
    decay_BKGCC = jnp.exp(jnp.where(is_read_BCC[:, None, None], between_BKGCC, -jnp.inf))
    return decay_BKGCC, jnp.where((document_BC == 0)[:, None, None], jnp.exp(total_BKGC), 0.0)


def by_group(x_BCN: jax.Array, groups: int) -> jax.Array:
    """Return numbers of heads as [B, K, N / K, C, …], those of each of K groups together, in float32."""
    B, C, N, *rest = x_BCN.shape
    return jnp.moveaxis(x_BCN.astype(jnp.float32).reshape(B, C, groups, N // groups, *rest), 1, 3)


def by_token(x_BKGC: jax.Array) -> jax.Array:
    """Return what `by_group` takes apart, [B, C, N, …]."""
    B, K, G, C, *rest = x_BKGC.shape
    return jnp.moveaxis(x_BKGC, 3, 1).reshape(B, C, K * G, *rest)
