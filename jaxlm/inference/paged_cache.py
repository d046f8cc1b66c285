"""The paged cache: what each layer keeps of earlier tokens, in pages that sequences take as they grow."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxlm.core.errors import InputError
from jaxlm.models.cache import CacheEntry, LayerCache, Slot
from jaxlm.models.operations import PagedSection, PagedView
from jaxlm.models.recording import Axes
from jaxlm.models.rows import RowContext
from jaxlm.parallel.partition import named_sharding
from jaxlm.parallel.rules import Rules
from kernels_pallas.flash_attention import KeyRange

Arrays = dict[str, dict[str, jax.Array]]  # by entry and slot, [P, …, S, H]


class PageLayout(NamedTuple):
    """The pages of a model's layers.

    `groups`: the windows after which layers free their pages, None for layers that read all: each group has pages of
    its own and a table for each sequence. `entries`: the group of each entry of the cache, and what it keeps. `size`:
    the tokens of a page.
    """

    groups: tuple[int | None, ...]
    entries: dict[str, tuple[int, CacheEntry]]
    size: int

    @classmethod
    def of(cls, entries: Mapping[str, CacheEntry], size: int) -> "PageLayout":
        """Return the layout for these entries, of one layer each. Raises InputError where one keeps a state of a whole
        sequence."""
        windows: list[int | None] = []
        found = {}
        for name, entry in entries.items():
            if any(slot.per == "sequence" for slot in entry.slots.values()):
                raise InputError(f"layers of {name} keep a state of each sequence, which the engine cannot page yet")
            reach = [slot.window for slot in entry.slots.values()]
            window = None if None in reach else max(reach, default=None)
            if window not in windows:
                windows.append(window)
            found[name] = windows.index(window), entry
        return cls(tuple(windows), found, size)

    def page_bytes(self, group: int, dtype: jnp.dtype, mesh: Mesh, rules: Rules) -> int:
        """Return the bytes on each device of one page of all layers of a group."""
        one = [1] * len(self.groups)
        shapes = jax.eval_shape(lambda: self.allocate(one, dtype))
        shardings = self.shardings(one, mesh, rules)
        return sum(
            math.prod(shardings[name][slot].shard_shape(x.shape)) * x.dtype.itemsize
            for name, (at, _) in self.entries.items()
            if at == group
            for slot, x in shapes[name].items()
        )

    def allocate(self, counts: Sequence[int], dtype: jnp.dtype) -> Arrays:
        """Return pages of zeros, `counts` of each group, in slots' own dtypes or this one."""

        def zeros(group: int, slot: Slot) -> jax.Array:
            shape = counts[group], *slot.shape[:-1], self.size, slot.shape[-1]
            return jnp.zeros(shape, slot.dtype or dtype)

        return {
            name: {slot: zeros(group, of) for slot, of in entry.slots.items()}
            for name, (group, entry) in self.entries.items()
        }

    def shardings(self, counts: Sequence[int], mesh: Mesh, rules: Rules) -> dict[str, dict[str, NamedSharding]]:
        """Return the shardings of the pages: heads lie as attention computes them."""
        shapes = jax.eval_shape(lambda: self.allocate(counts, jnp.dtype("float32")))
        return {
            name: {slot: named_sharding(_axes(of), shapes[name][slot].shape, mesh, rules) for slot, of in slots.items()}
            for name, (_, (_, slots)) in self.entries.items()
        }


def _axes(slot: Slot) -> Axes:
    """Return the logical axes of a slot's pages."""
    return None, *slot.axes[:-1], None, slot.axes[-1]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "tables", "position_R"],
    meta_fields=["group_of_entries", "rows"],
)
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The pages as one step reads and writes them.

    `arrays`: the pages. `tables`: of each group, for each section, int32 [Q, M]. `position_R`: of each row in its
    sequence, −1 for a row of padding, which writes to page 0. `group_of_entries`: the group of each entry. `rows`: of
    each sequence in a section. In a section with several rows, these follow one another from a multiple of their number
    on, so that they lie in one page; those after the last that is no padding may write what is read by nobody.
    """

    arrays: Arrays
    tables: tuple[tuple[jax.Array, ...], ...]
    position_R: jax.Array
    group_of_entries: tuple[tuple[str, int], ...]
    rows: tuple[int, ...]

    def layer(self, entry: str, index: jax.Array | int) -> "PagedLayer":
        """Return the cache of the layer of an entry, which has no other."""
        tables = self.tables[dict(self.group_of_entries)[entry]]
        sections = tuple(PagedSection(*each) for each in zip(tables, self.rows, strict=True))
        empty = jnp.zeros((len(self.position_R), 1), jnp.int32)
        return PagedLayer(self.arrays[entry], sections, self.position_R, KeyRange(empty, empty))

    def put(self, entry: str, layer: LayerCache) -> "PagedCache":
        """Return the cache with what a layer of an entry has stored."""
        assert isinstance(layer, PagedLayer), "a layer comes from `layer`"
        return dataclasses.replace(self, arrays={**self.arrays, entry: layer.arrays})

    def advance(self, lengths_B: jax.Array) -> "PagedCache":
        """Return itself: the scheduler knows how long sequences are."""
        return self


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "sections", "position_R", "key_range"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """One layer of a paged cache."""

    arrays: dict[str, jax.Array]
    sections: tuple[PagedSection, ...]
    position_R: jax.Array
    key_range: KeyRange

    def update(self, rows: RowContext, **new: jax.Array) -> "PagedLayer":
        """Write the rows' entries [R, 1, *shape], each at its position in the pages of its sequence."""
        arrays = dict(self.arrays)
        for name, x in new.items():
            arrays[name] = self._written(arrays[name], x[:, 0])
        return dataclasses.replace(self, arrays=arrays, key_range=rows.key_range)

    def _written(self, pages: jax.Array, new: jax.Array) -> jax.Array:
        """Write entries [R, …, H] into pages [P, …, S, H], one slice for each sequence."""
        new, at, size = new.astype(pages.dtype), 0, pages.shape[-2]
        inside = pages.ndim - 3  # dimensions of an entry before its last
        for section in self.sections:
            table_QM, rows = section.table, section.rows
            Q = len(table_QM)
            first_Q = self.position_R[at : at + Q * rows : rows]
            is_padding_Q = first_Q < 0
            first_Q = jnp.maximum(first_Q, 0)
            page_Q = jnp.take_along_axis(table_QM, (first_Q // size)[:, None], axis=1)[:, 0]
            page_Q, at_Q = jnp.where(is_padding_Q, 0, page_Q), first_Q % size
            part = new[at : at + Q * rows].reshape(Q, rows, *new.shape[1:])
            part = jnp.moveaxis(part, 1, -2)  # [Q, …, rows, H]

            def write(
                q: jax.Array,
                pages: jax.Array,
                part: jax.Array = part,
                page_Q: jax.Array = page_Q,
                at_Q: jax.Array = at_Q,
            ) -> jax.Array:
                start = (page_Q[q], *[0] * inside, at_Q[q], 0)
                return jax.lax.dynamic_update_slice(pages, part[q][None], start)

            pages = jax.lax.fori_loop(0, Q, write, pages)
            at += Q * rows
        return pages

    def view(self) -> PagedView:
        """Return the pages of the layer."""
        return PagedView(self.arrays, self.sections, self.key_range)
