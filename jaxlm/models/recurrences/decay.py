"""First values of decays of states, exp(−rate · softplus(time + bias)) for each token (Mamba-2, arXiv:2405.21060)."""

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
