"""Grouped-query attention."""

import jax
from flax import nnx

from jaxlm.models import config
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import attention, kv_heads, linear, named_heads, rope
from jaxlm.models.logical_axes import HEADS, KV_HEADS
from jaxlm.models.norms import NoNorm, Norm, norm
from jaxlm.models.parameters import Module, normal, param, zeros
from jaxlm.models.rows import Auxiliary, RowContext


class GroupedQueryAttention(Module):
    """Multi-head attention whose key/value heads are shared by groups of query heads (arXiv:2305.13245)."""

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.settings = settings = model.attention
        D, N, K, H = model.d_model, settings.num_heads, settings.num_kv_heads, settings.head_dim
        std = model.initializer_std
        self.query = param(rngs, (D, N, H), "embed -> heads head_dim", normal(std))
        self.key = param(rngs, (D, K, H), "embed -> kv_heads head_dim", normal(std))
        self.value = param(rngs, (D, K, H), "embed -> kv_heads head_dim", normal(std))
        # Residual outputs shrink with depth (GPT-2, section 2.3), so that their sum does not grow.
        self.output = param(rngs, (N, H, D), "heads head_dim -> embed", normal(std * (2 * model.num_layers) ** -0.5))
        biased = settings.qkv_bias
        self.query_bias = param(rngs, (N, H), "heads head_dim", zeros) if biased else None
        self.key_bias = param(rngs, (K, H), "kv_heads head_dim", zeros) if biased else None
        self.value_bias = param(rngs, (K, H), "kv_heads head_dim", zeros) if biased else None
        self.output_bias = param(rngs, (D,), "channels", zeros) if settings.output_bias else None
        self.sinks = param(rngs, (N,), "heads", normal(std)) if settings.sinks else None
        has_gate = settings.output_gate == "sigmoid"
        self.gate = param(rngs, (D, N, H), "embed -> heads head_dim", normal(std)) if has_gate else None
        self.query_norm = self._norm(model, (N, H), "heads head_dim", rngs)
        self.key_norm = self._norm(model, (K, H), "kv_heads head_dim", rngs)

    def _norm(self, model: config.ModelConfig, shape: tuple[int, ...], axes: str, rngs: nnx.Rngs) -> Norm:
        """Return the norm of all heads, of each head, or none."""
        match self.settings.qk_norm:
            case "projection":
                return norm(model, rngs, shape, axes)
            case "head" | "head_after_rope":
                return norm(model, rngs, shape[1:], "head_dim")
            case _:
                return NoNorm()

    def slots(self) -> dict[str, Slot]:
        """Return its keys and values, the copies of `linear` among them."""
        heads = kv_heads(self.settings.num_kv_heads, self.settings.num_heads)
        slot = Slot((heads, self.settings.head_dim), KV_HEADS[2:], window=self.settings.window)
        return {"key": slot._replace(tokens_last=True), "value": slot}

    def __call__(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the cache with its keys and values appended."""
        matrices, biases = [self.query, self.key, self.value], [self.query_bias, self.key_bias, self.value_bias]
        if self.gate is not None:
            matrices, biases = [*matrices, self.gate], [*biases, None]
        query_BTNH, key_BTKH, value_BTKH, *gate_BTNH = linear(
            x_BTD, *matrices, biases=biases, num_query_heads=self.settings.num_heads
        )
        after = self.settings.qk_norm == "head_after_rope"
        if not after:
            query_BTNH, key_BTKH = self.query_norm(query_BTNH, HEADS), self.key_norm(key_BTKH, KV_HEADS)
        query_BTNH, key_BTKH = rope(query_BTNH, HEADS, rows.rope), rope(key_BTKH, KV_HEADS, rows.rope)
        if after:
            query_BTNH, key_BTKH = self.query_norm(query_BTNH, HEADS), self.key_norm(key_BTKH, KV_HEADS)
        query_BTNH, key_BTKH, value_BTKH = named_heads(query_BTNH, key_BTKH, value_BTKH)
        cache = cache.update(rows, key=key_BTKH, value=value_BTKH)
        settings = self.settings
        attended_BTNH = attention(
            query_BTNH,
            cache.view(),
            self.sinks,
            scale=settings.scale,
            soft_cap=settings.soft_cap,
            window=settings.window,
            reach=rows.reach.keys,
        )
        if gate_BTNH:
            attended_BTNH *= jax.nn.sigmoid(gate_BTNH[0])
        (output_BTD,) = linear(attended_BTNH, self.output, biases=(self.output_bias,))
        return output_BTD, cache, Auxiliary()
