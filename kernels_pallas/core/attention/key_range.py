"""Attention masks as intervals of keys: one per query, or a few (`union`). O(T) memory where a mask takes O(T·S).

Each function returns a `KeyRange`; masks of batch size 1 serve any batch. If no argument is a JAX array the intervals
are numpy arrays, known while tracing. Keys are counted from the first of the array of keys, queries from `offset`:
query t has position offset + t, as in the second half of a prompt after a cache of its first half.
"""

import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Far beyond any key, and far enough from the limits of int32 to be shifted.
_NO_LIMIT = 2**30
# Axes per sequence, per token, and of a union.
_AXES = {0: "[]", 1: "[B]", 2: "[B, T]", 3: "[P, B, T]"}
# Three of these still mean no limit: a position is an offset plus a number of queries, and an interval's end is one
# more.
_FARTHEST = 2**28


class KeyRange(NamedTuple):
    """An attention mask: query t attends to exactly the keys s with start ≤ s < end; int32 [B, T] or [1, T].

    Any values are allowed: intervals are clipped to the keys, and an interval with start ≥ end is empty. numpy arrays
    may have any integer dtype. A union of P disjoint intervals is [P, B, T] or [P, 1, T]: see `union`.
    """

    start: Any
    end: Any


def causal(queries: int, offset: Any = 0) -> KeyRange:
    """Return the causal mask: each position attends to itself and to earlier ones.

    Args:
      queries: T. offset: position of the first query, an int or int32 [B].
    """
    position = _positions(queries, offset)
    return KeyRange(position * 0, position + 1)


def sliding_window(queries: int, before: int | None = None, after: int | None = 0, offset: Any = 0) -> KeyRange:
    """Return a window: each position attends to itself, `before` earlier and `after` later ones; None sets no limit.

    A causal sliding window of w keys is sliding_window(T, w − 1).
    """
    position = _positions(queries, offset)
    start = position * 0 if before is None else position - _count("before", before)
    return KeyRange(start, position * 0 + _NO_LIMIT if after is None else position + _count("after", after) + 1)


def prefix_lm(queries: int, length: Any, offset: Any = 0) -> KeyRange:
    """Return the prefix-LM mask: the first `length` (int or int32 [B]) positions attend to each other, others are
    causal.
    """
    start, end = causal(queries, offset)
    length = _column("length", length)
    return KeyRange(start, array_module(end, length).maximum(end, length))


def packed(segment_ids: jax.Array) -> KeyRange:
    """Return the mask of packed rows: each position attends to its own segment.

    Args:
      segment_ids: int [B, T]; consecutive equal ids form a segment. Padding has negative ids and attends to nothing.
    """
    _check_integers("packed: segment_ids", segment_ids, 2, any_width=True)
    ids = segment_ids
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    first = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    last = jnp.concatenate([first[:, 1:], jnp.ones_like(first[:, :1])], axis=1)
    end = jax.lax.cummin(jnp.where(last, index + 1, ids.shape[1]), axis=1, reverse=True)
    return KeyRange(start, jnp.where(ids < 0, start, end))


def intersection(*ranges: KeyRange) -> KeyRange:
    """Return the keys that are unmasked in all masks: intersection(causal(T), packed(ids)) is causal in packed rows.

    The intersection of unions is the union of the intersections of their intervals.
    """
    _check_ranges("intersection", ranges)
    met = []
    for intervals in itertools.product(*map(_intervals, ranges)):
        start, end = intervals[0]
        for begin, stop in intervals[1:]:
            module = array_module(start, end, begin, stop)
            start, end = module.maximum(start, begin), module.minimum(end, stop)
        met.append(KeyRange(start, end))
    return met[0] if len(met) == 1 else _stacked(met)


def union(*ranges: KeyRange) -> KeyRange:
    """Return the keys that are unmasked in any of the masks; they may overlap.

    intersection(causal(T), union(first, sliding_window(T, 255))) allows a window and the first tokens (StreamingLLM,
    arXiv:2309.17453), with first = KeyRange(np.zeros((1, T), int), np.full((1, T), 4)).
    """
    _check_ranges("union", ranges)
    start, end = _stacked([interval for one in ranges for interval in _intervals(one)])
    module = array_module(start, end)
    order = module.argsort(start, axis=0)
    start, end = (module.take_along_axis(x, order, axis=0) for x in (start, end))
    # Each starts where the previous ones have ended.
    apart, reached = [start[0]], end[0]
    for begin, stop in zip(start[1:], end[1:], strict=True):
        apart.append(module.maximum(begin, reached))
        reached = module.maximum(reached, stop)
    return KeyRange(module.stack(apart), end)


def _check_ranges(name: str, ranges: tuple[KeyRange, ...]) -> None:
    for one in ranges:
        _check_key_range(name, one)
    arrays = [x for one in ranges for x in one]
    rows = {x.shape[-1] for x in arrays}
    if len(rows) != 1:
        counts = ", ".join(str(n) for n in sorted(rows)) or "none"
        raise ValueError(f"{name}: its masks are of {counts} queries; it takes one or more, all of the same number")
    if len(sizes := {x.shape[-2] for x in arrays} - {1}) > 1:
        raise ValueError(f"{name}: its masks are of batches of {sorted(sizes)}; they must be of one size, or of 1")


def _check_key_range(name: str, key_range: Any) -> None:
    """Check that a mask is two equal-shaped arrays of integers, as the functions here return."""
    if not (isinstance(key_range, tuple) and len(key_range) == 2):
        raise ValueError(f"{name}: {key_range!r:.60} is no KeyRange; it must be made by `causal` and others here")
    for side, x in zip(KeyRange._fields, key_range, strict=True):
        _check_integers(f"{name}: {side}", x, 2, 3)


def _check_integers(name: str, x: Any, *dimensions: int, any_width: bool = False) -> None:
    """Check that an array has this number of dimensions and holds positions, or with `any_width` any integers."""
    axes = ("int" if any_width else "int32") + " or ".join(_AXES[n] for n in dimensions)
    if not (hasattr(x, "dtype") and hasattr(x, "ndim")):
        got = "None" if x is None else f"of type {type(x).__name__}"
        raise ValueError(f"{name} is {got}; it must be an array, {axes}")
    if x.ndim not in dimensions or not (jnp.issubdtype(x.dtype, jnp.integer) if any_width else are_positions(x)):
        raise ValueError(f"{name} is {x.dtype}{list(x.shape)}; it must be {axes}")


def are_positions(x: Any) -> bool:
    """Return whether an array holds integers whose dtype fits int32, or is a numpy array of any integer dtype.

    numpy values are known, and are clipped before they are narrowed; values of other arrays could wrap around.
    """
    return jnp.issubdtype(x.dtype, jnp.integer) and (
        not isinstance(x, jax.Array) or jnp.iinfo(x.dtype).max <= jnp.iinfo(jnp.int32).max
    )


def shifted(key_range: KeyRange, first_key: Any) -> KeyRange:
    """Return a mask for keys that start at key `first_key`, an int or int32 [B]: a shard of a sequence or a cache."""
    _check_key_range("shifted", key_range)
    first_key = _column("first_key", first_key)
    return KeyRange(*(narrowed(x) - first_key for x in key_range))


def clipped(key_range: Any, B: int, T: int, S: int) -> KeyRange:
    """Return the intervals clipped to the S keys, int32 [P, B, T]; numpy arrays stay numpy, and None is all keys."""
    if key_range is None:
        key_range = np.zeros((1, T), np.int32), np.full((1, T), S, np.int32)

    def cut(x: Any) -> Any:
        shape = x.shape[0] if x.ndim == 3 else 1, B, T
        if isinstance(x, jax.Array):
            return jnp.broadcast_to(jnp.clip(x.astype(jnp.int32), 0, S), shape)
        return np.broadcast_to(np.clip(narrowed(x), 0, S), shape)

    return KeyRange(*map(cut, key_range))


def _intervals(key_range: KeyRange) -> list[KeyRange]:
    """Return the intervals of a union."""
    start, end = map(narrowed, key_range)
    return [KeyRange(start, end)] if start.ndim == 2 else [KeyRange(*each) for each in zip(start, end, strict=True)]


def narrowed(x: Any) -> Any:
    """Return an array of any integer dtype as int32; numpy values are clipped to the range that may be shifted."""
    if isinstance(x, jax.Array):
        return x.astype(jnp.int32)
    if x.dtype.kind == "u":
        return np.minimum(x, np.uint64(_NO_LIMIT)).astype(np.int32)
    return np.clip(x.astype(np.int64), -_NO_LIMIT, _NO_LIMIT).astype(np.int32)


def _stacked(intervals: list[KeyRange]) -> KeyRange:
    arrays = [x for side in zip(*intervals, strict=True) for x in side]
    module = array_module(*arrays)
    arrays = module.broadcast_arrays(*arrays)
    return KeyRange(module.stack(arrays[: len(intervals)]), module.stack(arrays[len(intervals) :]))


def _bounded(name: str, n: Any) -> Any:
    """Check an integer that may still be added to positions; a traced one may have any value."""
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
    """Check as `_bounded` does, and that the number is not negative."""
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
    """Return an integer, or one per sequence [B] as [B, 1]."""
    if getattr(n, "ndim", 0) == 0:
        return _bounded(name, n)
    _check_integers(name, n, 1)
    if not isinstance(n, jax.Array) and n.size and max(-int(n.min()), int(n.max())) > _FARTHEST:
        raise _too_far(name, n)
    return narrowed(n)[:, None]


def array_module(*arrays: Any) -> Any:
    """Return numpy if all arrays are numpy's, and otherwise jax.numpy, so that nothing is fetched from a device."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def without_repeats(x: Any) -> Any:
    """Return a numpy array [B, …] whose rows are all equal as its first row, [1, …]; others unchanged."""
    return x[:1] if isinstance(x, np.ndarray) and np.all(x == x[:1]) else x
