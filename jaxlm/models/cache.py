"""The protocol between mixers, which say what they keep of earlier tokens, and caches, which keep it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from jaxlm.models.logical_axes import Axes
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.models.views import CacheView, PagedView
from kernels_pallas.flash_attention import KeyRange


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


States = dict[str, jax.Array]  # by slot

# One token of a recurrence: takes states [B, *shape] and inputs [B, ...] of sequences, and returns the states after it
# and outputs [B, ...].
Recurrence = Callable[[States, Any], tuple[States, Any]]


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

    def carry(self, rows: RowContext, step: Recurrence, first: States, inputs_BT: Any) -> tuple[Any, Self]:
        """Carry the states of each sequence through its next T tokens.

        Padding leaves the states as they are, and its outputs are anything. What a layer computes of each token alone
        is better done for all of them before and after.

        Args:
          first: by slot, the state [*shape] before the first token of a sequence.
          inputs_BT: a tree of [B, T, ...].

        Returns the outputs of `step`, a tree of [B, T, ...], and the cache with the states after the last token.
        """
        ...

    def view(self) -> CacheView | PagedView:
        """Return the slots of tokens for reading, and the keys among them that each token of the last update sees."""
        ...


class Cache(Protocol):
    """A cache of all layers, which travels with the stream."""

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
    key_range: KeyRange | None = None

    def update(self, rows: RowContext, **new: jax.Array) -> Self:
        """Hold the new arrays."""
        return self._replace(arrays={**self.arrays, **new}, key_range=rows.key_range)

    def carry(self, rows: RowContext, step: Recurrence, first: States, inputs_BT: Any) -> tuple[Any, Self]:
        """Carry states from the first token of the rows to the last, and forget them."""
        _, outputs_BT = carried(step, begun(first, len(rows.is_token_BT)), inputs_BT, rows.is_token_BT)
        return outputs_BT, self

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


def begun(first: States, sequences: int) -> States:
    """Return the states [B, *shape] of sequences that begin."""
    return {name: jnp.broadcast_to(state[None], (sequences, *state.shape)) for name, state in first.items()}


def carried(step: Recurrence, states: States, inputs_BT: Any, is_token_BT: jax.Array) -> tuple[States, Any]:
    """Carry states [B, *shape] through T tokens. Return them after the last, and the outputs [B, T, ...]."""

    def one(states: States, token: tuple[Any, jax.Array]) -> tuple[States, Any]:
        inputs_B, is_token_B = token
        after, outputs_B = step(states, inputs_B)
        return {name: where_sequences(is_token_B, after[name], state) for name, state in states.items()}, outputs_B

    states, outputs_TB = jax.lax.scan(one, states, jax.tree.map(_swapped, (inputs_BT, is_token_BT)))
    return states, jax.tree.map(_swapped, outputs_TB)


def where_sequences(is_so_B: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """Choose between arrays [B, ...] for each sequence, in the dtype of the second."""
    return jnp.where(is_so_B.reshape(-1, *[1] * (no.ndim - 1)), yes.astype(no.dtype), no)


def _swapped(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 0, 1)
