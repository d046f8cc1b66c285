"""Attention layers, by the `kind` of `[model.attention]`."""

from flax import nnx

from jaxlm.models.attention.gqa import GroupedQueryAttention
from jaxlm.models.config import ModelConfig
from jaxlm.models.parameters import Module

_ATTENTIONS = {"gqa": GroupedQueryAttention}


def attention(model: ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return the attention layer that the configuration names."""
    return _ATTENTIONS[model.attention.kind](model, rngs)
