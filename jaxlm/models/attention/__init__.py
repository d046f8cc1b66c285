"""Attention layers, by the `kind` of `[model.attention]`."""

from flax import nnx

from jaxlm.models.attention.gqa import GroupedQueryAttention
from jaxlm.models.cache import Mixer
from jaxlm.models.config import ModelConfig

_ATTENTIONS = {"gqa": GroupedQueryAttention}


def attention(model: ModelConfig, rngs: nnx.Rngs) -> Mixer:
    """Return the attention layer that the configuration names."""
    return _ATTENTIONS[model.attention.kind](model, rngs)
