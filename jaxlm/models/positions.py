"""Where tokens stand and what they may see: rotary angles, and visibility as intervals of rows."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models import config, kernels
from kernels_pallas import rotary_embedding
from kernels_pallas.flash_attention import Visible


def visible_in_rows(positions_BT: jax.Array) -> Visible:
    """Causal attention in packed rows: positions restart at 0 where a document starts, and none looks past that."""
    index_BT = jnp.broadcast_to(jnp.arange(positions_BT.shape[1])[None], positions_BT.shape)
    return Visible(index_BT - positions_BT, index_BT + 1)


def visible_in_cache(positions_BT: jax.Array) -> Visible:
    """Causal attention to a cache in which position p lies at index p."""
    return Visible(jnp.zeros_like(positions_BT), positions_BT + 1)


class Rotation(NamedTuple):
    """cos and sin of the rotary angles, float32 [B, T, H/2]."""

    cos: jax.Array
    sin: jax.Array


def rotation(settings: config.RotaryPositions, head_width: int, positions_BT: jax.Array) -> Rotation:
    """Angles position · base^(−2i/H) (arXiv:2104.09864, section 3.2.2), scaled where the configuration says so."""
    frequency = settings.base ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    if settings.scaling is not None:
        frequency = _llama3(frequency, settings.scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * frequency[None, None]
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def _llama3(frequency: jax.Array, scaling: config.Llama3Scaling) -> jax.Array:
    """Wavelengths beyond the original context are stretched by `factor`, short ones kept, those between blended."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def rotate(x_BTNH: jax.Array, axes: kernels.Axes, turn: Rotation, choice: config.Kernels) -> jax.Array:
    """Rotate the pairs (x[i], x[i + H/2]) of x, which has these logical axes, by the angles; float32 inside."""
    angles = *axes[:2], None
    return kernels.run(choice, rotary_embedding, (x_BTNH, axes), (turn.cos, angles), (turn.sin, angles))
