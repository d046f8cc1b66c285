"""The sections from which the parts of a layer are made, whatever their kind. Imports no JAX."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxlm.core.schema import Section


class LayerConfig(Section):
    """A section from which a part of every layer is made: attention, or the feed-forward layer.

    Attributes:
      activations: names of the activations that rematerialisation can keep.
      activation_sources: those of them that others are made of, so that a layer may keep these alone in their place.
      training_keys: keys that inference does not read.
      logical_axes: by key, the logical axis of the parameters' dimensions of that size; a mesh must divide those that
        its axes shard.
    """

    kind: str
    activations: ClassVar[tuple[str, ...]] = ()
    activation_sources: ClassVar[tuple[str, ...]] = ()
    training_keys: ClassVar[frozenset[str]] = frozenset()
    logical_axes: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def with_sizes(cls, table: dict[str, Any], d_model: int) -> dict[str, Any]:
        """Return a table of this section with the sizes that follow from the model's width where it has none."""
        return table


class AttentionConfig(LayerConfig):
    """A section from which attention is made. With a key `window` a token sees that many tokens at most, or all.

    Attributes:
      rotated: the key that holds the channels of a head, of which rotary positions rotate a part; None rotates none.
      carries_states: it reads the tokens of a sequence in order, so that devices cannot share one.
    """

    rotated: ClassVar[str | None] = None
    carries_states: ClassVar[bool] = False


class NoAttentionConfig(AttentionConfig):
    """No attention: a feed-forward layer alone, with its norm (Nemotron-H, arXiv:2504.03624, section 2)."""

    kind: Literal["none"] = "none"


class NoFeedForwardConfig(LayerConfig):
    """No feed-forward layer: attention, or a recurrence, alone, with its norm (Mamba-2)."""

    kind: Literal["none"] = "none"
