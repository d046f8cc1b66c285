"""Positions of tokens: rotary angles, and attention masks as intervals of keys."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.models.block_config import BlockConfig
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import Dropout, RopeTable
from jaxlm.models.masks import Mask, OneDocumentMask
from jaxlm.models.position_config import (
    DynamicScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RopeConfig,
    YarnScalingConfig,
)
from jaxlm.models.rows import LayerIndex, Reach, RowContext
from jaxlm.parallel.columns import columns_around, from_column_order, in_column_order
from jaxlm.parallel.partition import shards_of
from kernels_pallas.core import target
from kernels_pallas.flash_attention import KeyRange


def packed_causal_mask(positions_BT: jax.Array) -> KeyRange:
    """Return the causal mask of packed rows: positions restart at 0 with each document, which sees itself alone.

    Keys are counted as the columns of the rows, whatever their order on devices (`jaxlm.parallel.columns`).
    """
    index_BT = jnp.broadcast_to(columns_around(positions_BT.shape[1])[None], positions_BT.shape)
    return KeyRange(index_BT - positions_BT, index_BT + 1)


def sliding_window_mask(size: int, key_range: Mask) -> KeyRange:
    """Return the last `size` keys of each token's interval, int32 [B, T]."""
    return KeyRange(jnp.maximum(key_range.start, key_range.end - size), key_range.end)


def traced_structure(block: BlockConfig) -> BlockConfig:
    """Return the block without what layers that are traced once may differ in: windows and angles are arrays."""
    same: dict[str, Any] = {}
    if block.position.kind == "rope":
        same["position"] = RopeConfig(fraction=block.position.fraction)
    if block.window is not None:
        same["attention"] = block.attention.model_copy(update={"window": None})
    return block.model_copy(update=same)


def angle_classes(model: ModelConfig, length: int) -> tuple[int, ...]:
    """Return what angles depend on of a document's length, besides positions: documents with equal classes have equal
    angles. Empty for models whose angles depend on positions alone."""
    scalings = dict.fromkeys(block.position.scaling for block in model.layers if isinstance(block.position, RopeConfig))
    classes = []
    for scaling in scalings:
        if isinstance(scaling, DynamicScalingConfig):
            classes.append(max(length, scaling.original_context_length))
        elif isinstance(scaling, LongRopeScalingConfig):
            classes.append(int(length > scaling.original_context_length))
    return tuple(classes)


class LayerRows:
    """The inputs of each layer besides the residual. Masks and rotary tables are made once for all layers alike."""

    def __init__(
        self,
        model: ModelConfig,
        positions_BT: jax.Array,
        key_range: Mask,
        dropout: Dropout,
        length_BT: jax.Array | None = None,
        padding_BT: jax.Array | None = None,
    ):
        self._dropout, self._positions_BT, self._padding_BT = dropout, positions_BT, padding_BT
        if isinstance(key_range, OneDocumentMask) and any(block.window is not None for block in model.layers):
            key_range = packed_causal_mask(positions_BT)  # layers select among arrays
        self._masks: dict[int | None, Mask] = {None: key_range}
        self._tables: dict[tuple, RopeTable] = {}
        # Layers of one structure may share a body, whatever their windows.
        windows: dict[BlockConfig, list[int | None]] = {}
        for block in dict.fromkeys(model.layers):
            windows.setdefault(traced_structure(block), []).append(block.window)
        self._reach = {key: None if None in some else max(filter(None, some)) for key, some in windows.items()}
        if length_BT is None:
            length_BT = document_lengths(positions_BT, key_range)
        for block in dict.fromkeys(model.layers):
            if block.window is not None and block.window not in self._masks:
                self._masks[block.window] = sliding_window_mask(block.window, key_range)
            settings, width = block.position, block.rope_dim
            if isinstance(settings, RopeConfig) and width and (settings, width) not in self._tables:
                self._tables[settings, width] = rope_table(settings, width, positions_BT, length_BT)

    def of(self, at: LayerIndex) -> RowContext:
        """Return what a layer reads."""
        masks = [self._masks[block.window] for block in at.blocks]
        tables = [self._tables.get((block.position, block.rope_dim)) for block in at.blocks]
        dropout = self._dropout.at(at.layer + 1)
        mask, table = _select(at.which, masks), _select(at.which, tables)
        reach = Reach(self._reach[traced_structure(at.blocks[0])])
        return RowContext(self._positions_BT, mask, table, dropout, self._padding_BT, reach)


def _select(which: jax.Array, cases: Sequence[Any]) -> Any:
    """Return one of several trees of arrays by its index; an array that they share is not selected."""

    def select(*arrays: jax.Array) -> jax.Array:
        return arrays[0] if all(x is arrays[0] for x in arrays) else jax.lax.select_n(which, *arrays)

    return jax.tree.map(select, *cases)


def document_lengths(positions_BT: jax.Array, key_range: Mask) -> jax.Array:
    """Return the tokens of each token's document up to the last one of its row, int32 [B, T].

    Tokens that see nothing are padding, and do not count.
    """
    shards = shards_of("sequence", positions_BT.shape[1])
    is_token_BT = jnp.broadcast_to(key_range.end > key_range.start, positions_BT.shape).astype(jnp.int32)
    positions_BT, is_token_BT = (in_column_order(x, shards) for x in (positions_BT, is_token_BT))
    total_BT = jnp.cumsum(is_token_BT, axis=1)
    before_BT = total_BT - is_token_BT  # tokens of the row before each
    begins_BT = jnp.where(positions_BT == 0, before_BT, total_BT[:, -1:])
    after_BT = jnp.concatenate([begins_BT[:, 1:], total_BT[:, -1:]], axis=1)
    ends_BT = jax.lax.cummin(after_BT, axis=1, reverse=True)  # tokens of the row before the next document
    return from_column_order(positions_BT + ends_BT - before_BT, shards)


def rope_table(
    settings: RopeConfig, rope_dim: int, positions_BT: jax.Array, length_BT: jax.Array | None = None
) -> RopeTable:
    """Return the table of angles position · θ^(−2i/R) (arXiv:2104.09864, section 3.2.2), scaled where configured.

    Args:
      settings: the base of the frequencies, their scaling and the direction.
      rope_dim: R, the channels of a head that rotate.
      positions_BT: int32 position of each token in its document.
      length_BT: the tokens of that document, on which some scalings depend; position + 1 where None.
    """
    frequency, amplitude = settings.theta ** (-jnp.arange(0, rope_dim, 2, dtype=jnp.float32) / rope_dim), 1.0
    if settings.scaling is not None:
        length_BT = positions_BT + 1 if length_BT is None else length_BT
        frequency = _SCALED[settings.scaling.kind](frequency, settings, settings.scaling, length_BT)
        amplitude = settings.scaling.amplitude
    angle = positions_BT[..., None].astype(jnp.float32) * (frequency if frequency.ndim > 1 else frequency[None, None])
    cos, sin = _cos_and_sin(-angle if settings.reversed else angle)
    return RopeTable(cos, sin) if amplitude == 1.0 else RopeTable(amplitude * cos, amplitude * sin)


def _cos_and_sin(angle_BTR: jax.Array) -> tuple[jax.Array, jax.Array]:
    if target.platform() not in ("cpu", None):
        return jnp.cos(angle_BTR), jnp.sin(angle_BTR)
    # A loop, out of which XLA fuses nothing: in the loops that rotate it would compute both again for every head.
    both = jax.lax.map(lambda i: jax.lax.cond(i == 0, jnp.cos, jnp.sin, angle_BTR), jnp.arange(2))
    return both[0], both[1]


# Scaled frequencies, [R/2] or of each token [B, T, R/2].


def _llama3(frequency: jax.Array, settings: RopeConfig, scaling: Llama3ScalingConfig, length_BT: jax.Array):
    """Stretch wavelengths beyond the original context by `factor`, keep short ones, and blend between."""
    rotations = scaling.original_context_length * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def _linear(frequency: jax.Array, settings: RopeConfig, scaling: LinearScalingConfig, length_BT: jax.Array):
    return frequency / scaling.factor


def _dynamic(frequency: jax.Array, settings: RopeConfig, scaling: DynamicScalingConfig, length_BT: jax.Array):
    """Raise θ by g^(R/(R − 2)), which divides the slowest frequency by g and leaves the fastest as it is."""
    over_BT = jnp.maximum(length_BT / scaling.original_context_length - 1.0, 0.0)
    share = jnp.arange(len(frequency), dtype=jnp.float32) / max(len(frequency) - 1, 1)
    return frequency[None, None] * (1.0 + scaling.factor * over_BT)[..., None] ** -share[None, None]


def _yarn(frequency: jax.Array, settings: RopeConfig, scaling: YarnScalingConfig, length_BT: jax.Array):
    """Divide slow frequencies by `factor`, keep fast ones, and blend by the number of the pair between (YaRN, 3.2).

    Of R channels the last pair of the blend is at most R − 1, as in the published code, where it is counted in pairs.
    """

    def pair(rotations: float) -> float:
        """Return the number of the pair that rotates that many times in the original context."""
        original = scaling.original_context_length / (2 * math.pi * rotations)
        return len(frequency) * math.log(original) / math.log(settings.theta)

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequency) - 1)
    pairs = jnp.arange(len(frequency), dtype=jnp.float32)
    kept = 1.0 - jnp.clip((pairs - low) / (high - low or 0.001), 0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def _longrope(frequency: jax.Array, settings: RopeConfig, scaling: LongRopeScalingConfig, length_BT: jax.Array):
    """Divide each frequency by its factor for documents of that length."""
    short, long = (jnp.asarray(factors, jnp.float32) for factors in (scaling.short_factors, scaling.long_factors))
    is_long_BT1 = (length_BT > scaling.original_context_length)[..., None]
    return frequency[None, None] / jnp.where(is_long_BT1, long[None, None], short[None, None])


_SCALED = {"llama3": _llama3, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}
