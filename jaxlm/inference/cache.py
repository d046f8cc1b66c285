"""The key/value cache: what a decoder keeps of the tokens it has seen."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxlm import sharding
from jaxlm.models.config import ModelConfig

_AXES = ("layers", "batch", "sequence", "act_kv_heads", "act_head_width")


@partial(jax.tree_util.register_dataclass, data_fields=["key", "value", "length", "layer"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values [L, B, S, K, H] of up to S tokens per sequence.

    `length` int32 [B]: tokens each sequence holds, in the slots 0 … length − 1. `layer` int32: the layer that
    `extend` writes next; 0 between forward passes.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array
    layer: jax.Array

    def extend(self, key_BTKH: jax.Array, value_BTKH: jax.Array) -> tuple["Cache", jax.Array, jax.Array]:
        """Write T new tokens of the current layer behind each sequence's `length`.

        Returns the cache at the next layer, and all keys and values [B, S, K, H] of this one.
        """
        key, value = (
            _write(stored, new.astype(stored.dtype), self.layer, self.length)
            for stored, new in ((self.key, key_BTKH), (self.value, value_BTKH))
        )
        extended = dataclasses.replace(self, key=key, value=value, layer=self.layer + 1)
        return extended, *(jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (key, value))

    def hold(self, length: jax.Array) -> "Cache":
        """The cache after a forward pass, each sequence holding `length` [B] tokens."""
        return dataclasses.replace(self, length=length, layer=jnp.zeros((), jnp.int32))


def _write(stored: jax.Array, new: jax.Array, layer: jax.Array, at: jax.Array) -> jax.Array:
    """One scatter of [B, T, K, H] into [L, B, S, K, H]; no other layer is touched or copied."""

    def row(stored_LSKH: jax.Array, new_TKH: jax.Array, start: jax.Array) -> jax.Array:
        zero = jnp.zeros((), jnp.int32)
        return jax.lax.dynamic_update_slice(stored_LSKH, new_TKH[None], (layer, start, zero, zero))

    return jax.vmap(row, in_axes=(1, 0, 0), out_axes=1)(stored, new, at)


def empty_cache(model: ModelConfig, batch: int, size: int, dtype: jnp.dtype) -> Cache:
    """Room for `size` tokens of each of `batch` sequences."""
    attention = model.attention
    shape = (model.layers, batch, size, attention.kv_heads, attention.head_width)
    zeros = sharding.constrain(jnp.zeros(shape, dtype), *_AXES)
    return Cache(zeros, zeros, jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32))


def cache_shardings(model: ModelConfig, batch: int, size: int, mesh: Mesh) -> Cache:
    """How a cache lies on a mesh: sequences over the batch axes, key/value heads over `tensor`."""
    attention = model.attention
    shape = (model.layers, batch, size, attention.kv_heads, attention.head_width)
    large: NamedSharding = sharding.sharding(_AXES, shape, mesh)
    small = sharding.replicated(mesh)
    return Cache(large, large, sharding.sharding(("batch",), (batch,), mesh), small)
