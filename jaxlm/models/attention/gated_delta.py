"""Gated DeltaNet."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import config
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import gated, linear
from jaxlm.models.logical_axes import HEAD_STATE, HEADS
from jaxlm.models.norms import plain_rms_norm
from jaxlm.models.parameters import Module, normal, param, uniform
from jaxlm.models.recurrences.convolution import short_convolution
from jaxlm.models.recurrences.decay import log_rates, time_biases
from jaxlm.models.recurrences.delta_rule import gated_delta_rule
from jaxlm.models.rows import Auxiliary, RowContext


class GatedDelta(Module):
    """The gated delta rule between a short convolution and a gated norm (arXiv:2412.06464, figure 1; Qwen3-Next)."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.settings = settings = model.attention
        D, K, N = model.d_model, settings.num_key_heads, settings.num_value_heads
        H, V, std, taps = settings.key_dim, settings.value_dim, model.initializer_std, settings.taps
        self.query = param(rngs, (D, K, H), "embed -> heads head_dim", normal(std))
        self.key = param(rngs, (D, K, H), "embed -> heads head_dim", normal(std))
        self.value = param(rngs, (D, N, V), "embed -> heads head_dim", normal(std))
        self.gate = param(rngs, (D, N, V), "embed -> heads head_dim", normal(std))
        self.beta = param(rngs, (D, N), "embed -> heads", normal(std))
        self.time = param(rngs, (D, N), "embed -> heads", normal(std))
        self.query_taps = param(rngs, (taps, K, H), "taps heads head_dim", uniform(taps**-0.5))
        self.key_taps = param(rngs, (taps, K, H), "taps heads head_dim", uniform(taps**-0.5))
        self.value_taps = param(rngs, (taps, N, V), "taps heads head_dim", uniform(taps**-0.5))
        self.log_rate = param(rngs, (N,), "heads", log_rates)
        self.time_bias = param(rngs, (N,), "heads", time_biases)
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
        matrices, names = (self.query, self.key, self.value, self.gate), ("query", "key", "value", "gate")
        *qkv, gate_BTNV = linear(x_BTD, *matrices, names=names)
        beta_BTN, time_BTN = linear(x_BTD, self.beta, self.time)
        inputs = []
        for slot, x_BTNH, taps in zip(names, qkv, (self.query_taps, self.key_taps, self.value_taps), strict=False):
            convolution = short_convolution((taps[...], (None, *HEADS[2:])), None, slot, x_BTNH.dtype)
            y_BTNH, cache = cache.scan(rows, convolution, (x_BTNH, HEADS))
            inputs.append((y_BTNH, HEADS))
        rate_N, bias_N = (x[...].astype(jnp.float32)[None, None] for x in (self.log_rate, self.time_bias))
        decay_BTN = -jnp.exp(rate_N) * jax.nn.softplus(time_BTN.astype(jnp.float32) + bias_N)
        inputs += [(decay_BTN, HEADS[:3]), (jax.nn.sigmoid(beta_BTN.astype(jnp.float32)), HEADS[:3])]
        rule = gated_delta_rule(settings.num_value_heads, settings.key_dim, settings.value_dim)
        y_BTNV, cache = cache.scan(rows, rule, *inputs)
        y_BTNV = gated("silu", gate_BTNV, self.output_norm(y_BTNV, HEADS), HEADS)
        (output_BTD,) = linear(y_BTNV, self.output)
        return output_BTD, cache, Auxiliary()
