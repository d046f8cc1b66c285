"""Which keys a query sees, as one interval per query: O(T) memory where a mask takes O(T·S).

Each function gives a `Visible`; those of batch size 1 serve any batch. Where no argument is traced the intervals are
numpy arrays, known while tracing. Keys are counted from the first of the array of keys, queries from `offset`: a query
t stands at position offset + t, as the second half of a prompt does behind a cache of its first half.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Far beyond any key, and far from what int32 cannot hold: it may still be shifted.
_NO_LIMIT = 2**30


class Visible(NamedTuple):
    """Query t sees exactly the keys s with start ≤ s < end; int32 [B, T] or [1, T], and of any value: what lies beyond
    the keys is cut off, and an interval with start ≥ end is empty. numpy arrays may be of any integer dtype."""

    start: Any
    end: Any


def causal(queries: int, offset: Any = 0) -> Visible:
    """Each position sees itself and what lies before it.

    Args:
      queries: T. offset: position of the first query, an int or int32 [B].
    """
    position = _positions(queries, offset)
    return Visible(position * 0, position + 1)


def window(queries: int, before: int | None = None, after: int | None = 0, offset: Any = 0) -> Visible:
    """Each position sees itself, `before` positions before it and `after` behind it; None sets no limit.

    A causal sliding window of w keys is window(T, w − 1).
    """
    position = _positions(queries, offset)
    start = position * 0 if before is None else position - before
    return Visible(start, position * 0 + _NO_LIMIT if after is None else position + after + 1)


def prefix(queries: int, length: Any, offset: Any = 0) -> Visible:
    """Prefix-LM: the first `length` (int or int32 [B]) positions see one another, the others are causal."""
    start, end = causal(queries, offset)
    length = length if isinstance(length, int) else _module(length).reshape(length, (-1, 1))
    return Visible(start, _module(end, length).maximum(end, length))


def packed(segment_ids: jax.Array) -> Visible:
    """Each position sees its own segment.

    Args:
      segment_ids: int [B, T]; neighbours of one id are a segment. Padding has negative ids and sees nothing.
    """
    ids = jnp.asarray(segment_ids)
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    first = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    last = jnp.concatenate([first[:, 1:], jnp.ones_like(first[:, :1])], axis=1)
    end = jax.lax.cummin(jnp.where(last, index + 1, ids.shape[1]), axis=1, reverse=True)
    return Visible(start, jnp.where(ids < 0, start, end))


def both(*parts: Visible) -> Visible:
    """What all of them let see: both(causal(T), packed(ids)) is causal attention in packed rows."""
    start, end = parts[0]
    for other in parts[1:]:
        module = _module(start, end, *other)
        start, end = module.maximum(start, other[0]), module.minimum(end, other[1])
    return Visible(start, end)


def shifted(visible: Visible, first_key: Any) -> Visible:
    """The same for an array of keys that begins at key `first_key`: a shard of the sequence, a part of a cache."""
    return Visible(visible[0] - first_key, visible[1] - first_key)


def within(visible: Any, B: int, T: int, S: int) -> Visible:
    """The intervals cut off at the S keys, int32 [B, T]: of numpy arrays numpy arrays, and of None all keys."""
    if visible is None:
        visible = np.zeros((1, T), np.int32), np.full((1, T), S, np.int32)

    def cut(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return jnp.broadcast_to(jnp.clip(x.astype(jnp.int32), 0, S), (B, T))
        # In its own dtype or a wider one, before it is narrowed.
        return np.broadcast_to(np.clip(x, np.int64(0), np.int64(S)).astype(np.int32), (B, T))

    return Visible(*map(cut, visible))


def _positions(queries: int, offset: Any) -> Any:
    if isinstance(offset, int):
        return np.arange(offset, offset + queries, dtype=np.int32)[None]
    module = _module(offset)
    return module.reshape(offset, (-1, 1)) + np.arange(queries, dtype=np.int32)[None]


def _module(*arrays: Any) -> Any:
    """numpy for what numpy can hold: a jax.Array stays one, so that nothing is fetched from a device."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np
