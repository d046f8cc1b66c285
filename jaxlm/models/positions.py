"""Where tokens stand and what they may see: rotary angles, and visibility as intervals of rows."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models import config, kernels
from kernels_pallas import rotary_embedding
from kernels_pallas.flash_attention import KeyRange


def packed_causal_mask(positions_BT: jax.Array) -> KeyRange:
    """Causal attention in packed rows: positions restart at 0 where a document starts, and none looks past that."""
    index_BT = jnp.broadcast_to(jnp.arange(positions_BT.shape[1])[None], positions_BT.shape)
    return KeyRange(index_BT - positions_BT, index_BT + 1)


def sliding_window_mask(size: int, key_range: KeyRange) -> KeyRange:
    """Of what each token sees, one interval int32 [B, T], the last `size` tokens: a sliding window."""
    return KeyRange(jnp.maximum(key_range.start, key_range.end - size), key_range.end)


def cache_causal_mask(positions_BT: jax.Array) -> KeyRange:
    """Causal attention to a cache in which position p lies at index p."""
    return KeyRange(jnp.zeros_like(positions_BT), positions_BT + 1)


class Rotation(NamedTuple):
    """cos and sin of the rotary angles, float32 [B, T, H/2]."""

    cos: jax.Array
    sin: jax.Array


class Views:
    """What tokens see, and by what angles they turn, in each layer of a model: with a window in some or all layers, one
    of two, which are made once."""

    def __init__(self, model: config.ModelConfig, positions_BT: jax.Array, key_range: KeyRange):
        settings, self._window = model.position, model.attention.window
        turn = None
        if settings.kind == "rope":
            turn = rotation(settings, model.attention.head_dim, positions_BT)
        self._whole = self._narrow = key_range, turn
        if self._window is not None:
            if theta := self._window.rope_theta:
                turn = rotation(config.RopeConfig(theta=theta), model.attention.head_dim, positions_BT)
            self._narrow = sliding_window_mask(self._window.size, key_range), turn

    def of(self, layer: jax.Array) -> tuple[KeyRange, Rotation | None]:
        """Of a layer by its number, from 0."""
        if self._window is None or self._window.global_every is None:
            return self._narrow
        is_global = (layer + 1) % self._window.global_every == 0

        def choose(whole: jax.Array, narrow: jax.Array) -> jax.Array:
            return whole if whole is narrow else jnp.where(is_global, whole, narrow)

        return jax.tree.map(choose, self._whole, self._narrow)


def rotation(settings: config.RopeConfig, head_dim: int, positions_BT: jax.Array) -> Rotation:
    """Angles position · base^(−2i/H) (arXiv:2104.09864, section 3.2.2), scaled where the configuration says so."""
    frequency = settings.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if settings.scaling is not None:
        frequency = _SCALED[settings.scaling.kind](frequency, settings.scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * frequency[None, None]
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def _llama3(frequency: jax.Array, scaling: config.Llama3ScalingConfig) -> jax.Array:
    """Wavelengths beyond the original context are stretched by `factor`, short ones kept, those between blended."""
    turns = scaling.original_context_length * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def _linear(frequency: jax.Array, scaling: config.LinearScalingConfig) -> jax.Array:
    return frequency / scaling.factor


_SCALED = {"llama3": _llama3, "linear": _linear}


def rotate(x_BTNH: jax.Array, axes: kernels.Axes, turn: Rotation) -> jax.Array:
    """Rotate the pairs (x[i], x[i + H/2]) of x, which has these logical axes, by the angles; float32 inside."""
    angles = *axes[:2], None
    return kernels.run(rotary_embedding, (x_BTNH, axes), (turn.cos, angles), (turn.sin, angles))
