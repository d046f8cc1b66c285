"""Feed-forward layers: functions of each token alone."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import config, kernels
from jaxlm.models.layers import all_gather_sequence, linear
from jaxlm.models.parameters import Module, normal, param, zeros
from jaxlm.parallel.partition import constrain
from kernels_pallas import gated_activation
from kernels_pallas.core.slopes import activation

_HIDDEN = "batch", "sequence", "act_ff"


class DenseFeedForward(Module):
    """act(x·W_up)·W_down, or (act(x·W_gate) ⊙ x·W_up)·W_down when gated (arXiv:2002.05202, equation 6)."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        settings: config.DenseFeedForwardConfig = model.feed_forward
        D, F, std = model.d_model, settings.d_ff, model.initializer_std
        self.activation = settings.activation
        self.gate = param(rngs, (D, F), "embed -> feed_forward", normal(std)) if settings.gated else None
        self.up = param(rngs, (D, F), "embed -> feed_forward", normal(std))
        self.down = param(rngs, (F, D), "feed_forward -> embed", normal(std * (2 * model.num_layers) ** -0.5))
        biased = settings.bias
        self.gate_bias = param(rngs, (F,), "feed_forward", zeros) if biased and settings.gated else None
        self.up_bias = param(rngs, (F,), "feed_forward", zeros) if biased else None
        self.down_bias = param(rngs, (D,), "channels", zeros) if biased else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return the layer's output for x, [B, T, D] both."""
        x_BTD = all_gather_sequence(x_BTD)
        up_BTF = checkpoint_name(constrain(linear(x_BTD, self.up, self.up_bias), *_HIDDEN), "up")
        if self.gate is None:
            hidden_BTF = activation(self.activation, up_BTF)
        else:
            gate_BTF = checkpoint_name(constrain(linear(x_BTD, self.gate, self.gate_bias), *_HIDDEN), "gate")
            operands = (gate_BTF, _HIDDEN), (up_BTF, _HIDDEN)
            hidden_BTF = kernels.run(gated_activation, *operands, activation=self.activation)
        return constrain(linear(hidden_BTF, self.down, self.down_bias), "batch", "residual", "act_model")


_FEED_FORWARDS = {"dense": DenseFeedForward}


def feed_forward(model: config.ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return the feed-forward layer that the configuration names."""
    return _FEED_FORWARDS[model.feed_forward.kind](model, rngs)
