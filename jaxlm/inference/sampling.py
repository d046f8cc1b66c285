"""Sampling of the next token from logits."""

import jax
import jax.numpy as jnp

from jaxlm.inference.requests import Sampling


def sample(logits_BV: jax.Array, key: jax.Array, how: Sampling, vocab_size: int | None = None) -> jax.Array:
    """Return token ids, int32 [B]. Ids from `vocab_size` on are padding of the vocabulary and never drawn."""
    if vocab_size is not None and vocab_size < logits_BV.shape[-1]:
        logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1])[None] < vocab_size, logits_BV, -jnp.inf)
    if how.temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filtered(logits_BV, how)).astype(jnp.int32)


def filtered(logits_BV: jax.Array, how: Sampling) -> jax.Array:
    """Return logits / temperature, −∞ for tokens that top-k and top-p exclude. Equal logits stay or go together."""
    logits_BV = logits_BV / how.temperature
    if how.top_k is None and how.top_p is None:
        return logits_BV
    ordered_BV = jnp.sort(logits_BV, axis=-1)
    if how.top_k is not None and how.top_k < logits_BV.shape[-1]:
        least_B1 = ordered_BV[:, -how.top_k, None]
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
        ordered_BV = jnp.where(ordered_BV >= least_B1, ordered_BV, -jnp.inf)
    if how.top_p is not None and how.top_p < 1.0:
        # A token stays while the likelier tokens hold less than top_p, that is, while it and all less likely ones hold
        # more than 1 − top_p: sums of small numbers, for which float32 is exact enough. The likeliest always stays.
        rest_BV = jnp.cumsum(jax.nn.softmax(ordered_BV, axis=-1), axis=-1)
        kept_BV = jnp.where(rest_BV > 1.0 - how.top_p, ordered_BV, ordered_BV[:, -1:])
        least_B1 = jnp.min(kept_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return logits_BV
