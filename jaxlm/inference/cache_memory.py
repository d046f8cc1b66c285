"""The number of pages in the cache of an engine: as many as its memory holds, and as its sequences can use."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.core.units import memory
from jaxlm.inference.paged_cache import PageLayout
from jaxlm.parallel.rules import Rules

_ON_CPU = 1 << 30  # bytes, where nobody says how many
_SHARE = 0.8  # of the memory of an accelerator that weights leave; the rest is for what a step computes


class CacheSize(NamedTuple):
    """The size of a cache. `context`: the most tokens of a sequence. `counts`: the pages of each group, of which the
    first is for rows of padding."""

    context: int
    counts: tuple[int, ...]


def cache_size(
    layout: PageLayout,
    dtype: jnp.dtype,
    mesh: Mesh,
    rules: Rules,
    *,
    longest: int,
    context: int | None,
    slots: int,
    most_bytes: int | None,
    beside: Sequence[int] | None = None,
) -> CacheSize:
    """Return the size of a cache for so many sequences.

    Where memory does not hold `slots` sequences of `context` tokens, each group has the same share of its pages. A
    layer with a window holds the pages that a token of a sequence reads, and one more.

    Args:
      longest: the context length of the model, and so the most that `context` may be.
      context: the most tokens of a sequence; None is as many as fit.
      most_bytes: the most memory on each device. None is 1 GiB on a CPU, and 80 % of what is free on other devices; for
        one sequence of a given `context` as much as that sequence needs.
      beside: bytes on each device that another model keeps for each page of a group; None for none.

    Raises InputError where memory does not hold one sequence.
    """
    groups = range(len(layout.groups))
    others = [0 for _ in groups] if beside is None else beside
    each = [layout.page_bytes(group, dtype, mesh, rules) + others[group] for group in groups]

    def pages(tokens: int) -> list[int]:
        return [most_pages(tokens, window, layout.size) for window in layout.groups]

    def needs(tokens: int) -> int:
        """Return the bytes of one sequence, and of the page for padding."""
        return _bytes([n + 1 for n in pages(tokens)], each)

    room = _free_bytes(mesh) if most_bytes is None else most_bytes
    if context is None:
        fitting = (n for n in range(-(-longest // layout.size) * layout.size, 0, -layout.size) if needs(n) <= room)
        context = min(next(fitting, layout.size), longest)
    context = min(context, longest)
    if most_bytes is None:
        room = max(room, needs(context))
    if needs(context) > room:
        raise InputError(
            f"a cache of {memory(room)} does not hold one sequence of {context:,} tokens, which needs "
            f"{memory(needs(context))}: give the cache more memory or sequences a shorter context"
        )
    most = pages(context)
    share = min(1.0, (room - _bytes([1] * len(each), each)) / (slots * _bytes(most, each)))
    return CacheSize(context, tuple(max(n, math.floor(n * slots * share)) + 1 for n in most))


def most_pages(tokens: int, window: int | None, size: int) -> int:
    """Return the most pages of a group that a sequence of so many tokens holds at a time, in pages of this size: with a
    window the pages that a token of the sequence reads, and one more."""
    pages = -(-tokens // size)
    return pages if window is None else min(pages, -(-window // size) + 2)


def _bytes(pages: Sequence[int], each: Sequence[int]) -> int:
    return sum(n * bytes for n, bytes in zip(pages, each, strict=True))


def _free_bytes(mesh: Mesh) -> int:
    """Return the memory for a cache on the device of this process that has the least."""
    found = [device.memory_stats() for device in mesh.local_devices]
    free = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in found if stats and "bytes_limit" in stats]
    return int(_SHARE * min(free)) if free else _ON_CPU


def shared_group(window: int | None, groups: Sequence[int | None]) -> int:
    """Return the engine's group of pages that layers of a draft model with a window read: of the same window, or of all
    tokens. Raises InputError where there is none."""
    for each in (window, None):
        if each in groups:
            return groups.index(each)
    raise InputError(
        f"a draft model with a window of {window} needs pages that the model frees after {groups}; take another draft "
        "model"
    )
