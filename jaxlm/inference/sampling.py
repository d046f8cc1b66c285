"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp

from jaxlm.inference.requests import Sampling


def sample(logits_BV: jax.Array, key: jax.Array, how: Sampling, valid: int | None = None) -> jax.Array:
    """Token ids, int32 [B]. `valid`: ids from here on are padding of the vocabulary and never drawn."""
    if valid is not None and valid < logits_BV.shape[-1]:
        logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1])[None] < valid, logits_BV, -jnp.inf)
    if how.temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filtered(logits_BV, how)).astype(jnp.int32)


def filtered(logits_BV: jax.Array, how: Sampling) -> jax.Array:
    """Logits / temperature, −∞ for the tokens that top-k and top-p leave out. Equal logits stay or go together."""
    logits_BV = logits_BV / how.temperature
    if how.top_k is None and how.top_p is None:
        return logits_BV
    ordered_BV = jnp.sort(logits_BV, axis=-1)
    if how.top_k is not None and how.top_k < logits_BV.shape[-1]:
        least_B1 = ordered_BV[:, -how.top_k, None]
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
        ordered_BV = jnp.where(ordered_BV >= least_B1, ordered_BV, -jnp.inf)
    if how.top_p is not None and how.top_p < 1.0:
        # A token stays while those likelier than it do not yet hold top_p: while it and the rest hold more than what is
        # to go, sums of small numbers that float32 has exactly enough. The likeliest always stays.
        rest_BV = jnp.cumsum(jax.nn.softmax(ordered_BV, axis=-1), axis=-1)
        kept_BV = jnp.where(rest_BV > 1.0 - how.top_p, ordered_BV, ordered_BV[:, -1:])
        least_B1 = jnp.min(kept_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return logits_BV
