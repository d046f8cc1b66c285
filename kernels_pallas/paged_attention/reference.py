"""Paged attention in plain JAX: all pages of each sequence, then attention."""

import jax
import jax.numpy as jnp

from kernels_pallas.core.attention import reference
from kernels_pallas.core.attention.key_range import KeyRange


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | int,
    table: jax.Array,
    *,
    key_range: KeyRange,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention`."""
    if key_scales is not None:
        key = key.astype(jnp.float32) * key_scales
    if value_scales is not None and not isinstance(value, int):
        value = value.astype(jnp.float32) * jnp.swapaxes(value_scales, 2, 3)

    def gathered(pages: jax.Array) -> jax.Array:
        (Q, M), (_, K, S, H) = table.shape, pages.shape
        return pages[table].transpose(0, 1, 3, 2, 4).reshape(Q, M * S, K, H)

    keys = gathered(jnp.swapaxes(key, 2, 3))
    values = keys[..., :value] if isinstance(value, int) else gathered(value)
    options = {"key_range": key_range, "scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    return reference.flash_attention(query, keys, values, **options)
