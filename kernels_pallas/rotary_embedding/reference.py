"""Rotary position embedding in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np


def rotary_embedding(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """See `kernels_pallas.rotary_embedding`."""
    wide = np.promote_types(x.dtype, jnp.float32)
    cos, sin = (jnp.broadcast_to(a.astype(wide), (*x.shape[:-2], a.shape[-1]))[..., None, :] for a in (cos, sin))
    if interleaved:
        pairs = x.astype(wide).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    y = jnp.stack(rotated, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(rotated, axis=-1)
    return y.astype(x.dtype)
