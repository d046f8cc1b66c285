"""Attention layers."""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import config, kernels
from jaxlm.models.layers import all_gather_sequence, linear, norm
from jaxlm.models.parameters import Module, normal, param, zeros
from jaxlm.models.positions import RopeTable, apply_rope
from jaxlm.parallel.partition import constrain, shards_of
from kernels_pallas import flash_attention
from kernels_pallas.flash_attention import KeyRange

_HEADS = "batch", "sequence", "act_heads", "act_head_dim"
_KV_HEADS = "batch", "sequence", "act_kv_heads", "act_head_dim"


def _attend(
    query_BTNH: jax.Array, key_BSKH: jax.Array, value_BSKH: jax.Array, key_range: KeyRange, **options: Any
) -> jax.Array:
    """Return `flash_attention` [B, T, N, H] of these arrays, with its `is_causal`, `scale` and `soft_cap`."""

    def operation(query: Any, key: Any, value: Any, start: Any, end: Any, **options: Any) -> Any:
        return flash_attention(query, key, value, key_range=(start, end), **options)

    rows = _HEADS[:2]
    arrays = (query_BTNH, _HEADS), (key_BSKH, _KV_HEADS), (value_BSKH, _KV_HEADS)
    return kernels.run(operation, *arrays, (key_range.start, rows), (key_range.end, rows), **options)


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
        self.query_norm = norm(model, H, rngs, axis="head_dim") if settings.qk_norm else None
        self.key_norm = norm(model, H, rngs, axis="head_dim") if settings.qk_norm else None

    def __call__(
        self, x_BTD: jax.Array, key_range: KeyRange, rope: RopeTable | None, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        """Return the layer's output for x, [B, T, D] both, and the cache with its keys and values appended."""
        x_BTD = all_gather_sequence(x_BTD)
        query_BTNH = linear(x_BTD, self.query, self.query_bias)
        copies = self.settings.kv_copies(shards_of("act_heads", self.settings.num_heads))
        key_BTKH = linear(x_BTD, self.key, self.key_bias, copies)
        value_BTKH = linear(x_BTD, self.value, self.value_bias, copies)
        if self.query_norm is not None and self.key_norm is not None:
            query_BTNH = self.query_norm(query_BTNH, _HEADS)
            key_BTKH = self.key_norm(key_BTKH, _KV_HEADS)
        if rope is not None:
            query_BTNH = apply_rope(query_BTNH, _HEADS, rope)
            key_BTKH = apply_rope(key_BTKH, _KV_HEADS, rope)

        query_BTNH = checkpoint_name(constrain(query_BTNH, *_HEADS), "query")
        key_BSKH = checkpoint_name(constrain(key_BTKH, *_KV_HEADS), "key")
        value_BSKH = checkpoint_name(constrain(value_BTKH, *_KV_HEADS), "value")
        # A cache is longer than the keys that are written to it.
        options = {"is_causal": cache is None, "scale": self.settings.scale, "soft_cap": self.settings.soft_cap}
        if cache is not None:
            cache, key_BSKH, value_BSKH = cache.extend(key_BSKH, value_BSKH)
        attended_BTNH = _attend(query_BTNH, key_BSKH, value_BSKH, key_range, **options)
        attended_BTNH = constrain(attended_BTNH, *_HEADS)

        output_BTD = linear(attended_BTNH, self.output, self.output_bias)
        return constrain(output_BTD, "batch", "residual", "act_model"), cache


_ATTENTIONS = {"gqa": GroupedQueryAttention}


def attention(model: config.ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return the attention layer that the configuration names."""
    return _ATTENTIONS[model.attention.kind](model, rngs)
