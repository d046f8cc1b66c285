"""Mamba-2."""

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
from jaxlm.models.doors import gated, kv_heads, linear
from jaxlm.models.logical_axes import HEAD_STATE, HEADS, KV_HEADS
from jaxlm.models.norms import GroupedRMSNorm
from jaxlm.models.parameters import Module, normal, ones, param, zeros
from jaxlm.models.recurrences.state_space import state_space
from jaxlm.models.rows import Auxiliary, RowContext


class Mamba2(Module):
    """The state space of Mamba-2 between a short convolution and a gated norm (arXiv:2405.21060, figure 6).

    In the paper's names `query` makes C, `key` B, `value` x, `gate` z and `time` Δ.
    """

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.settings = settings = model.attention
        D, N, G = model.d_model, settings.num_heads, settings.num_groups
        P, S, std = settings.head_dim, settings.state_dim, model.initializer_std
        shared, own = (G, S, "kv_heads"), (N, P, "heads")
        self.query, self.key, self.value, self.gate = projections(rngs, D, shared, own, std)
        self.time = param(rngs, (D, N), "embed -> heads", normal(std))
        self.query_taps, self.key_taps, self.value_taps = convolution_taps(rngs, settings.taps, shared, own)
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
        self.log_rate, self.time_bias = decay_parameters(rngs, N)
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
        settings, N = self.settings, self.settings.num_heads
        matrices = self.query, self.key, self.value, self.gate
        biases = self.query_bias, self.key_bias, self.value_bias, self.gate_bias
        *qkv, gate_BTNP = linear(x_BTD, *matrices, biases=biases, names=NAMES, num_query_heads=N)
        (time_BTN,) = linear(x_BTD, self.time)
        taps = self.query_taps, self.key_taps, self.value_taps
        biases = self.query_taps_bias, self.key_taps_bias, self.value_taps_bias
        before = tuple(zip(qkv, (KV_HEADS, KV_HEADS, HEADS), strict=True))
        inputs, cache = convolved(cache, rows, taps, biases, before)
        rate_N, time_BTN = rates_and_times(self.log_rate, self.time_bias, time_BTN)
        if settings.time_limits is not None:
            time_BTN = jnp.clip(time_BTN, *settings.time_limits)
        inputs += [(rate_N * time_BTN, HEADS[:3]), (time_BTN, HEADS[:3])]
        skip = self.skip[...], HEADS[2:3]
        y_BTNP, cache = cache.scan(rows, state_space(N, settings.state_dim, settings.head_dim, skip), *inputs)
        if settings.gate == "before_norm":
            y_BTNP = self.output_norm(gated("silu", gate_BTNP, y_BTNP, HEADS))
        else:
            y_BTNP = gated("silu", gate_BTNP, self.output_norm(y_BTNP), HEADS)
        (output_BTD,) = linear(y_BTNP, self.output, biases=(self.output_bias,))
        return output_BTD, cache, Auxiliary()
