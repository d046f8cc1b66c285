"""Which keys a query sees, as intervals: one per query, or a few (`union`). O(T) memory where a mask takes O(T·S).

Each function gives a `Visible`; those of batch size 1 serve any batch. Where no argument is an array of JAX's the
intervals are numpy arrays, known while tracing. Keys are counted from the first of the array of keys, queries from
`offset`: a query t stands at position offset + t, as the second half of a prompt does behind a cache of its first half.
"""

import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Far beyond any key, and far from what int32 cannot hold: it may still be shifted.
_NO_LIMIT = 2**30
# Of what is given for each sequence, for each token, and of a union.
_AXES = {0: "[]", 1: "[B]", 2: "[B, T]", 3: "[P, B, T]"}
# Three of them are still no limit: a position is an offset and a number of queries, and what is behind it one more.
_FARTHEST = 2**28


class Visible(NamedTuple):
    """Query t sees exactly the keys s with start ≤ s < end; int32 [B, T] or [1, T], and of any value: what lies beyond
    the keys is cut off, and an interval with start ≥ end is empty. numpy arrays may be of any integer dtype. A union of
    P intervals that no key is in twice is [P, B, T] or [P, 1, T]: see `union`."""

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
    start = position * 0 if before is None else position - _count("before", before)
    return Visible(start, position * 0 + _NO_LIMIT if after is None else position + _count("after", after) + 1)


def prefix(queries: int, length: Any, offset: Any = 0) -> Visible:
    """Prefix-LM: the first `length` (int or int32 [B]) positions see one another, the others are causal."""
    start, end = causal(queries, offset)
    length = _column("length", length)
    return Visible(start, module_of(end, length).maximum(end, length))


def packed(segment_ids: jax.Array) -> Visible:
    """Each position sees its own segment.

    Args:
      segment_ids: int [B, T]; neighbours of one id are a segment. Padding has negative ids and sees nothing.
    """
    _check_integers("packed: segment_ids", segment_ids, 2, any_width=True)
    ids = segment_ids
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    first = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    last = jnp.concatenate([first[:, 1:], jnp.ones_like(first[:, :1])], axis=1)
    end = jax.lax.cummin(jnp.where(last, index + 1, ids.shape[1]), axis=1, reverse=True)
    return Visible(start, jnp.where(ids < 0, start, end))


def both(*parts: Visible) -> Visible:
    """What all of them let see: both(causal(T), packed(ids)) is causal attention in packed rows. Of unions it is the
    union of what each two of their intervals have in common."""
    _check_parts("both", parts)
    met = []
    for intervals in itertools.product(*map(_intervals, parts)):
        start, end = intervals[0]
        for begin, stop in intervals[1:]:
            module = module_of(start, end, begin, stop)
            start, end = module.maximum(start, begin), module.minimum(end, stop)
        met.append(Visible(start, end))
    return met[0] if len(met) == 1 else _stacked(met)


def union(*parts: Visible) -> Visible:
    """What any of them lets see; they may overlap. both(causal(T), union(first, window(T, 255))) sees a window and the
    first tokens (StreamingLLM, arXiv:2309.17453), with first = Visible(np.zeros((1, T), int), np.full((1, T), 4))."""
    _check_parts("union", parts)
    start, end = _stacked([interval for part in parts for interval in _intervals(part)])
    module = module_of(start, end)
    order = module.argsort(start, axis=0)
    start, end = (module.take_along_axis(x, order, axis=0) for x in (start, end))
    # Each begins where those before it have ended.
    apart, reached = [start[0]], end[0]
    for begin, stop in zip(start[1:], end[1:], strict=True):
        apart.append(module.maximum(begin, reached))
        reached = module.maximum(reached, stop)
    return Visible(module.stack(apart), end)


def _check_parts(name: str, parts: tuple[Visible, ...]) -> None:
    for part in parts:
        _check_visible(name, part)
    arrays = [x for part in parts for x in part]
    rows = {x.shape[-1] for x in arrays}
    if len(rows) != 1:
        counts = ", ".join(str(n) for n in sorted(rows)) or "none"
        raise ValueError(f"{name}: its parts are of {counts} queries; it must have some, all of as many")
    if len(sizes := {x.shape[-2] for x in arrays} - {1}) > 1:
        raise ValueError(f"{name}: its parts are of batches of {sorted(sizes)}; they must be of one size, or of 1")


def _check_visible(name: str, visible: Any) -> None:
    """Two arrays of integers alike, as functions here make them."""
    if not (isinstance(visible, tuple) and len(visible) == 2):
        raise ValueError(f"{name}: {visible!r:.60} is no Visible; it must be made by `causal` and others here")
    for side, x in zip(Visible._fields, visible, strict=True):
        _check_integers(f"{name}: {side}", x, 2, 3)


def _check_integers(name: str, x: Any, *dimensions: int, any_width: bool = False) -> None:
    """An array with so many dimensions, of positions, or else of integers of any width."""
    axes = ("int" if any_width else "int32") + " or ".join(_AXES[n] for n in dimensions)
    if not (hasattr(x, "dtype") and hasattr(x, "ndim")):
        got = "None" if x is None else f"of type {type(x).__name__}"
        raise ValueError(f"{name} is {got}; it must be an array, {axes}")
    if x.ndim not in dimensions or not (jnp.issubdtype(x.dtype, jnp.integer) if any_width else are_positions(x)):
        raise ValueError(f"{name} is {x.dtype}{list(x.shape)}; it must be {axes}")


def are_positions(x: Any) -> bool:
    """Whether an array holds integers whose dtype fits int32; numpy's of any width, since they are known: what is far
    beyond the keys is cut off before they are narrowed, where in others it would wrap."""
    return jnp.issubdtype(x.dtype, jnp.integer) and (
        not isinstance(x, jax.Array) or jnp.iinfo(x.dtype).max <= jnp.iinfo(jnp.int32).max
    )


def shifted(visible: Visible, first_key: Any) -> Visible:
    """The same for an array of keys that begins at key `first_key`, an int or int32 [B]: a shard of the sequence, a
    part of a cache."""
    _check_visible("shifted", visible)
    first_key = _column("first_key", first_key)
    return Visible(*(_narrowed(x) - first_key for x in visible))


def within(visible: Any, B: int, T: int, S: int) -> Visible:
    """The intervals cut off at the S keys, int32 [P, B, T]: of numpy arrays numpy arrays, and of None all keys."""
    if visible is None:
        visible = np.zeros((1, T), np.int32), np.full((1, T), S, np.int32)

    def cut(x: Any) -> Any:
        shape = x.shape[0] if x.ndim == 3 else 1, B, T
        if isinstance(x, jax.Array):
            return jnp.broadcast_to(jnp.clip(x.astype(jnp.int32), 0, S), shape)
        return np.broadcast_to(np.clip(_narrowed(x), 0, S), shape)

    return Visible(*map(cut, visible))


def _intervals(visible: Visible) -> list[Visible]:
    """Of a union its intervals."""
    start, end = map(_narrowed, visible)
    return [Visible(start, end)] if start.ndim == 2 else [Visible(*each) for each in zip(start, end, strict=True)]


def _narrowed(x: Any) -> Any:
    """An array of any integer dtype as int32, one of numpy's where nothing is beyond what may be shifted."""
    if isinstance(x, jax.Array):
        return x.astype(jnp.int32)
    if x.dtype.kind == "u":
        return np.minimum(x, np.uint64(_NO_LIMIT)).astype(np.int32)
    return np.clip(x.astype(np.int64), -_NO_LIMIT, _NO_LIMIT).astype(np.int32)


def _stacked(intervals: list[Visible]) -> Visible:
    arrays = [x for side in zip(*intervals, strict=True) for x in side]
    module = module_of(*arrays)
    arrays = module.broadcast_arrays(*arrays)
    return Visible(module.stack(arrays[: len(intervals)]), module.stack(arrays[len(intervals) :]))


def _bounded(name: str, n: Any) -> Any:
    """A whole number that may still be added to positions; one that is traced may be of any size."""
    if isinstance(n, jax.Array) and n.ndim == 0:
        if not jnp.issubdtype(n.dtype, jnp.signedinteger):  # a loop's index may be int64
            _check_integers(name, n, 0)
        return n.astype(jnp.int32)
    try:
        whole = operator.index(n)
    except TypeError:
        raise ValueError(f"{name} = {n!r}; it must be a whole number") from None
    if abs(whole) > _FARTHEST:
        raise _too_far(name, n)
    return whole


def _too_far(name: str, n: Any) -> ValueError:
    return ValueError(f"{name} = {n!s:.60}; it must be between −2²⁸ and 2²⁸")


def _count(name: str, n: Any) -> Any:
    """Like `_bounded`, of what is at least 0."""
    whole = _bounded(name, n)
    if not isinstance(whole, jax.Array) and whole < 0:
        raise ValueError(f"{name} = {n}; it must be 0 or more")
    return whole


def _positions(queries: int, offset: Any) -> Any:
    queries = _count("queries", queries)
    if isinstance(queries, jax.Array):
        raise ValueError("the number of queries is an array of JAX's; it must be an int, as T of query.shape is")
    return _column("offset", offset) + np.arange(queries, dtype=np.int32)[None]


def _column(name: str, n: Any) -> Any:
    """A whole number, or those of each sequence [B] as [B, 1]."""
    if getattr(n, "ndim", 0) == 0:
        return _bounded(name, n)
    _check_integers(name, n, 1)
    if not isinstance(n, jax.Array) and n.size and max(-int(n.min()), int(n.max())) > _FARTHEST:
        raise _too_far(name, n)
    return _narrowed(n)[:, None]


def module_of(*arrays: Any) -> Any:
    """numpy where all arrays are numpy's, and otherwise jax.numpy, so that nothing is fetched from a device."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def unrepeated(x: Any) -> Any:
    """Of a numpy array [B, …] whose rows are all the same the first of them, [1, …]."""
    return x[:1] if isinstance(x, np.ndarray) and np.all(x == x[:1]) else x
