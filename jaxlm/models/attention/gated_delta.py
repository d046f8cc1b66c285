"""Gated DeltaNet."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import config
from jaxlm.models.attention.recurrent_heads import (
    NAMES,
    convolution_taps,
    convolved,
    decay_parameters,
    projections,
    rates_and_times,
)
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import gated, linear
from jaxlm.models.logical_axes import HEAD_STATE, HEADS
from jaxlm.models.norms import plain_rms_norm
from jaxlm.models.parameters import Module, normal, param
from jaxlm.models.recurrences.delta_rule import gated_delta_rule
from jaxlm.models.rows import Auxiliary, RowContext


class GatedDelta(Module):
    """The gated delta rule between a short convolution and a gated norm (arXiv:2412.06464, figure 1; Qwen3-Next)."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.settings = settings = model.attention
        D, V, std = model.d_model, settings.value_dim, model.initializer_std
        N = settings.num_value_heads
        shared, own = (settings.num_key_heads, settings.key_dim, "heads"), (N, V, "heads")
        self.query, self.key, self.value, self.gate = projections(rngs, D, shared, own, std)
        self.beta = param(rngs, (D, N), "embed -> heads", normal(std))
        self.time = param(rngs, (D, N), "embed -> heads", normal(std))
        self.query_taps, self.key_taps, self.value_taps = convolution_taps(rngs, settings.taps, shared, own)
        self.log_rate, self.time_bias = decay_parameters(rngs, N)
        self.output_norm = plain_rms_norm(model, rngs, (V,), "head_dim")
        # Residual outputs shrink with depth (GPT-2, section 2.3), so that their sum does not grow.
        self.output = param(rngs, (N, V, D), "heads head_dim -> embed", normal(std * (2 * model.num_layers) ** -0.5))

    def slots(self) -> dict[str, Slot]:
        """Return the state of each head, and the last tokens' queries, keys and values before their convolution."""
        settings = self.settings
        N, H, V = settings.num_value_heads, settings.key_dim, settings.value_dim
        of_keys = Slot((settings.taps - 1, settings.num_key_heads, H), (None, *HEADS[2:]), per="sequence")
        return {
            "matrix": Slot((N, H, V), HEAD_STATE, jnp.dtype("float32"), per="sequence"),
            "query": of_keys,
            "key": of_keys,
            "value": of_keys._replace(shape=(settings.taps - 1, N, V)),
        }

    def __call__(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the cache with the states after it."""
        settings = self.settings
        *qkv, gate_BTNV = linear(x_BTD, self.query, self.key, self.value, self.gate, names=NAMES)
        beta_BTN, time_BTN = linear(x_BTD, self.beta, self.time)
        taps = self.query_taps, self.key_taps, self.value_taps
        inputs, cache = convolved(cache, rows, taps, (None,) * 3, tuple((x_BTNH, HEADS) for x_BTNH in qkv))
        rate_N, time_BTN = rates_and_times(self.log_rate, self.time_bias, time_BTN)
        inputs += [(rate_N * time_BTN, HEADS[:3]), (jax.nn.sigmoid(beta_BTN.astype(jnp.float32)), HEADS[:3])]
        rule = gated_delta_rule(settings.num_value_heads, settings.key_dim, settings.value_dim)
        y_BTNV, cache = cache.scan(rows, rule, *inputs)
        y_BTNV = gated("silu", gate_BTNV, self.output_norm(y_BTNV, HEADS), HEADS)
        (output_BTD,) = linear(y_BTNV, self.output)
        return output_BTD, cache, Auxiliary()
