"""Feed-forward layers: functions of each token alone, by the `kind` of `[model.feed_forward]`.

`register` takes a section, and a module made of (model, rngs).
"""

from flax import nnx

from jaxlm.core.registry import Registry
from jaxlm.models.config import (
    FEED_FORWARDS,
    DenseFeedForwardConfig,
    LayerConfig,
    MixtureFeedForwardConfig,
    ModelConfig,
)
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.feed_forward.mixture import MixtureFeedForward
from jaxlm.models.parameters import Module

_MAKERS = {DenseFeedForwardConfig: DenseFeedForward, MixtureFeedForwardConfig: MixtureFeedForward}
_REGISTRY = Registry(FEED_FORWARDS, LayerConfig, _MAKERS)
register, unregister = _REGISTRY.register, _REGISTRY.unregister


def feed_forward(model: ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return the feed-forward layer that the configuration names."""
    return _REGISTRY.of(model.feed_forward)(model, rngs)
