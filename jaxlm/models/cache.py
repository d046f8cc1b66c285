"""The protocol between mixers, which say what they keep of earlier tokens, and caches, which keep it."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from jaxlm.models.doors.scan import ChunkRows, Recurrence, TokenArray, scan
from jaxlm.models.logical_axes import Axes
from jaxlm.models.masks import Mask
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.models.views import CacheView, PagedView


class Slot(NamedTuple):
    """An array that a mixer keeps: an entry of this shape per token, or one per sequence.

    Attributes:
      shape: sizes of an entry.
      axes: its logical axes.
      dtype: None is that of the computation.
      per: entries of tokens are appended; that of a sequence, a state, is replaced.
      window: each token reads the entries of so many tokens at most, itself the last; None reads all.
      tokens_last: a page is [..., H, tokens] in place of [..., tokens, H], of entries [..., H]: products that sum over
        H, as of queries with keys, read it faster.
    """

    shape: tuple[int, ...]
    axes: Axes
    dtype: jnp.dtype | None = None
    per: Literal["token", "sequence"] = "token"
    window: int | None = None
    tokens_last: bool = False


class CacheEntry(NamedTuple):
    """A stack of layers that keep the same slots."""

    layers: int
    slots: Mapping[str, Slot]


class LayerCache(Protocol):
    """A cache as one layer reads and writes it."""

    def update(self, rows: RowContext, **new: jax.Array) -> Self:
        """Return the cache after writing slots of tokens by name.

        Args:
          rows: a token whose `key_range` is empty is padding.
          new: [B, T, *shape] of the next T tokens of each sequence.
        """
        ...

    def scan(self, rows: RowContext, recurrence: Recurrence, *inputs: TokenArray) -> tuple[jax.Array, Self]:
        """Carry the states of each sequence through its next T tokens, as `jaxlm.models.doors.scan` does.

        Documents begin anew. What a layer computes of each token alone is better done for all of them before and after.

        Args:
          recurrence: its states are slots of the layer, some or all.
          inputs: arrays [B, T, …], each with its logical axes.

        Returns the outputs [B, T, …], and the cache with the states after the last token.
        """
        ...

    @property
    def is_own_pass(self) -> bool:
        """True if it holds the tokens of this pass alone: then a layer may give it other arrays than its slots."""
        ...

    def view(self) -> CacheView | PagedView:
        """Return the slots of tokens for reading, and the keys among them that each token of the last update sees."""
        ...


class Cache(Protocol):
    """A cache of all layers, which travels with the residual."""

    def layer(self, entry: str, index: jax.Array | int) -> LayerCache:
        """Return the cache of one layer of an entry, by its index from 0, traced or static."""
        ...

    def put(self, entry: str, layer: LayerCache) -> Self:
        """Return the cache after an update of a layer of an entry that came from it."""
        ...

    def advance(self, lengths_B: jax.Array) -> Self:
        """Return the cache after a forward pass that read so many tokens of each sequence, padding left out."""
        ...


class Mixer(Protocol):
    """A layer in which the tokens of a sequence read one another."""

    def slots(self) -> dict[str, Slot]:
        """Return what a layer keeps of earlier tokens, on the mesh and under the rules around."""
        ...

    def __call__(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the cache after it."""
        ...


class OwnTokens(NamedTuple):
    """A layer's cache that holds the tokens of this pass alone."""

    arrays: dict[str, jax.Array] = {}
    key_range: Mask | None = None

    def update(self, rows: RowContext, **new: jax.Array) -> Self:
        """Hold the new arrays."""
        return self._replace(arrays={**self.arrays, **new}, key_range=rows.key_range)

    def scan(self, rows: RowContext, recurrence: Recurrence, *inputs: TokenArray) -> tuple[jax.Array, Self]:
        """Carry states from the first token of the rows to the last, and forget them."""
        tokens = ChunkRows(rows.is_token_BT, rows.begins_BT)
        outputs_BT, _ = scan(recurrence, recurrence.initial_states(len(rows.is_token_BT)), tokens, *inputs)
        return outputs_BT, self

    @property
    def is_own_pass(self) -> bool:
        """True: earlier tokens are not here."""
        return True

    def view(self) -> CacheView:
        """Return the arrays as they are. No token sees keys after its own."""
        return CacheView(self.arrays, self.key_range, is_causal=True)


class NoCache(NamedTuple):
    """A cache that keeps nothing, as in training: tokens see those of their own pass."""

    def layer(self, entry: str, index: jax.Array | int) -> OwnTokens:
        """Return an empty cache of a layer."""
        return OwnTokens()

    def put(self, entry: str, layer: LayerCache) -> Self:
        """Drop what the layer held."""
        return self

    def advance(self, lengths_B: jax.Array) -> Self:
        """Return itself."""
        return self
