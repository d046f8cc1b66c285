"""Layers in which tokens read one another, attention and recurrences, by the `kind` of `[model.attention]`.

`register` takes a section, and a `Mixer` made of (model, rngs). Kind "none" has no layer.
"""

from flax import nnx

from jaxlm.core.registry import Registry
from jaxlm.models.attention.gated_delta import GatedDelta
from jaxlm.models.attention.gqa import GroupedQueryAttention
from jaxlm.models.attention.latent import LatentAttention
from jaxlm.models.attention.mamba2 import Mamba2
from jaxlm.models.attention.short_convolution import ShortConvolution
from jaxlm.models.block_config import ATTENTIONS
from jaxlm.models.cache import Mixer
from jaxlm.models.config import ModelConfig
from jaxlm.models.grouped_query_config import GroupedQueryAttentionConfig
from jaxlm.models.latent_config import LatentAttentionConfig
from jaxlm.models.layer_config import AttentionConfig, NoAttentionConfig
from jaxlm.models.recurrent_config import GatedDeltaConfig, Mamba2Config, ShortConvolutionConfig

_REGISTRY = Registry(
    ATTENTIONS,
    AttentionConfig,
    {
        GroupedQueryAttentionConfig: GroupedQueryAttention,
        LatentAttentionConfig: LatentAttention,
        GatedDeltaConfig: GatedDelta,
        ShortConvolutionConfig: ShortConvolution,
        Mamba2Config: Mamba2,
    },
)
register, unregister = _REGISTRY.register, _REGISTRY.unregister


def attention(model: ModelConfig, rngs: nnx.Rngs) -> Mixer | None:
    """Return the layer that the configuration names; None for kind "none"."""
    if isinstance(model.attention, NoAttentionConfig):
        return None
    return _REGISTRY.of(model.attention)(model, rngs)
