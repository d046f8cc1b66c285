"""LayerNorm in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.unfused import unfused


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    plus_one: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.layer_norm`."""
    if residual is not None:
        x = x + residual
    wide = x.astype(np.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(unfused(jnp.square(centred)), axis=-1, keepdims=True) + epsilon)
    last = (1,) * (x.ndim - 1) + (-1,)
    if scale is not None:
        factor = scale.astype(wide.dtype).reshape(last)
        y = y * (factor + 1.0 if plus_one else factor)
    if bias is not None:
        y = y + bias.astype(wide.dtype).reshape(last)
    y = y.astype(x.dtype)
    return y if residual is None else (x, y)
