"""Queries and keys of length one."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.unfused import unfused

_EPSILON = 1e-6  # added to the sum of squares


def unit(x: jax.Array) -> jax.Array:
    """Return x / √(Σx² + 1e-6) over the last dimension, in float32 or, of float64, in that."""
    x = x.astype(np.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(unfused(x * x), axis=-1, keepdims=True) + _EPSILON)
