"""The precision of a product of two tiles, and a mask of a tile, for all kernels of products."""

import jax
import jax.numpy as jnp

# Columns and rows of a vector register of a TPU.
LANES = 128
_SUBLANES = 8


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Return the precision of a product; None is that of `jax.default_matmul_precision`.

    Products of narrow numbers are always exact, and Mosaic refuses a request for precision.
    """
    return None if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def tpu_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Return the precision of a product on TPUs.

    Mosaic multiplies float32 in one pass of the matrix unit or as float32; a request for three passes gets the latter.
    """
    high = jax.config.jax_default_matmul_precision in ("high", "tensorfloat32")
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 and high else precision_of(dtype)


def until(x: jax.Array, axis: int, end: jax.Array) -> jax.Array:
    """Return x up to an index along an axis, and zeros from there on."""
    inside = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < end
    if x.shape[0] < _SUBLANES:  # Mosaic has no mask of so few rows for narrow numbers
        return jnp.where(inside, x.astype(jnp.float32), 0.0).astype(x.dtype)
    return jnp.where(inside, x, jnp.zeros_like(x))
