"""RMSNorm in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.unfused import unfused


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    plus_one: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.rms_norm`."""
    if residual is not None:
        x = x + residual
    wide = x.astype(np.promote_types(x.dtype, jnp.float32))
    y = wide * jax.lax.rsqrt(jnp.mean(unfused(jnp.square(wide)), axis=-1, keepdims=True) + epsilon)
    if scale is not None:
        factor = scale.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        y = y * (factor + 1.0 if plus_one else factor)
    y = y.astype(x.dtype)
    return y if residual is None else (x, y)
