"""Multi-head latent attention as a section of [model]. Imports no JAX."""

from typing import Annotated, ClassVar, Literal

from jaxlm.core.schema import Count, InWords, Positive
from jaxlm.models.layer_config import AttentionConfig


class LatentAttentionConfig(AttentionConfig):
    """Multi-head latent attention: the keys and values of all heads are made of one latent for each token, and of a
    rotated key that all heads share (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A cache keeps these alone, latent_rank + rope_dim numbers for each token and layer.
    """

    activations: ClassVar = ("latent", "query", "key", "value", "attention")
    activation_sources: ClassVar = ("latent",)
    logical_axes: ClassVar = {"num_heads": "heads"}
    rotated: ClassVar = "rope_dim"

    kind: Literal["latent"] = "latent"
    num_heads: Count
    """Heads."""
    query_rank: Annotated[Count | None, InWords(default="queries are one product")] = None
    """Channels of the latent that queries are made of (DeepSeek-V2; V2-Lite has none)."""
    latent_rank: Count
    """Channels of the latent that keys and values are made of."""
    nope_dim: Count
    """Channels of a head's queries and keys that are not rotated."""
    rope_dim: Count
    """Channels of a head's queries, and of the key that all heads share, that rotary positions rotate; even."""
    value_dim: Count
    """Channels of a head's values."""
    scale: Annotated[Positive | None, InWords(default="1 / √(nope_dim + rope_dim)")] = None
    """Multiplies the products of queries and keys."""
