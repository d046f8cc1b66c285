"""Gated activations in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.activations import REFERENCE


def gated_activation(gate: jax.Array, up: jax.Array, *, activation: str = "silu") -> jax.Array:
    """See `kernels_pallas.gated_activation`."""
    wide = np.promote_types(gate.dtype, jnp.float32)
    return (REFERENCE[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
