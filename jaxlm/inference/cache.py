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
from jaxlm.models.doors.scan import ChunkRows, Recurrence, TokenArray, scan
from jaxlm.models.logical_axes import Axes
from jaxlm.models.rows import RowContext
from jaxlm.models.tree import abstract
from jaxlm.models.views import CacheView
from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.partition import constrain, named_sharding, using_rules
from jaxlm.parallel.rules import DECODE
from kernels_pallas.flash_attention import KeyRange


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["slot", "chunk"])
@dataclasses.dataclass(frozen=True)
class Stored:
    """A slot of all layers of an entry.

    Per token it is [L, B, …, S, H], where an entry is [..., H]: each head's tokens together, as attention reads them.
    Per sequence it is [L, B, *shape]. With a `chunk` it is a ring, in which the token at position p lies at index p
    modulo its size: it has room for a window, and so takes that many tokens at once. Otherwise it has room for all.
    """

    array: jax.Array
    slot: Slot
    chunk: int | None = None

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

    def write(self, new: jax.Array, layer: jax.Array, at_B: jax.Array, wraps: bool = False) -> "Stored":
        """Write T tokens [B, T, *shape] of a layer from these indices on, or [B, *shape] of the sequences.

        Each device has what it writes; no other layer is touched or copied. Where it `wraps`, the index after the last
        is the first.
        """
        new = new.astype(self.array.dtype)
        if self.slot.per == "sequence":
            array = jax.lax.dynamic_update_index_in_dim(self.array, new, layer, 0)
        else:
            new = rearrange(new, "B T ... H -> B ... T H")
            operands = (self.array, self.axes), (new, self.axes[1:]), (layer, ()), (at_B, ("batch",))
            array = on_each_device(_scatter_around if wraps else _scatter, *operands)
        return dataclasses.replace(self, array=array)

    def last(self, new: jax.Array, tokens_B: jax.Array) -> jax.Array:
        """Return the last `size` of the first `tokens_B` of T tokens [B, T, *shape], at their indices in a ring."""
        axes = ("batch", "sequence", *self.slot.axes)
        return on_each_device(partial(_last, self.size), (new, axes), (tokens_B, axes[:1]))

    def read(self, layer: jax.Array) -> jax.Array:
        """Return the tokens [B, S, *shape] of a layer, or [B, *shape] of the sequences."""
        of_layer = jax.lax.dynamic_index_in_dim(self.array, layer, keepdims=False)
        return of_layer if self.slot.per == "sequence" else rearrange(of_layer, "B ... S H -> B S ... H")

    def read_from(self, layer: jax.Array, first_B: jax.Array) -> jax.Array:
        """Return the tokens [B, S, *shape] of a layer in a ring, by position from these on."""
        axes = ("batch", "sequence", *self.slot.axes)
        return on_each_device(_rolled, (self.read(layer), axes), (first_B, axes[:1]))


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


def _scatter_around(stored: jax.Array, new: jax.Array, layer: jax.Array, at_B: jax.Array) -> jax.Array:
    """Write [B, …, T, H] into [L, B, …, S, H] by a scatter of B·T tokens [..., H], from the last index to the first."""
    T, S = new.shape[-2], stored.shape[-2]
    at_BT = (at_B[:, None] + jnp.arange(T, dtype=at_B.dtype)[None]) % S
    row_BT = jnp.broadcast_to(jnp.arange(len(at_B), dtype=at_B.dtype)[:, None], at_BT.shape)
    tokens = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(2, new.ndim)),
        inserted_window_dims=(0, 1, stored.ndim - 2),
        scatter_dims_to_operand_dims=(0, 1, stored.ndim - 2),
    )
    where = jnp.stack([jnp.broadcast_to(layer, at_BT.shape), row_BT, at_BT], axis=-1)
    return jax.lax.scatter(stored, where, jnp.moveaxis(new, -2, 1), tokens, unique_indices=True, mode="clip")


def _rolled(stored: jax.Array, first_B: jax.Array) -> jax.Array:
    at_BS = (first_B[:, None] + jnp.arange(stored.shape[1])[None]) % stored.shape[1]
    return jnp.take_along_axis(stored, at_BS.reshape(*at_BS.shape, *[1] * (stored.ndim - 2)), axis=1)


def _last(size: int, new: jax.Array, tokens_B: jax.Array) -> jax.Array:
    if new.shape[1] <= size:
        return new
    end_B1 = tokens_B[:, None] - 1
    from_BR = jnp.maximum(end_B1 - (end_B1 - jnp.arange(size)[None]) % size, 0)
    return jnp.take_along_axis(new, from_BR.reshape(*from_BR.shape, *[1] * (new.ndim - 2)), axis=1)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["stored", "length", "index", "shown"],
    meta_fields=["is_empty"],
)
@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """One layer of a dense cache. `shown`: what attention reads instead of what is stored."""

    stored: dict[str, Stored]
    length: jax.Array
    index: jax.Array
    shown: CacheView
    is_empty: bool

    def update(self, rows: RowContext, **new: jax.Array) -> "DenseLayer":
        """Write T new tokens of each sequence after its `length`.

        In a ring they overwrite tokens. A prompt is therefore read as it came; from then on a ring takes a chunk at a
        time, and is read by position. Raises ValueError for more.
        """
        stored, arrays, key_range = dict(self.stored), dict(self.shown.arrays), rows.key_range
        seen_BT = rows.key_range.end - rows.key_range.start
        for name, x in new.items():
            slot = self.stored[name]
            if slot.chunk is None:
                stored[name] = slot.write(x, self.index, self.length)
            elif self.is_empty and x.shape[1] > 1:
                arrays[name], last = x, slot.last(x, jnp.sum(seen_BT > 0, axis=1))
                stored[name] = slot.write(last, self.index, self.length)
            elif (T := x.shape[1]) > slot.chunk:
                window = slot.slot.window
                raise ValueError(
                    f"a cache with windows of {window} tokens takes {slot.chunk} at a time after a prompt, not {T}"
                )
            else:
                stored[name] = slot.write(x, self.index, self.length % slot.size, wraps=T > 1)
                if slot.chunk == 1:  # all that is there is seen, and attention needs no order
                    key_range = KeyRange(jnp.zeros_like(seen_BT), seen_BT)
                else:
                    first_B = jnp.maximum(self.length + T - slot.size, 0)
                    arrays[name] = stored[name].read_from(self.index, first_B)
                    key_range = KeyRange(*(jnp.maximum(at_BT - first_B[:, None], 0) for at_BT in rows.key_range))
        return dataclasses.replace(self, stored=stored, shown=CacheView(arrays, key_range))

    def scan(self, rows: RowContext, recurrence: Recurrence, *inputs: TokenArray) -> tuple[jax.Array, "DenseLayer"]:
        """Carry the states of each sequence through T new tokens."""
        before = {name: self.stored[name].read(self.index) for name in recurrence.first}
        outputs_BT, states = scan(recurrence, before, ChunkRows(rows.is_token_BT, rows.begins_BT), *inputs)
        written = {name: self.stored[name].write(state, self.index, self.length) for name, state in states.items()}
        return outputs_BT, dataclasses.replace(self, stored={**self.stored, **written})

    def view(self) -> CacheView:
        """Return the tokens stored for the layer; of a ring the prompt as it came, or its tokens by position."""
        of_tokens = {name: slot for name, slot in self.stored.items() if slot.slot.per == "token"}
        stored = {name: slot.read(self.index) for name, slot in of_tokens.items() if name not in self.shown.arrays}
        return self.shown._replace(arrays={**stored, **self.shown.arrays})


@partial(jax.tree_util.register_dataclass, data_fields=["stored", "length"], meta_fields=["is_empty"])
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """A cache with room for all tokens of each sequence, or for the last ones where a layer reads no others.

    Key/value heads that the shards of the query heads do not divide are kept as copies, each where it is read: a cache
    belongs to its mesh.

    `stored`: by entry and slot. `length`: int32 [B], the tokens that each sequence holds. `is_empty`: nothing
    was read before.
    """

    stored: dict[str, dict[str, Stored]]
    length: jax.Array
    is_empty: bool = False

    def layer(self, entry: str, index: jax.Array | int) -> DenseLayer:
        """Return the cache of one layer of an entry."""
        at = jnp.asarray(index, jnp.int32)
        return DenseLayer(self.stored[entry], self.length, at, CacheView({}), self.is_empty)

    def put(self, entry: str, layer: LayerCache) -> "DenseCache":
        """Return the cache with what a layer of an entry has stored."""
        assert isinstance(layer, DenseLayer), "a layer comes from `layer`"
        return dataclasses.replace(self, stored={**self.stored, entry: layer.stored})

    def advance(self, lengths_B: jax.Array) -> "DenseCache":
        """Return the cache after a forward pass: each sequence holds `lengths_B` tokens more."""
        return dataclasses.replace(self, length=self.length + lengths_B, is_empty=False)


def empty_cache(model: ModelConfig, batch: int, size: int, dtype: jnp.dtype, chunk: int = 1) -> DenseCache:
    """Return a cache for a model, on the mesh around, as `allocate` does."""
    return allocate(nnx.merge(*abstract(model)).slots(), batch, size, dtype, chunk)


def kept_tokens(slot: Slot, size: int, chunk: int = 1) -> int:
    """Return the entries of a slot for each sequence in a cache as `allocate` makes it."""
    return min(size, (slot.window or size) + chunk - 1) if slot.per == "token" else 1


def allocate(entries: Mapping[str, CacheEntry], batch: int, size: int, dtype: jnp.dtype, chunk: int = 1) -> DenseCache:
    """Return an empty cache of these entries, with room for `size` tokens of each of `batch` sequences.

    Args:
      dtype: that of slots which name none.
      chunk: the most tokens that are appended at once after the first. So many more than the window are kept where
        there is one, less the token that they replace.
    """

    def zeros(layers: int, slot: Slot) -> Stored:
        shape, kept = slot.shape, size
        if slot.per == "token":
            kept = kept_tokens(slot, size, chunk)
            shape = *shape[:-1], kept, shape[-1]
        is_ring = slot.per == "token" and slot.window is not None and kept < size
        stored = Stored(jnp.zeros((layers, batch, *shape), slot.dtype or dtype), slot, chunk if is_ring else None)
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
