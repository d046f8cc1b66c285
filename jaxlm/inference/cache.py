"""The dense cache: room for what each layer keeps of the tokens that a decoder has read."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.sharding import Mesh

from jaxlm.models.cache import CacheEntry, LayerCache, Slot
from jaxlm.models.config import ModelConfig
from jaxlm.models.operations import CacheView
from jaxlm.models.recording import Axes
from jaxlm.models.rows import RowContext
from jaxlm.models.tree import abstract
from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.partition import constrain, named_sharding, using_rules
from jaxlm.parallel.rules import DECODE
from kernels_pallas.flash_attention import KeyRange


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["slot"])
@dataclasses.dataclass(frozen=True)
class Stored:
    """A slot of all layers of a stack.

    Per token it is [L, B, …, S, H], where an entry is [..., H]: each head's tokens together, as attention reads them.
    Per sequence it is [L, B, *shape].
    """

    array: jax.Array
    slot: Slot

    @property
    def axes(self) -> Axes:
        """The logical axes of the array."""
        axes = self.slot.axes
        if self.slot.per == "token":
            axes = *axes[:-1], "sequence", axes[-1]
        return "layers", "batch", *axes

    @property
    def size(self) -> int:
        """The tokens of each sequence that it has room for."""
        return self.array.shape[-2]

    @property
    def is_ring(self) -> bool:
        """Return whether it has room for a window alone: the token at position p lies at index p modulo its size."""
        return self.slot.per == "token" and self.size == self.slot.window

    def write(self, new: jax.Array, layer: jax.Array, at_B: jax.Array) -> "Stored":
        """Write T tokens [B, T, *shape] of a layer at these indices, or [B, *shape] of the sequences.

        Each device has what it writes; no other layer is touched or copied.
        """
        new = new.astype(self.array.dtype)
        if self.slot.per == "sequence":
            array = jax.lax.dynamic_update_index_in_dim(self.array, new, layer, 0)
        else:
            new = rearrange(new, "B T ... H -> B ... T H")
            operands = (self.array, self.axes), (new, self.axes[1:]), (layer, ()), (at_B, ("batch",))
            array = on_each_device(_scatter, *operands)
        return dataclasses.replace(self, array=array)

    def last(self, new: jax.Array, tokens_B: jax.Array) -> jax.Array:
        """Return the last `size` of the first `tokens_B` of T tokens [B, T, *shape], at their indices in a ring."""
        axes = ("batch", "sequence", *self.slot.axes)
        return on_each_device(partial(_last, self.size), (new, axes), (tokens_B, axes[:1]))

    def read(self, layer: jax.Array) -> jax.Array:
        """Return the tokens [B, S, *shape] of a layer, or [B, *shape] of the sequences."""
        of_layer = jax.lax.dynamic_index_in_dim(self.array, layer, keepdims=False)
        return of_layer if self.slot.per == "sequence" else rearrange(of_layer, "B ... S H -> B S ... H")


def _scatter(stored: jax.Array, new: jax.Array, layer: jax.Array, at_B: jax.Array) -> jax.Array:
    """Write [B, …, T, H] into [L, B, …, S, H] by one scatter of B windows [..., T, H]."""
    row_B = jnp.arange(len(at_B), dtype=at_B.dtype)
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, new.ndim)),
        inserted_window_dims=(0, 1),
        scatter_dims_to_operand_dims=(0, 1, stored.ndim - 2),
    )
    where = jnp.stack([jnp.broadcast_to(layer, at_B.shape), row_B, at_B], axis=1)
    return jax.lax.scatter(stored, where, new, windows, indices_are_sorted=True, unique_indices=True, mode="clip")


def _last(size: int, new: jax.Array, tokens_B: jax.Array) -> jax.Array:
    if new.shape[1] <= size:
        return new
    end_B1 = tokens_B[:, None] - 1
    from_BR = jnp.maximum(end_B1 - (end_B1 - jnp.arange(size)[None]) % size, 0)
    return jnp.take_along_axis(new, from_BR.reshape(*from_BR.shape, *[1] * (new.ndim - 2)), axis=1)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["stored", "length", "index", "shown"],
    meta_fields=["entry", "is_empty"],
)
@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """One layer of a dense cache. `shown`: what attention reads instead of what is stored."""

    stored: dict[str, Stored]
    length: jax.Array
    index: jax.Array
    shown: CacheView
    entry: str
    is_empty: bool

    def update(self, rows: RowContext, **new: jax.Array) -> "DenseLayer":
        """Write T new tokens of each sequence after its `length`, or what is kept per sequence.

        In a ring they overwrite tokens that others of them read: a prompt is read as it came, and a ring takes one
        token at a time from then on. Raises ValueError for more.
        """
        stored, arrays, key_range = dict(self.stored), dict(self.shown.arrays), rows.key_range
        seen_BT = key_range.end - key_range.start
        for name, x in new.items():
            slot, at_B = self.stored[name], self.length
            if slot.is_ring and x.shape[1] == 1:
                # The window is all that is there, and attention needs no order.
                key_range, at_B = KeyRange(jnp.zeros_like(seen_BT), seen_BT), self.length % slot.size
            elif slot.is_ring and self.is_empty:
                arrays[name], x = x, slot.last(x, jnp.sum(seen_BT > 0, axis=1))
            elif slot.is_ring:
                raise ValueError(f"a window of {slot.size} tokens takes one token at a time after a prompt")
            stored[name] = slot.write(x, self.index, at_B)
        return dataclasses.replace(self, stored=stored, shown=CacheView(arrays, key_range))

    def view(self) -> CacheView:
        """Return all that is stored for the layer, or the prompt as it came where the layer keeps its end alone."""
        stored = {name: slot.read(self.index) for name, slot in self.stored.items() if name not in self.shown.arrays}
        return self.shown._replace(arrays={**stored, **self.shown.arrays})


@partial(jax.tree_util.register_dataclass, data_fields=["stored", "length"], meta_fields=["is_empty"])
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """A cache with room for all tokens of each sequence, or for the last ones where a layer reads no others.

    Key/value heads that the shards of the query heads do not divide are kept as copies, each where it is read: a cache
    belongs to its mesh.

    `stored`: by stack of layers and slot. `length`: int32 [B], the tokens that each sequence holds. `is_empty`: nothing
    was read before.
    """

    stored: dict[str, dict[str, Stored]]
    length: jax.Array
    is_empty: bool = False

    def layer(self, entry: str, index: jax.Array | int) -> DenseLayer:
        """Return the cache of one layer of a stack."""
        at = jnp.asarray(index, jnp.int32)
        return DenseLayer(self.stored[entry], self.length, at, CacheView({}), entry, self.is_empty)

    def put(self, layer: LayerCache) -> "DenseCache":
        """Return the cache with what a layer has stored."""
        assert isinstance(layer, DenseLayer), "a layer comes from `layer`"
        return dataclasses.replace(self, stored={**self.stored, layer.entry: layer.stored})

    def advance(self, lengths_B: jax.Array) -> "DenseCache":
        """Return the cache after a forward pass: each sequence holds `lengths_B` tokens more."""
        return dataclasses.replace(self, length=self.length + lengths_B, is_empty=False)


def empty_cache(model: ModelConfig, batch: int, size: int, dtype: jnp.dtype) -> DenseCache:
    """Return a cache for a model with room for `size` tokens of each of `batch` sequences, on the mesh around."""
    return allocate(nnx.merge(*abstract(model)).slots(), batch, size, dtype)


def kept_tokens(slot: Slot, size: int) -> int:
    """Return the entries of a slot for each sequence in a cache with room for `size` tokens."""
    return min(size, slot.window or size) if slot.per == "token" else 1


def allocate(entries: Mapping[str, CacheEntry], batch: int, size: int, dtype: jnp.dtype) -> DenseCache:
    """Return an empty cache of these entries; `dtype` is that of slots which name none."""

    def zeros(layers: int, slot: Slot) -> Stored:
        shape = slot.shape
        if slot.per == "token":
            shape = *shape[:-1], kept_tokens(slot, size), shape[-1]
        stored = Stored(jnp.zeros((layers, batch, *shape), slot.dtype or dtype), slot)
        return dataclasses.replace(stored, array=constrain(stored.array, *stored.axes))

    stored = {
        entry: {name: zeros(layers, slot) for name, slot in slots.items()} for entry, (layers, slots) in entries.items()
    }
    return DenseCache(stored, jnp.zeros(batch, jnp.int32), is_empty=True)


def cache_shardings(model: ModelConfig, batch: int, size: int, mesh: Mesh) -> DenseCache:
    """Return the shardings of a cache: sequences over the batch axes, key/value heads over `tensor`."""
    with jax.set_mesh(mesh), using_rules(DECODE):
        empty = jax.eval_shape(lambda: empty_cache(model, batch, size, jnp.dtype("float32")))

    def placement(stored: Stored) -> Stored:
        sharding = named_sharding(stored.axes, stored.array.shape, mesh, DECODE)
        return dataclasses.replace(stored, array=sharding)

    stored = jax.tree.map(placement, empty.stored, is_leaf=lambda x: isinstance(x, Stored))
    return DenseCache(stored, named_sharding(("batch",), (batch,), mesh, DECODE))
