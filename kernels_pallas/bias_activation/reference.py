"""Bias and activation in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.activations import REFERENCE


def bias_activation(x: jax.Array, bias: jax.Array, *, activation: str = "gelu") -> jax.Array:
    """See `kernels_pallas.bias_activation`."""
    wide = np.promote_types(x.dtype, jnp.float32)
    shifted = x.astype(wide) + bias.astype(wide).reshape((1,) * (x.ndim - 1) + (-1,))
    return REFERENCE[activation](shifted).astype(x.dtype)
