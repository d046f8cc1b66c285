"""Feed-forward layers: functions of each token alone, by the `kind` of `[model.feed_forward]`."""

from flax import nnx

from jaxlm.models.config import ModelConfig
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.parameters import Module

_FEED_FORWARDS = {"dense": DenseFeedForward}


def feed_forward(model: ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return the feed-forward layer that the configuration names."""
    return _FEED_FORWARDS[model.feed_forward.kind](model, rngs)
