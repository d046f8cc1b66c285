"""Sampling of the next token from logits: every row of a batch by its own options and random numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.inference.requests import Sampling

NO_TOKEN = -1  # drawn from logits that give no distribution
_ALL = 2**31 - 1  # as top-k: more tokens than a vocabulary has


class NotFinite(InputError):
    """Logits are not finite, so that no token can be drawn."""


class RowSampling(NamedTuple):
    """The sampling of each row of a batch, as arrays [B]: one program serves all options.

    Attributes:
      temperature: float32; 0 takes the likeliest token.
      top_k: int32; from the vocabulary's size on it excludes nothing.
      tail: float32, 1 − top_p, which keeps a top-p close to 1 apart from 1; 0 excludes nothing.
      seed: uint32, of the row's random numbers.
      stream: uint32, apart for rows of equal seeds.
    """

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    tail: jax.Array | np.ndarray
    seed: jax.Array | np.ndarray
    stream: jax.Array | np.ndarray


def row_sampling(rows: Sequence[Sampling], seed: int, streams: Sequence[int] | None = None) -> RowSampling:
    """Return the sampling of rows under one seed; row i draws from stream i where no streams are given."""
    return RowSampling(
        np.array([how.temperature for how in rows], np.float32),
        np.array([_ALL if how.top_k is None else min(how.top_k, _ALL) for how in rows], np.int32),
        np.array([0.0 if how.top_p is None else 1.0 - how.top_p for how in rows], np.float32),
        np.full(len(rows), seed, np.uint32),
        np.array(range(len(rows)) if streams is None else streams, np.uint32),
    )


def sample(
    logits_BV: jax.Array, how: RowSampling, position_B: jax.Array, known_V: jax.Array | None = None
) -> jax.Array:
    """Return token ids, int32 [B]: a row's depends on its logits, options, seed, stream and position alone.

    A row is NO_TOKEN if its largest logit is not finite: logits of NaN, of ∞, or of −∞ alone are no distribution.
    Nothing is drawn where all rows take the likeliest token, and no vocabulary is sorted where none is filtered.

    Args:
      position_B: int32, of the token that is drawn in its sequence.
      known_V: bool, whether an id has a token; others have probability 0. None where all have.
    """
    if known_V is not None:
        logits_BV = jnp.where(known_V[None], logits_BV, -jnp.inf)
    likeliest_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    is_drawn_B = how.temperature > 0.0
    excludes_B = is_drawn_B & ((how.top_k < logits_BV.shape[-1]) | (how.tail > 0.0))

    def draw() -> jax.Array:
        warm_BV = logits_BV / jnp.where(is_drawn_B, how.temperature, 1.0)[:, None]
        kept_BV = jax.lax.cond(jnp.any(excludes_B), filtered, lambda warm_BV, *_: warm_BV, warm_BV, how.top_k, how.tail)
        drawn_B = jax.vmap(jax.random.categorical)(_keys(how, position_B), kept_BV)
        return jnp.where(is_drawn_B, drawn_B.astype(jnp.int32), likeliest_B)

    drawn_B = jax.lax.cond(jnp.any(is_drawn_B), draw, lambda: likeliest_B)
    return jnp.where(jnp.isfinite(jnp.max(logits_BV, axis=-1)), drawn_B, NO_TOKEN)


def check_drawn(tokens: np.ndarray) -> np.ndarray:
    """Return tokens [B] that `sample` drew. Raise NotFinite if one of them is NO_TOKEN."""
    if (tokens == NO_TOKEN).any():
        raise NotFinite(
            "the model's logits are not finite, so that no token can be drawn: its weights are damaged or have "
            "diverged, or training.dtype overflows; use another checkpoint, or training.dtype=float32"
        )
    return tokens


@jax.vmap
def _keys(how: RowSampling, position: jax.Array) -> jax.Array:
    # Threefry whatever the configuration says: the numbers of "rbg" depend on the batch under vmap.
    key = jax.random.key(how.seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, how.stream), position)


def filtered(logits_BV: jax.Array, top_k_B: jax.Array, tail_B: jax.Array) -> jax.Array:
    """Return logits, −∞ for tokens that top-k and top-p exclude (`RowSampling`). Equal logits stay or go together."""
    V = logits_BV.shape[-1]
    ordered_BV = jnp.sort(logits_BV, axis=-1)
    least_B1 = jnp.take_along_axis(ordered_BV, V - jnp.clip(top_k_B, 1, V)[:, None], axis=-1)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    ordered_BV = jnp.where(ordered_BV >= least_B1, ordered_BV, -jnp.inf)
    # A token stays while the likelier tokens hold less than top_p, that is, while it and all less likely ones hold more
    # than 1 − top_p: sums of small numbers, for which float32 is exact enough. The likeliest always stays.
    rest_BV = jnp.cumsum(jax.nn.softmax(ordered_BV, axis=-1), axis=-1)
    kept_BV = jnp.where(rest_BV > tail_B[:, None], ordered_BV, ordered_BV[:, -1:])
    least_B1 = jnp.min(kept_BV, axis=-1, keepdims=True)
    return jnp.where((logits_BV >= least_B1) | (tail_B[:, None] == 0.0), logits_BV, -jnp.inf)
