"""The gated short convolution."""

import jax
from flax import nnx

from jaxlm.models import config
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import linear
from jaxlm.models.logical_axes import HIDDEN
from jaxlm.models.parameters import Module, normal, param, uniform, zeros
from jaxlm.models.recurrences.convolution import short_convolution
from jaxlm.models.rows import Auxiliary, RowContext


class ShortConvolution(Module):
    """(gate ⊙ convolution(input_gate ⊙ value))·W_o of three products of x (LFM2, arXiv:2511.23404, section 2)."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.settings, self.channels = model.attention, model.d_model
        settings = self.settings
        D, std, taps, biased = model.d_model, model.initializer_std, settings.taps, settings.bias
        self.value = param(rngs, (D, D), "embed -> feed_forward", normal(std))
        self.input_gate = param(rngs, (D, D), "embed -> feed_forward", normal(std))
        self.gate = param(rngs, (D, D), "embed -> feed_forward", normal(std))
        self.taps = param(rngs, (taps, D), "taps feed_forward", uniform(taps**-0.5))
        # Residual outputs shrink with depth (GPT-2, section 2.3), so that their sum does not grow.
        self.output = param(rngs, (D, D), "feed_forward -> embed", normal(std * (2 * model.num_layers) ** -0.5))
        self.value_bias = param(rngs, (D,), "feed_forward", zeros) if biased else None
        self.input_gate_bias = param(rngs, (D,), "feed_forward", zeros) if biased else None
        self.gate_bias = param(rngs, (D,), "feed_forward", zeros) if biased else None
        self.taps_bias = param(rngs, (D,), "feed_forward", zeros) if biased else None
        self.output_bias = param(rngs, (D,), "channels", zeros) if biased else None

    def slots(self) -> dict[str, Slot]:
        """Return the last tokens' inputs of the convolution."""
        return {"tail": Slot((self.settings.taps - 1, self.channels), (None, *HIDDEN[2:]), per="sequence")}

    def __call__(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the cache with the tokens after it."""
        matrices, biases = (
            (self.value, self.input_gate, self.gate),
            (self.value_bias, self.input_gate_bias, self.gate_bias),
        )
        names = ("value", "input_gate", "gate")
        value_BTF, input_gate_BTF, gate_BTF = linear(x_BTD, *matrices, biases=biases, names=names)
        bias = None if self.taps_bias is None else (self.taps_bias[...], HIDDEN[2:])
        weights = self.taps[...], (None, *HIDDEN[2:])
        convolution = short_convolution(weights, bias, "tail", value_BTF.dtype, activation="linear")
        y_BTF, cache = cache.scan(rows, convolution, (input_gate_BTF * value_BTF, HIDDEN))
        (output_BTD,) = linear(gate_BTF * y_BTF, self.output, biases=(self.output_bias,))
        return output_BTD, cache, Auxiliary()
