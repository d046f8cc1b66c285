"""The key/value cache: what a decoder keeps of the tokens it has seen."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh, NamedSharding

from jaxlm.models.config import ModelConfig
from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.partition import constrain, named_sharding, replicated, shards_of
from jaxlm.parallel.rules import DECODE

_AXES = ("layers", "batch", "act_kv_heads", "sequence", "act_head_dim")


@partial(jax.tree_util.register_dataclass, data_fields=["key", "value", "length", "layer"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values [L, B, K, S, H] of up to S tokens per sequence, each head's together, as attention reads them.

    K is `kv_heads_over` the shards of the query heads: key/value heads that these do not divide are kept as copies,
    each where it is read, and a cache belongs to its mesh.

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
        layer = (jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (key, value))
        return extended, *(rearrange(x_BKSH, "B K S H -> B S K H") for x_BKSH in layer)

    def hold(self, length: jax.Array) -> "Cache":
        """The cache after a forward pass, each sequence holding `length` [B] tokens."""
        return dataclasses.replace(self, length=length, layer=jnp.zeros((), jnp.int32))


def _write(stored: jax.Array, new_BTKH: jax.Array, layer: jax.Array, at_B: jax.Array) -> jax.Array:
    """[B, T, K, H] into [L, B, K, S, H], where each device has what it writes; no other layer is touched or copied."""
    new_BKTH = rearrange(new_BTKH, "B T K H -> B K T H")
    return on_each_device(_write_part, (stored, _AXES), (new_BKTH, _AXES[1:]), (layer, ()), (at_B, ("batch",)))


def _write_part(stored: jax.Array, new_BKTH: jax.Array, layer: jax.Array, at_B: jax.Array) -> jax.Array:
    """One scatter of B windows [K, T, H]."""
    row_B = jnp.arange(len(at_B), dtype=at_B.dtype)
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 3)
    )
    where = jnp.stack([jnp.broadcast_to(layer, at_B.shape), row_B, at_B], axis=1)
    return jax.lax.scatter(stored, where, new_BKTH, windows, indices_are_sorted=True, unique_indices=True, mode="clip")


def empty_cache(model: ModelConfig, batch: int, size: int, dtype: jnp.dtype) -> Cache:
    """Room for `size` tokens of each of `batch` sequences, on the mesh around this."""
    shape = _shape(model, batch, size, shards_of("act_heads", model.attention.num_heads))
    zeros = constrain(jnp.zeros(shape, dtype), *_AXES)
    return Cache(zeros, zeros, jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32))


def cache_shardings(model: ModelConfig, batch: int, size: int, mesh: Mesh) -> Cache:
    """Return the shardings of a cache: sequences over the batch axes, key/value heads over `tensor`."""
    shards = DECODE.shards("act_heads", model.attention.num_heads, mesh.shape)
    large: NamedSharding = named_sharding(_AXES, _shape(model, batch, size, shards), mesh, DECODE)
    small = replicated(mesh)
    return Cache(large, large, named_sharding(("batch",), (batch,), mesh, DECODE), small)


def _shape(model: ModelConfig, batch: int, size: int, tensor: int) -> tuple[int, ...]:
    return model.num_layers, batch, model.attention.kv_heads_over(tensor), size, model.attention.head_dim
