"""Mamba-2."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import config
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import gated, kv_heads, linear, repeat_heads
from jaxlm.models.logical_axes import HEAD_STATE, HEADS, KV_HEADS
from jaxlm.models.norms import GroupedRMSNorm
from jaxlm.models.parameters import Module, normal, ones, param, uniform, zeros
from jaxlm.models.recurrences.convolution import short_convolution
from jaxlm.models.recurrences.decay import log_rates, time_biases
from jaxlm.models.recurrences.state_space import state_space
from jaxlm.models.rows import Auxiliary, RowContext


class Mamba2(Module):
    """The state space of Mamba-2 between a short convolution and a gated norm (arXiv:2405.21060, figure 6).

    In the paper's names `query` makes C, `key` B, `value` x, `gate` z and `time` Δ.
    """

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.settings = settings = model.attention
        D, N, G = model.d_model, settings.num_heads, settings.num_groups
        P, S, std, taps = settings.head_dim, settings.state_dim, model.initializer_std, settings.taps
        self.query = param(rngs, (D, G, S), "embed -> kv_heads head_dim", normal(std))
        self.key = param(rngs, (D, G, S), "embed -> kv_heads head_dim", normal(std))
        self.value = param(rngs, (D, N, P), "embed -> heads head_dim", normal(std))
        self.gate = param(rngs, (D, N, P), "embed -> heads head_dim", normal(std))
        self.time = param(rngs, (D, N), "embed -> heads", normal(std))
        self.query_taps = param(rngs, (taps, G, S), "taps kv_heads head_dim", uniform(taps**-0.5))
        self.key_taps = param(rngs, (taps, G, S), "taps kv_heads head_dim", uniform(taps**-0.5))
        self.value_taps = param(rngs, (taps, N, P), "taps heads head_dim", uniform(taps**-0.5))
        has_bias = settings.convolution_bias
        self.query_taps_bias = param(rngs, (G, S), "kv_heads head_dim", zeros) if has_bias else None
        self.key_taps_bias = param(rngs, (G, S), "kv_heads head_dim", zeros) if has_bias else None
        self.value_taps_bias = param(rngs, (N, P), "heads head_dim", zeros) if has_bias else None
        biased = settings.bias
        self.query_bias = param(rngs, (G, S), "kv_heads head_dim", zeros) if biased else None
        self.key_bias = param(rngs, (G, S), "kv_heads head_dim", zeros) if biased else None
        self.value_bias = param(rngs, (N, P), "heads head_dim", zeros) if biased else None
        self.gate_bias = param(rngs, (N, P), "heads head_dim", zeros) if biased else None
        self.output_bias = param(rngs, (D,), "channels", zeros) if biased else None
        self.log_rate = param(rngs, (N,), "heads", log_rates)
        self.time_bias = param(rngs, (N,), "heads", time_biases)
        self.skip = param(rngs, (N,), "heads", ones)
        self.output_norm = GroupedRMSNorm(model, rngs, N, P, G)
        # Residual outputs shrink with depth (GPT-2, section 2.3), so that their sum does not grow.
        self.output = param(rngs, (N, P, D), "heads head_dim -> embed", normal(std * (2 * model.num_layers) ** -0.5))

    def slots(self) -> dict[str, Slot]:
        """Return the state of each head, and the last tokens before their convolution, the copies of `linear` among
        them."""
        settings = self.settings
        N, P, S, before = settings.num_heads, settings.head_dim, settings.state_dim, settings.taps - 1
        shared = Slot((before, kv_heads(settings.num_groups, N), S), (None, *KV_HEADS[2:]), per="sequence")
        return {
            "matrix": Slot((N, S, P), HEAD_STATE, jnp.dtype("float32"), per="sequence"),
            "query": shared,
            "key": shared,
            "value": Slot((before, N, P), (None, *HEADS[2:]), per="sequence"),
        }

    def __call__(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the cache with the states after it."""
        settings, names = self.settings, ("query", "key", "value", "gate")
        N, matrices = settings.num_heads, (self.query, self.key, self.value, self.gate)
        biases = self.query_bias, self.key_bias, self.value_bias, self.gate_bias
        *qkv, gate_BTNP = linear(x_BTD, *matrices, biases=biases, names=names, num_query_heads=N)
        (time_BTN,) = linear(x_BTD, self.time)
        parameters = (
            (self.query_taps, self.query_taps_bias),
            (self.key_taps, self.key_taps_bias),
            (self.value_taps, self.value_taps_bias),
        )
        inputs = []
        for slot, x_BTNH, (taps, bias), axes in zip(names, qkv, parameters, (KV_HEADS, KV_HEADS, HEADS), strict=False):
            copies = x_BTNH.shape[2] // taps[...].shape[1]
            weights = repeat_heads(taps, 1, copies), (None, *axes[2:])
            added = None if bias is None else (repeat_heads(bias, 0, copies), axes[2:])
            y_BTNH, cache = cache.scan(rows, short_convolution(weights, added, slot, x_BTNH.dtype), (x_BTNH, axes))
            inputs.append((y_BTNH, axes))
        rate_N, bias_N = (x[...].astype(jnp.float32)[None, None] for x in (self.log_rate, self.time_bias))
        time_BTN = jax.nn.softplus(time_BTN.astype(jnp.float32) + bias_N)
        if settings.time_limits is not None:
            time_BTN = jnp.clip(time_BTN, *settings.time_limits)
        inputs += [(-jnp.exp(rate_N) * time_BTN, HEADS[:3]), (time_BTN, HEADS[:3])]
        skip = self.skip[...], HEADS[2:3]
        y_BTNP, cache = cache.scan(rows, state_space(N, settings.state_dim, settings.head_dim, skip), *inputs)
        if settings.gate == "before_norm":
            y_BTNP = self.output_norm(gated("silu", gate_BTNP, y_BTNP, HEADS))
        else:
            y_BTNP = gated("silu", gate_BTNP, self.output_norm(y_BTNP), HEADS)
        (output_BTD,) = linear(y_BTNP, self.output, biases=(self.output_bias,))
        return output_BTD, cache, Auxiliary()
