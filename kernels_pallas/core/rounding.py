"""Rows of few bits, each number times a scale."""

from typing import Any

import jax
import jax.numpy as jnp

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)
# The largest magnitude that rounding gives.
MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def rounded_rows(x: jax.Array, dtype: Any = "int8") -> tuple[jax.Array, jax.Array]:
    """Return rows [..., K] in int8 or float8_e4m3fn, and the float32 scale [..., 1] of each, by which the largest
    magnitude of the row is 127 or 448.

    A row depends on its own numbers alone. A row with a NaN or an infinity has NaN as its scale.
    """
    wide, most = x.astype(jnp.float32), MOST[jnp.dtype(dtype).name]
    # The bits of magnitudes have their order, with infinity and NaN above: XLA's maximum of numbers on a CPU may ignore
    # NaN, and looking for it takes as long again.
    bits = jax.lax.bitcast_convert_type(wide, jnp.int32) & 0x7FFFFFFF
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1, keepdims=True), jnp.float32)
    is_finite = jnp.isfinite(largest)
    scale = jnp.where(is_finite, jnp.maximum(largest / most, _SMALLEST), jnp.nan)
    units = jnp.where(is_finite, wide / scale, 0.0)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.round(units).astype(dtype), scale
    return jnp.clip(units, -most, most).astype(dtype), scale


def with_rounded_rows(x: jax.Array) -> jax.Array:
    """Return rows [..., K] in float32 as `rounded_rows` rounds them to int8; their gradient is that of rows that are
    not rounded."""
    numbers, of_row = rounded_rows(x)
    return x + jax.lax.stop_gradient(numbers * of_row - x)
