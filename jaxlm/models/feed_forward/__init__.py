"""Feed-forward layers: functions of each token alone, by the `kind` of `[model.feed_forward]`."""

from flax import nnx

from jaxlm.models.config import FEED_FORWARDS, DenseFeedForwardConfig, LayerConfig, ModelConfig
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.parameters import Module
from jaxlm.models.registry import Registry

_REGISTRY = Registry(FEED_FORWARDS, LayerConfig, {DenseFeedForwardConfig: DenseFeedForward})
register, unregister = _REGISTRY.register, _REGISTRY.unregister


def feed_forward(model: ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return the feed-forward layer that the configuration names."""
    return _REGISTRY.make(model.feed_forward, model, rngs)
