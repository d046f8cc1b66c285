"""Positions of tokens: rotary angles, and attention masks as intervals of keys."""

import math

import jax
import jax.numpy as jnp

from jaxlm.models import config
from jaxlm.models.operations import Dropout, RopeTable
from jaxlm.models.rows import RowContext
from kernels_pallas.flash_attention import KeyRange


def packed_causal_mask(positions_BT: jax.Array) -> KeyRange:
    """Return the causal mask of packed rows: positions restart at 0 with each document, which sees itself alone."""
    index_BT = jnp.broadcast_to(jnp.arange(positions_BT.shape[1])[None], positions_BT.shape)
    return KeyRange(index_BT - positions_BT, index_BT + 1)


def sliding_window_mask(size: int, key_range: KeyRange) -> KeyRange:
    """Return the last `size` keys of each token's interval, int32 [B, T]."""
    return KeyRange(jnp.maximum(key_range.start, key_range.end - size), key_range.end)


def cache_causal_mask(positions_BT: jax.Array, length_B: jax.Array) -> KeyRange:
    """Return the causal mask of a cache in which position p lies at index p.

    Tokens from `length_B` on are padding and see nothing.
    """
    is_token_BT = positions_BT < length_B[:, None]
    return KeyRange(jnp.zeros_like(positions_BT), jnp.where(is_token_BT, positions_BT + 1, 0))


class LayerRows:
    """The inputs of each layer besides the stream.

    At most two pairs of masks and rotary tables are made, once: one for layers with a window, one for the others.
    """

    def __init__(self, model: config.ModelConfig, positions_BT: jax.Array, key_range: KeyRange, dropout: Dropout):
        self._dropout = dropout
        settings, self._window = model.position, model.window
        rope = None
        if settings.kind == "rope" and model.rope_dim:
            rope = rope_table(settings, model.rope_dim, positions_BT)
        self._global = self._windowed = key_range, rope
        if self._window is not None:
            if theta := self._window.rope_theta:
                rope = rope_table(config.RopeConfig(theta=theta), model.rope_dim, positions_BT)
            self._windowed = sliding_window_mask(self._window.size, key_range), rope

    def of(self, layer: jax.Array) -> RowContext:
        """Return what a layer reads, by its index from 0."""
        return RowContext(*self._mask(layer), self._dropout.at(layer + 1))

    def _mask(self, layer: jax.Array) -> tuple[KeyRange, RopeTable | None]:
        if self._window is None or self._window.global_every is None:
            return self._windowed
        is_global = (layer + 1) % self._window.global_every == 0

        def choose(whole: jax.Array, narrow: jax.Array) -> jax.Array:
            return whole if whole is narrow else jnp.where(is_global, whole, narrow)

        return jax.tree.map(choose, self._global, self._windowed)


def rope_table(settings: config.RopeConfig, rope_dim: int, positions_BT: jax.Array) -> RopeTable:
    """Return the table of angles position · θ^(−2i/H) (arXiv:2104.09864, section 3.2.2), scaled where configured."""
    frequency = settings.theta ** (-jnp.arange(0, rope_dim, 2, dtype=jnp.float32) / rope_dim)
    if settings.scaling is not None:
        frequency = _SCALED[settings.scaling.kind](frequency, settings.scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * frequency[None, None]
    return RopeTable(jnp.cos(angle), jnp.sin(angle))


def _llama3(frequency: jax.Array, scaling: config.Llama3ScalingConfig) -> jax.Array:
    """Stretch wavelengths beyond the original context by `factor`, keep short ones, and blend between."""
    rotations = scaling.original_context_length * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def _linear(frequency: jax.Array, scaling: config.LinearScalingConfig) -> jax.Array:
    return frequency / scaling.factor


_SCALED = {"llama3": _llama3, "linear": _linear}
