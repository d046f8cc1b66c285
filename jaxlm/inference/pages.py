"""Pages of a key/value cache: an allocator that finds cached prefixes again. Imports no JAX."""

import hashlib
import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxlm.core.errors import InputError


class PageGroup(NamedTuple):
    """The pages of layers whose keys are freed at the same time.

    Attributes:
      count: pages of each of these layers, page 0 among them, which no sequence gets: padding rows write there.
      window: the last tokens that a token reads, itself included; None: all.
    """

    count: int
    window: int | None = None


class GroupHit(NamedTuple):
    """Tokens of a prompt that a group of pages has, and has not.

    Attributes:
      found: of the longest prefix of which this group has what a token after it reads.
      lacked: of a longer prefix than the one that is used, of which all other groups have that, and this one has not.
    """

    found: int = 0
    lacked: int = 0


def added(hits: Iterable[Sequence[GroupHit]]) -> list[GroupHit]:
    """Return the sums of hits, group by group."""
    return [GroupHit(*map(sum, zip(*each, strict=True))) for each in zip(*hits, strict=True)]


class SequencePages:
    """The pages of one sequence.

    Attributes:
      tables: by group, the page ids of the sequence in order, as C ints; 0 where one is freed.
      tokens: the tokens that are written for certain, among those that have room. After `match`, the tokens whose keys
        are in the pages; the token after these tokens is written next.
      published: the whole pages, from the first, that `publish` has seen or `match` has found.
      hits: by group, what `match` found.
      branches: by their pages, the prefixes that were found, whole or but for a group, and that other texts go on from.
    """

    __slots__ = ("tables", "tokens", "published", "salt", "prefix", "hits", "branches")

    def __init__(
        self,
        tables: list[array],
        salt: bytes,
        prefix: "_Prefix | None",
        published: int,
        size: int,
        hits: tuple[GroupHit, ...],
        branches: Collection[int],
    ):
        self.tables, self.salt, self.prefix, self.hits, self.branches = tables, salt, prefix, hits, branches
        self.published, self.tokens = published, published * size

    def room(self, size: int) -> int:
        """Return the tokens that there are pages for, of `size` tokens each."""
        return min(len(table) for table in self.tables) * size


class _Prefix:
    """A prefix of whole pages that may be found: a node of a tree, and the last page's id in each group, or 0."""

    __slots__ = ("digest", "parent", "salt", "tokens", "pages", "uses")

    def __init__(self, digest: bytes, parent: "_Prefix | None", salt: bytes, tokens: tuple[int, ...], groups: int):
        self.digest, self.parent, self.salt, self.tokens = digest, parent, salt, tokens
        self.pages = [0] * groups
        self.uses = 0  # children in the tree, and holdings whose last published page this is

    def is_of(self, parent: "_Prefix | None", salt: bytes, tokens: tuple[int, ...]) -> bool:
        """Compare all that the digest stands for: a collision gives nobody another's keys."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


class _Found(NamedTuple):
    """The prefixes of a sequence that are known, page by page, how many of them may be held, and why no more."""

    path: list[_Prefix]
    length: int
    hits: tuple[GroupHit, ...]


class _Group:
    """The pages of one group: free, cached (published, held by none, the least recently used first), or held.

    `passed`: cached pages that sequences with a window have left behind, each of use only to a text that differs from
    there on. They go before the others, among which are the ends of texts, from which the next turn of a conversation
    goes on.
    """

    def __init__(self, count: int, window: int | None):
        self.count, self.window = count, window
        self.references = [0] * count
        self.free = list(range(count - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.passed: OrderedDict[int, None] = OrderedDict()
        self.prefix_of: dict[int, _Prefix] = {}  # of published pages

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached) + len(self.passed)

    def first_read(self, token: int, size: int) -> int:
        """Return the index of the first page that this token, or a later one, reads."""
        return 0 if self.window is None else max(token - self.window + 1, 0) // size

    def most_held(self, tokens: int, size: int) -> int:
        """Return the pages that a sequence of so many tokens holds at a time, if it is read token by token."""
        pages = -(-tokens // size)
        return pages if self.window is None else min(pages, (self.window + size - 2) // size + 1)

    def capacity(self, size: int) -> int | float:
        """Return the most tokens of one sequence; infinite where the pages of a window suffice."""
        is_endless = self.most_held(self.count * size, size) < self.count
        return math.inf if is_endless else (self.count - 1) * size

    def hold(self, page: int) -> None:
        self.cached.pop(page, None)
        self.passed.pop(page, None)
        self.references[page] += 1

    def drop(self, page: int, is_passed: bool = False) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            if page not in self.prefix_of:
                self.free.append(page)
            elif is_passed:
                self.passed[page] = None
            else:
                self.cached[page] = None

    def evict(self) -> int:
        """Return the cached page that is of the least use, which is published no more."""
        page, _ = (self.passed or self.cached).popitem(last=False)
        return page


class Pages:
    """An allocator of pages with reference counts, which finds published prefixes again.

    Sequences share whole pages alone: a shared page is full, hence never written again, and nothing is ever copied.
    Samples of one prompt share its pages by `match` once the first sample has published them; each sample reads the
    rest of the prompt, less than a page and a token, for itself.

    Prefixes are keyed by chained SHA-256 of their pages under a salt, and compared on a hit. Pages that nobody holds
    stay until room is needed; then the least recently used go, of one sequence the last first. In a group with a window
    pages in the middle of texts go before those at their ends and where texts differ.

    Args:
      size: tokens of a page.

    `returns` counts the times that pages came back: after each time there may be room where there was none.
    """

    def __init__(self, groups: Sequence[PageGroup], size: int):
        if size < 1 or not groups or any(count < 2 for count, _ in groups):
            raise InputError("a paged cache has a group of pages or more, 2 pages in each, and a token in a page")
        self.size = size
        self._groups = [_Group(*group) for group in groups]
        self._prefixes: dict[bytes, _Prefix] = {}
        self._holdings: set[SequencePages] = set()
        self.returns = 0

    @property
    def held(self) -> tuple[int, ...]:
        """The pages of each group that sequences hold."""
        return tuple(group.count - 1 - group.available for group in self._groups)

    @property
    def cached(self) -> tuple[int, ...]:
        """The pages of each group that nobody holds and that may be found."""
        return tuple(len(group.cached) + len(group.passed) for group in self._groups)

    @property
    def capacity(self) -> int | float:
        """The most tokens that one sequence can have when it is alone; infinite where all layers have windows."""
        return min(group.capacity(self.size) for group in self._groups)

    def fits(self, tokens: int) -> bool:
        """Return whether a sequence of so many tokens can ever run, alone."""
        return tokens <= self.capacity

    def cached_tokens(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Return the tokens of the prefix that `match` would find."""
        return self._cached(tokens, salt).length * self.size

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> SequencePages:
        """Hold the pages of the longest prefix that every group has, as far as the token after it reads them.

        The prefix is of whole pages and leaves one token at least, to draw the next from. Only what was published under
        the same salt is found.
        """
        path, length, hits = self._cached(tokens, salt)
        last = path[length - 1] if length else None
        found = {length, *(length + hit.lacked // self.size for hit in hits)}
        branches = [pages for pages in found if pages and path[pages - 1].uses]
        tables = []
        for at, group in enumerate(self._groups):
            first = min(group.first_read(length * self.size, self.size), length)
            tables.append(array("i", [0] * first + [prefix.pages[at] for prefix in path[first:length]]))
            for page in tables[-1][first:]:
                group.hold(page)
        if last is not None:
            last.uses += 1
        holding = SequencePages(tables, salt, last, length, self.size, hits, branches)
        self._holdings.add(holding)
        return holding

    def _cached(self, tokens: Sequence[int], salt: bytes) -> "_Found":
        """Return what is known of a sequence."""
        parent, digest, groups = None, _root(salt), range(len(self._groups))
        run = [0 for _ in groups]  # pages without a gap, up to this one
        whole, path = 0, []
        alone, without = [0 for _ in groups], [0 for _ in groups]  # pages of prefixes of a group, and of all others
        for end in range(self.size, len(tokens), self.size):
            content = tuple(tokens[end - self.size : end])
            digest = _digest(digest, content)
            prefix = self._prefixes.get(digest)
            if prefix is None or not prefix.is_of(parent, salt, content):
                break
            path.append(prefix)
            run = [run[at] + 1 if page else 0 for at, page in enumerate(prefix.pages)]
            lacking = [at for at, n in enumerate(run) if n < len(path) - self._groups[at].first_read(end, self.size)]
            whole = whole if lacking else len(path)
            for at in groups:
                alone[at] = alone[at] if at in lacking else len(path)
                without[at] = len(path) if lacking in ([], [at]) else without[at]
            parent = prefix
        # One group alone lacks nothing that others have.
        hits = (
            GroupHit(n * self.size, (m - whole) * self.size * (len(groups) > 1))
            for n, m in zip(alone, without, strict=True)
        )
        return _Found(path, whole, tuple(hits))

    def room(self, holding: SequencePages) -> int:
        """Return the most tokens in all that `extend` would give room now."""
        self._free_unread(holding)
        return min(
            (len(table) + group.available) * self.size
            for group, table in zip(self._groups, holding.tables, strict=True)
        )

    def extend(self, holding: SequencePages, tokens: int, written: int | None = None) -> bool:
        """Give room for so many tokens in all, or return False and give none.

        Frees first the pages that token `holding.tokens`, the next to be written, cannot read. To have room, cached
        pages are evicted.

        Args:
          written: how many of the tokens are written for certain before this is called again; None for all.
        """
        if self.room(holding) < tokens:
            return False
        for at, table in enumerate(holding.tables):
            while len(table) * self.size < tokens:
                table.append(self._take(at))
        holding.tokens = max(holding.tokens, tokens if written is None else written)
        return True

    def has_room(
        self, holding: SequencePages, tokens: int, spare: int = 0, without: Collection[SequencePages] = ()
    ) -> bool:
        """Return whether a sequence could come to so many tokens, and leave `spare` pages in each group.

        Pages that only the holdings in `without` hold count as free.
        """
        for at, group in enumerate(self._groups):
            held = sum(map(bool, holding.tables[at]))
            shared = Counter(page for other in without for page in other.tables[at] if page)
            freed = sum(times == group.references[page] for page, times in shared.items())
            if group.most_held(tokens, self.size) - held + spare > group.available + freed:
                return False
        return True

    def publish(self, holding: SequencePages, tokens: Sequence[int]) -> None:
        """Let others find the whole pages among the sequence's first tokens, whose keys must have been dispatched."""
        for index in range(holding.published, len(tokens) // self.size):
            parent = holding.prefix
            content = tuple(tokens[index * self.size : (index + 1) * self.size])
            digest = _digest(parent.digest if parent else _root(holding.salt), content)
            prefix = self._prefixes.get(digest)
            if prefix is None:
                prefix = self._prefixes[digest] = _Prefix(digest, parent, holding.salt, content, len(self._groups))
                if parent:
                    parent.uses += 1
            elif not prefix.is_of(parent, holding.salt, content):
                return  # a collision: the published prefix stays
            for at, group in enumerate(self._groups):
                own = holding.tables[at][index]
                if own and not prefix.pages[at]:
                    prefix.pages[at] = own
                    group.prefix_of[own] = prefix
            prefix.uses += 1
            if parent:
                parent.uses -= 1
            holding.prefix, holding.published = prefix, index + 1
            self._pass(holding)

    def release(self, holding: SequencePages) -> None:
        """Give back all pages. Raises KeyError for a holding that was released."""
        self._holdings.remove(holding)
        self._free_unread(holding)
        self.returns += 1
        for group, table in zip(self._groups, holding.tables, strict=True):
            for page in reversed(table):
                if page:
                    group.drop(page)
        if holding.prefix:
            holding.prefix.uses -= 1
            self._prune(holding.prefix)

    def _free_unread(self, holding: SequencePages) -> None:
        for group, table in zip(self._groups, holding.tables, strict=True):
            index = min(group.first_read(holding.tokens, self.size), len(table)) - 1
            while index >= 0 and table[index]:
                group.drop(table[index], is_passed=not self._is_kept(group, holding, index))
                table[index] = 0
                self.returns += 1
                index -= 1

    def _is_kept(self, group: _Group, holding: SequencePages, index: int) -> bool:
        """Return whether texts that go on from a sequence's end, or from its branches, read its page of this index."""
        ends = holding.published, *holding.branches
        return any(group.first_read(end * self.size, self.size) <= index < end for end in ends)

    def _pass(self, holding: SequencePages) -> None:
        """Let the page go first that was kept for the end of a sequence, whose end is a page further now."""
        for at, group in enumerate(self._groups):
            index = group.first_read((holding.published - 1) * self.size, self.size)
            if self._is_kept(group, holding, index):
                continue
            prefix = holding.prefix
            for _ in range(holding.published - 1 - index):
                prefix = prefix.parent
            if prefix.pages[at] in group.cached:
                del group.cached[prefix.pages[at]]
                group.passed[prefix.pages[at]] = None

    def _take(self, at: int) -> int:
        """Hold a free page of a group, or evict one."""
        group = self._groups[at]
        if group.free:
            page = group.free.pop()
        else:
            page = group.evict()
            prefix = group.prefix_of.pop(page)
            prefix.pages[at] = 0
            self._prune(prefix)
        group.hold(page)
        return page

    def _prune(self, prefix: _Prefix | None) -> None:
        """Forget a prefix that has no page and that nothing continues, and then those before it."""
        while prefix and not prefix.uses and not any(prefix.pages):
            del self._prefixes[prefix.digest]
            prefix = prefix.parent
            if prefix:
                prefix.uses -= 1

    def check(self) -> None:
        """Raise AssertionError unless every page is free, cached or held, once, and all references are counted."""
        for at, group in enumerate(self._groups):
            held = Counter(page for holding in self._holdings for page in holding.tables[at] if page)
            assert group.references == [held[page] for page in range(group.count)], "references"
            cached = [*group.cached, *group.passed]
            assert sorted([*group.free, *cached, *held]) == [*range(1, group.count)], "each page is in one place"
            assert {*cached} == group.prefix_of.keys() - held.keys(), "cached pages are the published ones"
            published = {prefix.pages[at]: prefix for prefix in self._prefixes.values() if prefix.pages[at]}
            assert published == group.prefix_of, "published pages are those that are found"
        uses = Counter(filter(None, self._used()))
        for digest, prefix in self._prefixes.items():
            assert prefix.digest == digest and prefix.uses == uses.pop(prefix, 0), "uses of a prefix"
            assert prefix.uses or any(prefix.pages), "a prefix without use"
        assert not uses, "a prefix in use is found"

    def _used(self) -> Iterator[_Prefix | None]:
        yield from (holding.prefix for holding in self._holdings)
        yield from (prefix.parent for prefix in self._prefixes.values())


def _root(salt: bytes) -> bytes:
    return hashlib.sha256(b"salt" + salt).digest()


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a page after others. Fields are told apart by their tags and fixed lengths."""
    return hashlib.sha256(b"page" + before + array("q", tokens).tobytes()).digest()
