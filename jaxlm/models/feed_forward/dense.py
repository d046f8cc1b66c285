"""The dense feed-forward layer."""

import jax
from flax import nnx

from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import activation, gated, linear
from jaxlm.models.feed_forward_config import DenseFeedForwardConfig
from jaxlm.models.parameters import Module, normal, param, zeros
from jaxlm.models.rows import Auxiliary, RowContext


class DenseFeedForward(Module):
    """act(x·W_up)·W_down, or (act(x·W_gate) ⊙ x·W_up)·W_down when gated (arXiv:2002.05202, equation 6)."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        settings: DenseFeedForwardConfig = model.feed_forward
        D, F, std = model.d_model, settings.d_ff, model.initializer_std
        self.activation = settings.activation
        self.gate = param(rngs, (D, F), "embed -> feed_forward", normal(std)) if settings.gated else None
        self.up = param(rngs, (D, F), "embed -> feed_forward", normal(std))
        self.down = param(rngs, (F, D), "feed_forward -> embed", normal(std * (2 * model.num_layers) ** -0.5))
        biased = settings.bias
        self.gate_bias = param(rngs, (F,), "feed_forward", zeros) if biased and settings.gated else None
        self.up_bias = param(rngs, (F,), "feed_forward", zeros) if biased else None
        self.down_bias = param(rngs, (D,), "channels", zeros) if biased else None

    def __call__(self, x_BTD: jax.Array, rows: RowContext) -> tuple[jax.Array, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both."""
        if self.gate is None:
            (up_BTF,) = linear(x_BTD, self.up, names=("up",))
            hidden_BTF = activation(self.activation, up_BTF, self.up_bias)
        else:
            biases, names = (self.up_bias, self.gate_bias), ("up", "gate")
            up_BTF, gate_BTF = linear(x_BTD, self.up, self.gate, biases=biases, names=names)
            hidden_BTF = gated(self.activation, gate_BTF, up_BTF)
        (output_BTD,) = linear(hidden_BTF, self.down, biases=(self.down_bias,))
        return output_BTD, Auxiliary()
