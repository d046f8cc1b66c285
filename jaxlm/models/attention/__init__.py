"""Attention layers, by the `kind` of `[model.attention]`."""

from flax import nnx

from jaxlm.models.attention.gqa import GroupedQueryAttention
from jaxlm.models.cache import Mixer
from jaxlm.models.config import ATTENTIONS, AttentionConfig, GroupedQueryAttentionConfig, ModelConfig
from jaxlm.models.registry import Registry

_REGISTRY = Registry(ATTENTIONS, AttentionConfig, {GroupedQueryAttentionConfig: GroupedQueryAttention})
register, unregister = _REGISTRY.register, _REGISTRY.unregister


def attention(model: ModelConfig, rngs: nnx.Rngs) -> Mixer:
    """Return the attention layer that the configuration names."""
    return _REGISTRY.make(model.attention, model, rngs)
