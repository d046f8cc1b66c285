"""Positions of tokens: rotary angles, and attention masks as intervals of keys."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.models import config
from jaxlm.models.operations import Dropout, RopeTable
from jaxlm.models.rows import Place, RowContext
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


def program(block: config.BlockConfig) -> config.BlockConfig:
    """Return the block without what differs between layers of one program: its window and its angles are arrays."""
    same: dict[str, Any] = {}
    if block.position.kind == "rope":
        same["position"] = config.RopeConfig(fraction=block.position.fraction)
    if block.window is not None:
        same["attention"] = block.attention.model_copy(update={"window": None})
    return block.model_copy(update=same)


class LayerRows:
    """The inputs of each layer besides the stream. Masks and rotary tables are made once for all layers alike."""

    def __init__(self, model: config.ModelConfig, positions_BT: jax.Array, key_range: KeyRange, dropout: Dropout):
        self._dropout = dropout
        self._masks: dict[int | None, KeyRange] = {None: key_range}
        self._tables: dict[tuple, RopeTable] = {}
        for block in dict.fromkeys(model.layers):
            if block.window is not None and block.window not in self._masks:
                self._masks[block.window] = sliding_window_mask(block.window, key_range)
            settings, width = block.position, block.rope_dim
            if isinstance(settings, config.RopeConfig) and width and (settings, width) not in self._tables:
                self._tables[settings, width] = rope_table(settings, width, positions_BT)

    def of(self, at: Place) -> RowContext:
        """Return what a layer reads."""
        masks = [self._masks[block.window] for block in at.blocks]
        tables = [self._tables.get((block.position, block.rope_dim)) for block in at.blocks]
        return RowContext(_select(at.which, masks), _select(at.which, tables), self._dropout.at(at.layer + 1))


def _select(which: jax.Array, cases: Sequence[Any]) -> Any:
    """Return one of several trees of arrays by its index; an array that they share is not selected."""

    def select(*arrays: jax.Array) -> jax.Array:
        return arrays[0] if all(x is arrays[0] for x in arrays) else jax.lax.select_n(which, *arrays)

    return jax.tree.map(select, *cases)


def rope_table(settings: config.RopeConfig, rope_dim: int, positions_BT: jax.Array) -> RopeTable:
    """Return the table of angles position · θ^(−2i/H) (arXiv:2104.09864, section 3.2.2), scaled where configured."""
    frequency = settings.theta ** (-jnp.arange(0, rope_dim, 2, dtype=jnp.float32) / rope_dim)
    if settings.scaling is not None:
        frequency = _SCALED[settings.scaling.kind](frequency, settings.scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * frequency[None, None]
    return RopeTable(jnp.cos(angle), jnp.sin(-angle if settings.reversed else angle))


def _llama3(frequency: jax.Array, scaling: config.Llama3ScalingConfig) -> jax.Array:
    """Stretch wavelengths beyond the original context by `factor`, keep short ones, and blend between."""
    rotations = scaling.original_context_length * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def _linear(frequency: jax.Array, scaling: config.LinearScalingConfig) -> jax.Array:
    return frequency / scaling.factor


_SCALED = {"llama3": _llama3, "linear": _linear}
