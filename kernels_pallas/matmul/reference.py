"""A matrix product and its epilogue in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.activations import REFERENCE


def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    activation: str | None = None,
) -> jax.Array:
    """See `kernels_pallas.matmul`."""
    y = jnp.matmul(a, b, preferred_element_type=np.promote_types(a.dtype, jnp.float32))
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape((1,) * (a.ndim - 1) + (-1,))
    if activation is not None:
        y = REFERENCE[activation](y)
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return y.astype(a.dtype)
