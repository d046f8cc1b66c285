"""The paged cache: what each layer keeps of earlier tokens, in pages that sequences take as they grow."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxlm.core.errors import InputError
from jaxlm.inference.narrow_pages import narrowed, rounded
from jaxlm.inference.settings import CacheDtype
from jaxlm.models.cache import CacheEntry, LayerCache, Slot
from jaxlm.models.doors.scan import ChunkRows, Recurrence, States, TokenArray, chunk_tokens, scan, where_rows
from jaxlm.models.logical_axes import Axes
from jaxlm.models.rows import RowContext
from jaxlm.models.views import PagedSection, PagedView, RowRuns
from jaxlm.parallel.collectives import all_parts, own_part, parts_of
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.layout_choice import describe_axes
from jaxlm.parallel.partition import named_sharding
from jaxlm.parallel.rules import Rules
from kernels_pallas.core import target
from kernels_pallas.flash_attention import KeyRange

Arrays = dict[str, dict[str, jax.Array]]  # by entry and slot, [P, …, S, H], or [P, …, H, S]


_STATE_WINDOW = 2  # a token reads the state after the one before it, and writes its own


class PagedEntry(NamedTuple):
    """The pages of an entry of the cache, which is of one layer.

    `slots`: what the layer keeps, by name. `tokens`, `states`: the groups of its slots of tokens and of its slots
    of states, None where the entry has no such slots.
    """

    name: str
    slots: tuple[tuple[str, Slot], ...]
    tokens: int | None
    states: int | None

    def group(self, slot: Slot) -> int | None:
        """Return the group of one of the slots."""
        return self.tokens if slot.per == "token" else self.states


class PageLayout(NamedTuple):
    """The pages of a model's layers.

    A page holds the entries of its tokens, or the state of the sequence after the last of its tokens that was read: so
    the pages of a prefix hold its state too, and a sequence that finds them goes on from it.

    `groups`: the windows after which layers free their pages, None for layers that read all: each group has pages of
    its own and a table for each sequence. `size`: the tokens of a page. `row_by_row`: states are carried through one
    row after the other, so that a token's bits depend neither on where a prompt is cut nor on whether it is drawn.
    """

    groups: tuple[int | None, ...]
    entries: tuple[PagedEntry, ...]
    size: int
    row_by_row: bool = False

    @classmethod
    def of(
        cls,
        entries: Mapping[str, CacheEntry],
        size: int,
        dtype: CacheDtype | None = None,
        *,
        row_by_row: bool = False,
    ) -> "PageLayout":
        """Return the layout for these entries, of one layer each, with what they keep of tokens in eight bits or as
        layers compute it."""
        entries = entries if dtype is None else narrowed(entries, dtype)
        groups: list[tuple[Literal["token", "sequence"], int | None]] = []

        def group(per: Literal["token", "sequence"], window: int | None) -> int:
            if (per, window) not in groups:
                groups.append((per, window))
            return groups.index((per, window))

        paged = []
        for name, entry in entries.items():
            reach = [slot.window for slot in entry.slots.values() if slot.per == "token"]
            tokens = group("token", None if None in reach else max(reach)) if reach else None
            states = group("sequence", _STATE_WINDOW) if len(reach) < len(entry.slots) else None
            paged.append(PagedEntry(name, tuple(entry.slots.items()), tokens, states))
        return cls(tuple(window for _, window in groups), tuple(paged), size, row_by_row)

    @property
    def carries_states(self) -> bool:
        """True where a layer keeps states of sequences, each after the token read last."""
        return self.state_group is not None

    @property
    def state_group(self) -> int | None:
        """The group of states; None where no layer keeps any."""
        return next((entry.states for entry in self.entries if entry.states is not None), None)

    def check_shared(self, layout: Layout, rules: Rules) -> None:
        """Raise InputError for states of sequences where a mesh shares out the rows of a prompt: each reads the state
        after the row before it."""
        over = rules.over("tiles")
        if (parts := layout.over(over)) > 1 and self.carries_states:
            raise InputError(
                f"{describe_axes(over)} = {parts} shares out the rows of a prompt, which recurrent layers read in "
                "order: set it to 1 for this model"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each group: `states`, or of tokens `attention` or `window=1024`."""
        return tuple(
            "states" if group == self.state_group else "attention" if window is None else f"window={window}"
            for group, window in enumerate(self.groups)
        )

    def page_bytes(self, group: int, dtype: jnp.dtype, mesh: Mesh, rules: Rules) -> int:
        """Return the bytes on each device of one page of all layers of a group."""
        one = [1] * len(self.groups)
        shapes = jax.eval_shape(lambda: self.allocate(one, dtype))
        shardings = self.shardings(one, mesh, rules)
        return sum(
            math.prod(shardings[entry.name][name].shard_shape(x.shape)) * x.dtype.itemsize
            for entry in self.entries
            for name, slot in entry.slots
            if entry.group(slot) == group
            for x in [shapes[entry.name][name]]
        )

    def allocate(self, counts: Sequence[int], dtype: jnp.dtype) -> Arrays:
        """Return pages of zeros, `counts` of each group on all shards, in slots' own dtypes or this one."""

        def zeros(entry: PagedEntry, slot: Slot) -> jax.Array:
            group = entry.group(slot)
            assert group is not None, "there is a group for each slot"
            return jnp.zeros((counts[group], *_with_tokens(slot, slot.shape, self.size)), slot.dtype or dtype)

        return {each.name: {name: zeros(each, slot) for name, slot in each.slots} for each in self.entries}

    def shardings(self, counts: Sequence[int], mesh: Mesh, rules: Rules) -> dict[str, dict[str, NamedSharding]]:
        """Return the shardings of the pages: each shard of a batch has pages of its own, whose heads lie as attention
        computes them."""
        shapes = jax.eval_shape(lambda: self.allocate(counts, jnp.dtype("float32")))

        def sharding(entry: PagedEntry, name: str, slot: Slot) -> NamedSharding:
            axes = "batch", *_with_tokens(slot, slot.axes, None)
            return named_sharding(axes, shapes[entry.name][name].shape, mesh, rules)

        return {each.name: {name: sharding(each, name, slot) for name, slot in each.slots} for each in self.entries}


def _with_tokens(slot: Slot, entry: tuple, tokens: Any) -> tuple:
    """Return the values of an entry's axes, with `tokens` at the axis of a page's tokens; a state has no such axis."""
    if slot.per == "sequence":
        return entry
    return (*entry, tokens) if slot.tokens_last else (*entry[:-1], tokens, entry[-1])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "tables", "position_R", "runs"],
    meta_fields=["layout", "rows", "drafts"],
)
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The pages as one step reads and writes them.

    `arrays`: the pages. `tables`: of each group, for each section, int32 [Q, M]. `position_R`: of each row in its
    sequence, −1 for a row of padding, which writes to page 0. `rows`: of each sequence in a section. In a section with
    several rows, the rows of a sequence follow one another from a multiple of their number on, so that they lie in one
    page; rows of padding at the end may write entries that nobody reads. Runs of one sequence in such a section come in
    order. `drafts`: the rows before a row that may write to its page, in a section of one row; and
    `runs`, which rows these are.
    """

    arrays: Arrays
    tables: tuple[tuple[jax.Array, ...], ...]
    position_R: jax.Array
    layout: PageLayout
    rows: tuple[int, ...]
    drafts: int = 0
    runs: RowRuns | None = None

    def layer(self, entry: str, index: jax.Array | int) -> "PagedLayer":
        """Return the cache of the one layer of an entry."""
        (paged,) = (each for each in self.layout.entries if each.name == entry)
        empty = jnp.zeros((len(self.position_R), 1), jnp.int32)
        return PagedLayer(
            pages={name: self.arrays[entry][name] for name, slot in paged.slots if slot.per == "token"},
            states={name: self.arrays[entry][name] for name, slot in paged.slots if slot.per == "sequence"},
            of_tokens=self._sections(paged.tokens),
            of_states=self._sections(paged.states),
            read=self._read(paged.tokens),
            position_R=self.position_R,
            key_range=KeyRange(empty, empty),
            size=self.layout.size,
            drafts=self.drafts,
            slots=paged.slots,
            row_by_row=self.layout.row_by_row,
        )

    def _sections(self, group: int | None) -> tuple[PagedSection, ...]:
        """Return the sections of the rows with their pages of a group; empty without a group."""
        if group is None:
            return ()
        sections = zip(self.tables[group], self.rows, strict=True)
        return tuple(PagedSection(table, rows, self.runs if rows == 1 else None) for table, rows in sections)

    def _read(self, group: int | None) -> tuple[PagedSection, ...]:
        """Return the sections of the rows that this device reads."""
        return tuple(
            each if each.rows == 1 else replace(each, table=own_part(each.table, "tiles"))
            for each in self._sections(group)
        )

    def put(self, entry: str, layer: LayerCache) -> "PagedCache":
        """Return the cache with what a layer of an entry has stored."""
        assert isinstance(layer, PagedLayer), "a layer comes from `layer`"
        return dataclasses.replace(self, arrays={**self.arrays, entry: {**layer.pages, **layer.states}})

    def advance(self, lengths_B: jax.Array) -> "PagedCache":
        """Return itself: the scheduler knows how long sequences are."""
        return self


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "states", "of_tokens", "of_states", "read", "position_R", "key_range"],
    meta_fields=["size", "drafts", "slots", "row_by_row"],
)
@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """One layer of a paged cache.

    `pages`: of tokens, by slot. `states`: by slot, [P, *shape], one in each page. `of_tokens`, `of_states`: the
    sections of the rows, with their pages of tokens and of states. `read`: those of tokens of the rows that this device
    reads. `size`: tokens of a page. `drafts`: as `PagedCache` has it. `slots`: as `PagedEntry` has them. `row_by_row`:
    as `PageLayout` has it.
    """

    pages: dict[str, jax.Array]
    states: dict[str, jax.Array]
    of_tokens: tuple[PagedSection, ...]
    of_states: tuple[PagedSection, ...]
    read: tuple[PagedSection, ...]
    position_R: jax.Array
    key_range: KeyRange
    size: int
    drafts: int
    slots: tuple[tuple[str, Slot], ...]
    row_by_row: bool

    @property
    def tokens_last(self) -> frozenset[str]:
        """The slots whose pages have the axis of tokens last."""
        return frozenset(name for name, slot in self.slots if slot.tokens_last)

    def update(self, rows: RowContext, **new: jax.Array) -> "PagedLayer":
        """Write the rows' entries [R, 1, *shape], each at its position in the pages of its sequence. Devices that share
        out the rows send one another theirs: each has all pages."""
        kept = rounded(self.pages, {name: x[:, 0] for name, x in new.items()})
        written = {name: self._written(name, x) for name, x in kept.items()}
        return dataclasses.replace(self, pages={**self.pages, **written}, key_range=rows.key_range)

    def _of_all_rows(self, name: str, x: jax.Array) -> jax.Array:
        """Return the entries [R, …] of a slot of all rows, of those that this device reads."""
        if parts_of("tiles") == 1 or len(self.read) == 1:
            return x
        decode, tiles = self.read
        own = x[len(decode.table) :].reshape(len(tiles.table), tiles.rows, *x.shape[1:])
        whole = all_parts(own, "tiles", None, *dict(self.slots)[name].axes)
        return jnp.concatenate([x[: len(decode.table)], whole.reshape(-1, *x.shape[1:])])

    def _written(self, name: str, new: jax.Array) -> jax.Array:
        """Write the rows' entries [R, …, H] into the pages of a slot."""
        pages = self.pages[name]
        new = self._of_all_rows(name, new.astype(pages.dtype))
        tokens = pages.ndim - (1 if name in self.tokens_last else 2)  # the axis of a page
        # A GPU would be launched once for each trip of a loop. On a CPU XLA scatters number by number, and for a TPU it
        # would lay all pages out otherwise and back.
        return (self._scattered if target.platform() == "gpu" else self._by_section)(pages, new, tokens)

    def _scattered(self, pages: jax.Array, new: jax.Array, tokens: int) -> jax.Array:
        """Write entries into pages, whose tokens have this axis, at once; none of padding."""
        parts, at = [], 0
        for section in self.of_tokens:
            page_Q, _ = self._places(section, at)
            parts.append(jnp.repeat(page_Q, section.rows))
            at += len(page_Q) * section.rows
        page_R, position_R = jnp.concatenate(parts), self.position_R
        index: list[Any] = [slice(None)] * pages.ndim
        beyond = len(pages)
        index[0], index[tokens] = jnp.where(position_R < 0, beyond, page_R), jnp.maximum(position_R, 0) % self.size
        return pages.at[tuple(index)].set(new, mode="drop")

    def _by_section(self, pages: jax.Array, new: jax.Array, tokens: int) -> jax.Array:
        """Write entries into pages, whose tokens have this axis, one slice for each run; on a TPU single entries of
        sequences at once."""
        at, at_once = 0, target.platform() == "tpu"
        for section in self.of_tokens:
            page_Q, first_Q = self._places(section, at)
            at_Q = jnp.maximum(first_Q, 0) % self.size
            part = _in_runs(new, at, section)
            part = jnp.moveaxis(part, 1, tokens)  # [Q, …, rows, H], or rows last

            def write(
                q: jax.Array,
                pages: jax.Array,
                part: jax.Array = part,
                page_Q: jax.Array = page_Q,
                at_Q: jax.Array = at_Q,
            ) -> jax.Array:
                start = [page_Q[q], *[0] * (pages.ndim - 1)]
                start[tokens] = at_Q[q]
                return jax.lax.dynamic_update_slice(pages, part[q][None], start)

            if section.rows == 1 and at_once:
                # Rows of drafts may lie in one page, which a scatter writes once: one after the other.
                none, before_Q = len(pages), _before_in_page(page_Q, first_Q, self.drafts)
                for before in range(1 + self.drafts):
                    written_Q = jnp.where((first_Q >= 0) & (before_Q == before), page_Q, none)
                    pages = _in_whole_pages(pages, part, written_Q, at_Q, tokens)
            else:
                pages = jax.lax.fori_loop(0, len(page_Q), write, pages)
            at += len(page_Q) * section.rows
        return pages

    def _places(self, section: PagedSection, at: int, back: int = 0) -> tuple[jax.Array, jax.Array]:
        """Return the page of the token that is `back` before the first token of each run [Q], 0 where the run is
        padding or has no such token; and the position of the first token. `at`: the section's first row."""
        first_Q = self.position_R[at : at + len(section.table) * section.rows : section.rows]
        index_Q1 = (jnp.maximum(first_Q - back, 0) // self.size)[:, None]
        page_Q = jnp.take_along_axis(section.table, index_Q1, axis=1)[:, 0]
        return jnp.where(first_Q < back, 0, page_Q), first_Q

    def scan(self, rows: RowContext, recurrence: Recurrence, *inputs: TokenArray) -> tuple[jax.Array, "PagedLayer"]:
        """Carry the states of the rows' sequences through inputs [R, 1, …].

        `row_by_row`, or else sequences of one row are carried together, and runs of several rows one after the other,
        since a run may go on from the run before.
        """
        tokens_R = ChunkRows(rows.is_token_BT[:, 0], rows.begins_BT[:, 0])
        arrays_R, axes = [x[:, 0] for x, _ in inputs], [each for _, each in inputs]
        if self.row_by_row and chunk_tokens(recurrence.size, recurrence.operation, target.platform()) is not None:
            recurrence = recurrence._replace(size=1)
            states, outputs_R = _scan_rows(recurrence, axes, self.states, self._each_row(tokens_R, arrays_R))
            return outputs_R[:, None], dataclasses.replace(self, states=states)
        states, outputs, at = self.states, [], 0
        for section in self.of_states:
            (from_Q, first_Q), (to_Q, _) = self._places(section, at, back=1), self._places(section, at)
            tokens_QT, arrays_QT = jax.tree.map(partial(_in_runs, at=at, section=section), (tokens_R, arrays_R))
            runs = _Runs(from_Q, to_Q, first_Q, tokens_QT, arrays_QT)
            carry = partial(_scan_runs, recurrence, axes)
            if section.rows == 1:
                states, outputs_QT = carry(states, runs)
            else:
                states, outputs_Q1T = jax.lax.scan(carry, states, jax.tree.map(lambda x: x[:, None], runs))
                outputs_QT = outputs_Q1T[:, 0]
            outputs.append(outputs_QT.reshape(-1, 1, *outputs_QT.shape[2:]))
            at += len(to_Q) * section.rows
        return jnp.concatenate(outputs), dataclasses.replace(self, states=states)

    def _each_row(self, tokens_R: ChunkRows, arrays_R: list[jax.Array]) -> "_Runs":
        """Return each row as a run of its own."""
        tables = [jnp.repeat(section.table, section.rows, axis=0) for section in self.of_states]
        whole = PagedSection(jnp.concatenate(tables), 1)
        (from_R, first_R), (to_R, _) = self._places(whole, 0, back=1), self._places(whole, 0)
        tokens_R1, arrays_R1 = jax.tree.map(lambda x: x[:, None], (tokens_R, arrays_R))
        return _Runs(from_R, to_R, first_R, tokens_R1, arrays_R1)

    @property
    def is_own_pass(self) -> bool:
        """False: pages hold earlier tokens."""
        return False

    def view(self) -> PagedView:
        """Return the pages of the layer's tokens."""
        return PagedView(self.pages, self.read, self.key_range, self.tokens_last)


def _in_whole_pages(pages: jax.Array, new: jax.Array, page_Q: jax.Array, at_Q: jax.Array, tokens: int) -> jax.Array:
    """Write one entry [Q, …, 1, H], or [Q, …, H, 1], into each of these pages, at a place of the axis `tokens`; of
    pages beyond the last none. The pages are read, changed and written: XLA does so in place, whatever their layout."""
    of_page = [1] * (pages.ndim - 1)
    is_new = jax.lax.broadcasted_iota(jnp.int32, (1, *pages.shape[1:]), tokens) == at_Q.reshape(-1, *of_page)
    return pages.at[page_Q].set(jnp.where(is_new, new, pages[page_Q]), mode="drop")


def _before_in_page(page_Q: jax.Array, position_Q: jax.Array, most: int) -> jax.Array:
    """Return how many of at most so many rows before each one write to its page, int32 [Q]."""
    before_Q = jnp.zeros_like(page_Q)
    for back in range(1, most + 1):
        is_same_Q = (page_Q == jnp.roll(page_Q, back)) & (jnp.roll(position_Q, back) == position_Q - back)
        before_Q += is_same_Q & (jnp.arange(len(page_Q)) >= back)
    return before_Q


class _Runs(NamedTuple):
    """Runs of rows, each of one sequence: the pages that its state comes from and goes to, the position of the first
    row, which of the rows are tokens, and the inputs of the recurrence."""

    from_Q: jax.Array
    to_Q: jax.Array
    first_Q: jax.Array
    rows_QT: ChunkRows
    inputs_QT: list[jax.Array]


def _before(recurrence: Recurrence, states: States, from_Q: jax.Array, first_Q: jax.Array) -> States:
    """Return the states before runs: at the beginning of a sequence the first, whatever the page holds."""
    return {
        name: where_rows(first_Q <= 0, first, states[name][from_Q])
        for name, first in recurrence.initial_states(1).items()
    }


def _scan_runs(recurrence: Recurrence, axes: list[Axes], states: States, runs: _Runs) -> tuple[States, jax.Array]:
    """Carry states through runs of which no two are of one sequence. Return the pages of states, and the outputs."""
    before = _before(recurrence, states, runs.from_Q, runs.first_Q)
    outputs_QT, after = scan(recurrence, before, runs.rows_QT, *zip(runs.inputs_QT, axes, strict=True))
    states = states | {name: states[name].at[runs.to_Q].set(x) for name, x in after.items()}
    # Otherwise XLA may write the states of all layers at the end of a step, and keep them until then.
    return jax.lax.optimization_barrier((states, outputs_QT))


def _scan_rows(recurrence: Recurrence, axes: list[Axes], states: States, runs: _Runs) -> tuple[States, jax.Array]:
    """Carry states through runs of one row, one after the other. Return the pages of states, and the outputs [R, …].

    In a loop XLA computes a row in one way however many there are. Each trip writes the states after its row before it
    reads those of the next: where it wrote what it had read, XLA would copy all pages.
    """

    def one(carry: tuple[States, States], trip: tuple[_Runs, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (states, before), (run, from_1, first_1) = carry, trip
        outputs_11, after = scan(recurrence, before, run.rows_QT, *zip(run.inputs_QT, axes, strict=True))
        written = {
            name: jax.lax.dynamic_update_index_in_dim(states[name], x[0].astype(states[name].dtype), run.to_Q[0], 0)
            for name, x in after.items()
        }
        states = states | written
        return (states, _before(recurrence, states, from_1, first_1)), outputs_11[0, 0]

    each: _Runs = jax.tree.map(lambda x: x[:, None], runs)
    from_R1, first_R1 = each.from_Q, each.first_Q
    begun = states, _before(recurrence, states, from_R1[0], first_R1[0])
    following = jnp.roll(from_R1, -1, axis=0), jnp.roll(first_R1, -1, axis=0)
    (states, _), outputs_R = jax.lax.scan(one, begun, (each, *following))
    return states, outputs_R


def _in_runs(x: jax.Array, at: int, section: PagedSection) -> jax.Array:
    """Return the rows of a section, from `at` on, as [Q, rows, ...]."""
    Q = len(section.table)
    return x[at : at + Q * section.rows].reshape(Q, section.rows, *x.shape[1:])
