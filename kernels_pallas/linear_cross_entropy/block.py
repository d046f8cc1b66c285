"""The mathematics on a block of logits, as every implementation computes it: logits [r, c], a number per row [r, 1]."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LogitStatistics(NamedTuple):
    """Statistics of the logits of a row so far: the largest, Σ exp(logit − largest), and the target's logit."""

    largest: jax.Array
    total: jax.Array
    at_target: jax.Array


def nothing(like: jax.Array) -> LogitStatistics:
    """Return the statistics of no logits, in the shape of an array [r, 1]."""
    return LogitStatistics(jnp.full_like(like, -jnp.inf), jnp.zeros_like(like), jnp.zeros_like(like))


def finite(largest: jax.Array) -> jax.Array:
    """Return the number to subtract from logits: the largest, but 0 where all are −∞, since −∞ − (−∞) is NaN."""
    return jnp.where(largest == -jnp.inf, 0.0, largest)


def capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return cap · tanh(logits / cap) (Gemma 2, arXiv:2408.00118, section 2), or the logits without a cap."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits * (1 / soft_cap))


def add(
    row_statistics: LogitStatistics,
    logits: jax.Array,
    is_target: jax.Array,
    soft_cap: float | None,
    inside: jax.Array | None = None,
) -> LogitStatistics:
    """Return the statistics updated by more logits of the same rows (online softmax: Milakov and Gimelshein 2018,
    arXiv:1805.02867).

    Only logits that are inside count, and each block has at least one; None: all are inside.
    """
    logits = capped(logits, soft_cap)
    if inside is not None:
        logits = jnp.where(inside, logits, -jnp.inf)
    largest = jnp.maximum(row_statistics.largest, jnp.max(logits, axis=1, keepdims=True))
    from_largest = finite(largest)
    kept = row_statistics.total * jnp.exp(row_statistics.largest - from_largest)
    total = kept + jnp.sum(jnp.exp(logits - from_largest), axis=1, keepdims=True)
    here = jnp.sum(jnp.where(is_target, logits, 0.0), axis=1, keepdims=True)
    return LogitStatistics(largest, total, row_statistics.at_target + here)


def gradient(
    logits: jax.Array,
    is_target: jax.Array,
    log_z: jax.Array,
    of_z: jax.Array,
    of_target: jax.Array,
    soft_cap: float | None,
    inside: jax.Array | None = None,
) -> jax.Array:
    """Return the logits' cotangent where log Z has the cotangent `of_z` and the target's logit −`of_target`.

    It is zero for logits that are not inside.
    """
    y = capped(logits, soft_cap)
    d_y = of_z * jnp.exp(y - log_z) - jnp.where(is_target, of_target, 0.0)
    if soft_cap is not None:
        d_y = d_y * (1.0 - jnp.square(y * (1 / soft_cap)))
    return d_y if inside is None else jnp.where(inside, d_y, 0.0)
