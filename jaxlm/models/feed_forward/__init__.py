"""Feed-forward layers: functions of each token alone, by the `kind` of `[model.feed_forward]`.

`register` takes a section, and a module made of (model, rngs). Kind "none" has no layer.
"""

from flax import nnx

from jaxlm.core.registry import Registry
from jaxlm.models.block_config import FEED_FORWARDS
from jaxlm.models.config import ModelConfig
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.feed_forward.mixture import MixtureFeedForward
from jaxlm.models.feed_forward_config import DenseFeedForwardConfig, MixtureFeedForwardConfig
from jaxlm.models.layer_config import LayerConfig, NoFeedForwardConfig
from jaxlm.models.parameters import Module

_MAKERS = {DenseFeedForwardConfig: DenseFeedForward, MixtureFeedForwardConfig: MixtureFeedForward}
_REGISTRY = Registry(FEED_FORWARDS, LayerConfig, _MAKERS)
register, unregister = _REGISTRY.register, _REGISTRY.unregister


def feed_forward(model: ModelConfig, rngs: nnx.Rngs) -> Module | None:
    """Return the feed-forward layer that the configuration names; None for kind "none"."""
    if isinstance(model.feed_forward, NoFeedForwardConfig):
        return None
    return _REGISTRY.of(model.feed_forward)(model, rngs)
