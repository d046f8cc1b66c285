"""Attention: how tokens read from one another.

`dot_product_attention` is what XLA runs where no kernel does, and what `jaxlm.costs` counts: laid out for its products,
on a CPU in parts. The reference in `kernels_pallas` says what its kernels compute, and they can more.
"""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import causal, config, kernels
from jaxlm.models.layers import linear, norm, product_in_float32, soft_capped, whole_sequence
from jaxlm.models.parameters import Module, normal, param, zeros
from jaxlm.models.positions import Rotation, rotate
from jaxlm.parallel.partition import constrain, shards_of
from kernels_pallas import flash_attention
from kernels_pallas.flash_attention import KeyRange

_HEADS = "batch", "sequence", "act_heads", "act_head_dim"
_KV_HEADS = "batch", "sequence", "act_kv_heads", "act_head_dim"


def dot_product_attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    key_range: KeyRange,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """softmax(q·kᵀ / √H) · v over the keys in range (Vaswani et al. 2017, equation 1) → [B, T, N, H].

    `key_range` is one interval per query. N is a multiple of K; query heads n·G … n·G + G − 1 share key/value head n.
    `scale` stands for 1 / √H, and a `soft_cap` keeps scores between −cap and cap. Scores and softmax are float32. A
    query that sees nothing gives zeros.
    """
    kv_heads, queries = key_BSKH.shape[2], query_BTNH.shape[1]
    query = rearrange(query_BTNH, "B T (K G) H -> B K (G T) H", K=kv_heads)
    key, value = (rearrange(x, "B S K H -> B K S H") for x in (key_BSKH, value_BSKH))
    scores = product_in_float32("BKQH,BKSH->BKQS", query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_capped(scores, soft_cap)
    scores = rearrange(scores, "B K (G T) S -> B K G T S", T=queries)

    index_S = jnp.arange(key_BSKH.shape[1])[None, None]
    seen_BTS = (key_range.start[..., None] <= index_S) & (index_S < key_range.end[..., None])
    # The largest negative finite number, not −∞: a row that sees nothing must not become NaN.
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)

    # The division follows the mixture, as in FlashAttention (arXiv:2205.14135): it has H numbers per row, not S.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.where(jnp.any(seen_BTS, axis=-1)[:, None, None], jnp.sum(weights, axis=-1), jnp.inf)
    weights = rearrange(weights, "B K G T S -> B K (G T) S").astype(value.dtype)
    mixed = product_in_float32("BKQS,BKSH->BKQH", weights, value)
    mixed = rearrange(mixed, "B K (G T) H -> B K G T H", T=queries) / total[..., None]
    return rearrange(mixed, "B K G T H -> B T (K G) H").astype(query_BTNH.dtype)


def in_causal_parts(
    query_BTNH: jax.Array, key_BTKH: jax.Array, value_BTKH: jax.Array, key_range: KeyRange, **how: Any
) -> jax.Array:
    """`dot_product_attention` of as many keys as queries, where query t sees no key behind t → [B, T, N, H].

    A part of the queries computes no scores of the keys behind its last one (`jaxlm.models.causal`).
    """

    def part(first: int, end: int) -> jax.Array:
        intervals = KeyRange(*(x[:, first:end] for x in key_range))
        query_BCNH, seen = query_BTNH[:, first:end], (key_BTKH[:, :end], value_BTKH[:, :end])
        return dot_product_attention(query_BCNH, *seen, intervals, **how)

    return jnp.concatenate([part(*bounds) for bounds in causal.parts(query_BTNH.shape[1])], axis=1)


def attend(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    key_range: KeyRange,
    is_causal: bool = False,
    **how: Any,
) -> jax.Array:
    """`dot_product_attention`, by the kernel that never holds its scores where kernels serve.

    `is_causal`: keys are as many as queries, and query t sees none behind t. `how` are its `scale` and `soft_cap`.
    """
    if not kernels.kernels_run_here():
        attention = in_causal_parts if is_causal and kernels.on_cpu() else dot_product_attention
        # `flash_attention` gives its result this name itself.
        return checkpoint_name(attention(query_BTNH, key_BSKH, value_BSKH, key_range, **how), "attention")

    def operation(query: Any, key: Any, value: Any, start: Any, end: Any, **how: Any) -> Any:
        return flash_attention(query, key, value, key_range=(start, end), **how)

    rows = _HEADS[:2]
    arrays = (query_BTNH, _HEADS), (key_BSKH, _KV_HEADS), (value_BSKH, _KV_HEADS)
    return kernels.run(operation, *arrays, (key_range.start, rows), (key_range.end, rows), **how)


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
        self, x_BTD: jax.Array, key_range: KeyRange, turn: Rotation | None, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        """x [B, T, D] → [B, T, D], and the cache with this layer's keys and values written to it."""
        x_BTD = whole_sequence(x_BTD)
        query_BTNH = linear(x_BTD, self.query, self.query_bias)
        copies = self.settings.kv_copies(shards_of("act_heads", self.settings.num_heads))
        key_BTKH = linear(x_BTD, self.key, self.key_bias, copies)
        value_BTKH = linear(x_BTD, self.value, self.value_bias, copies)
        if self.query_norm is not None and self.key_norm is not None:
            query_BTNH = self.query_norm(query_BTNH, _HEADS)
            key_BTKH = self.key_norm(key_BTKH, _KV_HEADS)
        if turn is not None:
            query_BTNH = rotate(query_BTNH, _HEADS, turn)
            key_BTKH = rotate(key_BTKH, _KV_HEADS, turn)

        query_BTNH = checkpoint_name(constrain(query_BTNH, *_HEADS), "query")
        key_BSKH = checkpoint_name(constrain(key_BTKH, *_KV_HEADS), "key")
        value_BSKH = checkpoint_name(constrain(value_BTKH, *_KV_HEADS), "value")
        # A cache is longer than what it was given.
        how = {"is_causal": cache is None, "scale": self.settings.scale, "soft_cap": self.settings.soft_cap}
        if cache is not None:
            cache, key_BSKH, value_BSKH = cache.extend(key_BSKH, value_BSKH)
        mixed_BTNH = attend(query_BTNH, key_BSKH, value_BSKH, key_range, **how)
        mixed_BTNH = constrain(mixed_BTNH, *_HEADS)

        output_BTD = linear(mixed_BTNH, self.output, self.output_bias)
        return constrain(output_BTD, "batch", "residual", "act_model"), cache


_ATTENTIONS = {"gqa": GroupedQueryAttention}


def attention(model: config.ModelConfig, rngs: nnx.Rngs) -> Module:
    """The attention that the configuration names."""
    return _ATTENTIONS[model.attention.kind](model, rngs)
