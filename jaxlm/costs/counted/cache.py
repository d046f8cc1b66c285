"""The pages that an engine keeps of earlier tokens, on one device."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax.numpy as jnp

from jaxlm.costs import local_shapes
from jaxlm.costs.counted.parameters import slots
from jaxlm.costs.draft_steps import draft_reading
from jaxlm.costs.workload import Workload
from jaxlm.inference.cache_memory import most_pages, shared_group
from jaxlm.inference.paged_cache import PageLayout
from jaxlm.inference.settings import CacheDtype
from jaxlm.models.cache import Slot
from jaxlm.models.config import ModelConfig
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Kind


def kv_cache(work: Workload) -> int:
    """Return the bytes of pages on one device: those of all sequences of a step, and one page for padding rows. A draft
    model keeps as many pages as the model. Raises InputError for windows of it without pages."""
    layout = page_layout(work)
    counts = [work.slots * most_pages(work.sequence, window, work.page) + 1 for window in layout.groups]
    if work.draft_model is None:
        return _bytes(work, counts)
    beside = draft_reading(work)
    shared = [counts[shared_group(window, layout.groups)] for window in page_layout(beside).groups]
    return _bytes(work, counts) + _bytes(beside, shared)


def _bytes(work: Workload, counts: Sequence[int]) -> int:
    """Return the bytes on one device of so many pages of each group."""
    layers = {name: entry.layers for name, entry in slots(work.model, work.kind, work.layout).items()}
    return sum(
        layers[entry.name] * counts[entry.group(slot)] * _page_numbers(work, slot) * _itemsize(work, slot)
        for entry in page_layout(work).entries
        for _, slot in entry.slots
    )


def page_layout(work: Workload) -> PageLayout:
    """Return the groups of pages of a model; one entry stands for all layers that keep the same slots."""
    return _page_layout(work.model, work.kind, work.layout, work.page, work.cache_dtype)


@functools.lru_cache(maxsize=1024)
def _page_layout(
    model: ModelConfig, kind: Kind, layout: Layout, page: int, cache_dtype: CacheDtype | None
) -> PageLayout:
    return PageLayout.of(slots(model, kind, layout), page, cache_dtype)


def _page_numbers(work: Workload, slot: Slot) -> int:
    """Return the number of elements on one device of a page of a slot: of the page's tokens, or of one state."""
    return math.prod(local_shapes.local_shape(work, slot.axes, slot.shape)) * (work.page if slot.per == "token" else 1)


def entry_bytes(work: Workload) -> Iterator[tuple[int, int]]:
    """Yield, for each array that layers keep of tokens, the number of its layers, and its bytes of one token on one
    device."""
    layers = {name: entry.layers for name, entry in slots(work.model, work.kind, work.layout).items()}
    for entry in page_layout(work).entries:
        for _, slot in entry.slots:
            if slot.per == "token":
                numbers = math.prod(local_shapes.local_shape(work, slot.axes, slot.shape))
                yield layers[entry.name], numbers * _itemsize(work, slot)


def kv_bytes_per_token(work: Workload) -> int:
    """Return the bytes that a token adds to the cache, over the whole mesh, each replicated array once."""
    return _kept_bytes(work, "token")


def state_bytes_per_sequence(work: Workload) -> int:
    """Return the bytes of the state of a sequence in all layers, over the whole mesh, each replicated array once; the
    engine keeps up to three of them, in pages of their own (`PageLayout`)."""
    return _kept_bytes(work, "sequence")


def _kept_bytes(work: Workload, per: Literal["token", "sequence"]) -> int:
    """Return the bytes that layers keep per token, or per sequence, with those of a draft model."""
    if work.draft_model is not None:
        return _kept_bytes(work.without_drafts(), per) + _kept_bytes(draft_reading(work), per)
    entries = slots(work.model, work.kind, Layout())
    layout = _page_layout(work.model, work.kind, Layout(), work.page, work.cache_dtype)
    kept = [(entries[entry.name].layers, slot) for entry in layout.entries for _, slot in entry.slots]
    return sum(layers * math.prod(slot.shape) * _itemsize(work, slot) for layers, slot in kept if slot.per == per)


def _itemsize(work: Workload, slot: Slot) -> int:
    return jnp.dtype(slot.dtype or work.page_dtype).itemsize
