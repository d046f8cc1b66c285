"""Softmax and its logarithm in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np


def softmax(
    x: jax.Array, where: jax.Array | None = None, *, temperature: float = 1.0, soft_cap: float | None = None
) -> jax.Array:
    """See `kernels_pallas.softmax`."""
    shifted, unmasked = _shifted(x, where, temperature, soft_cap)
    weights = jnp.where(unmasked, jnp.exp(shifted), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (weights / jnp.where(total == 0, 1.0, total)).astype(x.dtype)


def log_softmax(
    x: jax.Array, where: jax.Array | None = None, *, temperature: float = 1.0, soft_cap: float | None = None
) -> jax.Array:
    """See `kernels_pallas.log_softmax`."""
    shifted, unmasked = _shifted(x, where, temperature, soft_cap)
    total = jnp.sum(jnp.where(unmasked, jnp.exp(shifted), 0.0), axis=-1, keepdims=True)
    return jnp.where(unmasked, shifted - jnp.log(jnp.where(total == 0, 1.0, total)), -jnp.inf).astype(x.dtype)


def _shifted(x, where, temperature, soft_cap) -> tuple[jax.Array, jax.Array]:
    """Return capped logits over the temperature, less the row's largest, 0 where masked; and the unmasked positions."""
    wide = x.astype(np.promote_types(x.dtype, jnp.float32))
    unmasked = jnp.ones(x.shape, bool) if where is None else where
    if soft_cap is not None:
        wide = soft_cap * jnp.tanh(jnp.where(unmasked, wide, 0.0) / soft_cap)
    wide = wide / temperature
    masked = jnp.where(unmasked, wide, jnp.finfo(wide.dtype).min)
    largest = jax.lax.stop_gradient(jnp.max(masked, axis=-1, keepdims=True, initial=-jnp.inf))
    return jnp.where(unmasked, wide - largest, 0.0), unmasked
