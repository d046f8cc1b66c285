"""Rotary position embedding in plain JAX."""

import jax
import jax.numpy as jnp


def rotary_embedding(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """See `kernels_pallas.rotary_embedding`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (jnp.broadcast_to(a.astype(wide), (*x.shape[:-2], a.shape[-1]))[..., None, :] for a in (cos, sin))
    half = x.shape[-1] // 2
    split = (*x.shape[:-1], half, 2) if interleaved else (*x.shape[:-1], 2, half)
    pairs = -1 if interleaved else -2
    first, second = (jnp.take(x.astype(wide).reshape(split), i, axis=pairs) for i in (0, 1))
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.stack(turned, axis=pairs).reshape(x.shape).astype(x.dtype)
