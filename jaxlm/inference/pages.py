"""Pages of a key/value cache: an allocator that finds cached prefixes again. Imports no JAX."""

import hashlib
import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxlm.core.errors import InputError


class PageGroup(NamedTuple):
    """The pages of layers whose keys, or states, are freed at the same time.

    Attributes:
      count: pages of each of these layers, page 0 among them, which no sequence gets: padding rows write there.
      window: the last tokens that a token reads, itself included; None: all.
      interval: None: a page has the keys of its tokens. Otherwise it has the state after the last of them that was
        read, and states within texts stay where a multiple of so many tokens has been read, a multiple of the page.
    """

    count: int
    window: int | None = None
    interval: int | None = None


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
      tables: by group, the page ids of the sequence in order, as C ints; 0 where one is freed. Of states several pages
        in a row may be one, which then has the state after the last of them.
      tokens: the tokens that are written for certain, among those that have room. After `match`, the tokens whose keys
        are in the pages; the token after these tokens is written next.
      published: the whole pages, from the first, that `publish` has seen or `match` has found.
      hits: by group, what `match` found.
      branches: by their pages, the prefixes that were found, whole or but for a group, and that other texts go on from.
      begun: the pages that `match` has found.
      prompt_ends: by their pages, the longest prefixes that the same text, and one that goes on from it, may find.
    """

    __slots__ = ("tables", "tokens", "published", "salt", "prefix", "hits", "branches", "begun", "prompt_ends")

    def __init__(
        self,
        tables: list[array],
        salt: bytes,
        prefix: "_Prefix | None",
        published: int,
        size: int,
        hits: tuple[GroupHit, ...],
        branches: Collection[int],
        prompt_ends: Collection[int],
    ):
        self.tables, self.salt, self.prefix, self.hits, self.branches = tables, salt, prefix, hits, branches
        self.published, self.tokens = published, published * size
        self.begun, self.prompt_ends = published, prompt_ends

    def room(self, size: int) -> int:
        """Return the tokens that there are pages for, of `size` tokens each."""
        return min(len(table) for table in self.tables) * size


class _Prefix:
    """A prefix of whole pages that may be found: a node of a tree, and the last page's id in each group, or 0.

    `length`: its pages. `is_end`: a text or its prompt has ended here, or begun, as where texts differ.
    """

    __slots__ = ("digest", "parent", "salt", "tokens", "pages", "uses", "length", "is_end")

    def __init__(self, digest: bytes, parent: "_Prefix | None", salt: bytes, tokens: tuple[int, ...], groups: int):
        self.digest, self.parent, self.salt, self.tokens = digest, parent, salt, tokens
        self.pages = [0] * groups
        self.length, self.is_end = (parent.length if parent else 0) + 1, False
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

    def __init__(self, count: int, window: int | None, interval: int | None):
        self.count, self.window, self.interval = count, window, interval
        self.references = [0] * count
        self.free = list(range(count - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.passed: OrderedDict[int, None] = OrderedDict()
        self.prefix_of: dict[int, _Prefix] = {}  # of published pages

    @property
    def has_states(self) -> bool:
        return self.interval is not None

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

    def drop(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            if page in self.prefix_of:
                self.cached[page] = None
            else:
                self.free.append(page)


class Pages:
    """An allocator of pages with reference counts, which finds published prefixes again.

    Sequences share whole pages alone: a shared page is full, hence never written again, and nothing is ever copied.
    Samples of one prompt share its pages by `match` once the first sample has published them; each sample reads the
    rest of the prompt, less than a page and a token, for itself.

    Prefixes are keyed by chained SHA-256 of their pages under a salt, and compared on a hit. Pages that nobody holds
    stay until room is needed; then the least recently used go, of one sequence the last first. In a group with a window
    pages in the middle of texts go before those at their ends and where texts differ.

    States in the middle of texts stay only at multiples of the group's interval and where a text or its prompt has
    begun or ended. The others take no pages: a prompt writes the next state over the one before, so that a sequence
    that is read holds the state it goes on from, the one it writes, and those that will stay.

    Args:
      size: tokens of a page.

    `returns` counts the times that pages came back: after each time there may be room where there was none.
    """

    def __init__(self, groups: Sequence[PageGroup], size: int):
        if size < 1 or not groups or any(group.count < 2 for group in groups):
            raise InputError("a paged cache has a group of pages or more, 2 pages in each, and a token in a page")
        for group in groups:
            if group.interval is not None and (group.window != 2 or group.interval < 1 or group.interval % size):
                raise InputError(f"states, of window 2, stay at a multiple of their pages of {size} tokens: {group}")
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

    def match(self, tokens: Sequence[int], salt: bytes = b"", length: int | None = None) -> SequencePages:
        """Hold the pages of the longest prefix that every group has, as far as the token after it reads them.

        The prefix is of whole pages and leaves one token at least, to draw the next from. Only what was published under
        the same salt is found.

        Args:
          length: the tokens of the text, where it has more than those that may be found.
        """
        length = len(tokens) if length is None else length
        prompt_ends = length // self.size, (length - 1) // self.size
        path, begun, hits = self._cached(tokens, salt)
        last = path[begun - 1] if begun else None
        found = {begun, *(begun + hit.lacked // self.size for hit in hits)}
        branches = [pages for pages in found if pages and path[pages - 1].uses]
        tables = []
        for at, group in enumerate(self._groups):
            first = min(group.first_read(begun * self.size, self.size), begun)
            tables.append(array("i", [0] * first + [prefix.pages[at] for prefix in path[first:begun]]))
            for page in tables[-1][first:]:
                group.hold(page)
        if last is not None:
            last.uses += 1
        holding = SequencePages(tables, salt, last, begun, self.size, hits, branches, prompt_ends)
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

    def room(self, holding: SequencePages) -> int | float:
        """Return the most tokens in all that `extend` would give room now; infinite where one page of states does."""
        self._free_unread(holding)
        return min(
            math.inf
            if group.has_states and (group.available or self._may_overwrite(holding, table))
            else (len(table) + group.available) * self.size
            for group, table in zip(self._groups, holding.tables, strict=True)
        )

    def extend(self, holding: SequencePages, tokens: int, written: int | None = None) -> bool:
        """Give room for so many tokens in all, or return False and give none.

        Frees first the published pages that token `holding.tokens`, the next to be written, cannot read. To have room,
        cached pages are evicted.

        Args:
          written: how many of the tokens are written for certain before this is called again; None for all.
        """
        if self.room(holding) < tokens:
            return False
        written = tokens if written is None else written
        for at, table in enumerate(holding.tables):
            while len(table) * self.size < tokens:
                table.append(self._following(at, holding, written))
        if holding.prefix and holding.published == holding.begun:
            holding.prefix.is_end = True
        holding.tokens = max(holding.tokens, written)
        return True

    def _following(self, at: int, holding: SequencePages, written: int) -> int:
        """Hold a further page of a group and return it; for states the last page again, where the state in it need not
        stay, or no page is to spare beside one for each sequence."""
        group, table = self._groups[at], holding.tables[at]
        if not group.has_states or not self._may_overwrite(holding, table):
            return self._take(at)
        pages = len(table)
        stays = pages >= written // self.size or pages in holding.prompt_ends or pages in holding.branches
        stays = stays or not pages * self.size % group.interval
        return self._take(at) if stays and group.available > len(self._holdings) else table[-1]

    @staticmethod
    def _may_overwrite(holding: SequencePages, table: array) -> bool:
        """Return whether nobody else can have found the last page of a sequence."""
        return len(table) > holding.published and table[-1] != 0

    def has_room(
        self, holding: SequencePages, tokens: int, spare: int = 0, without: Collection[SequencePages] = ()
    ) -> bool:
        """Return whether a sequence could come to so many tokens, and leave `spare` pages in each group.

        Pages that only the holdings in `without` hold count as free.
        """
        for at, group in enumerate(self._groups):
            held = len(_pages(holding.tables[at]))
            shared = Counter(page for other in without for page in _pages(other.tables[at]))
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
                own, *following = holding.tables[at][index : index + 2]
                if own and not prefix.pages[at] and own not in following:
                    prefix.pages[at] = own
                    group.prefix_of[own] = prefix
            prefix.is_end |= index + 1 in holding.prompt_ends or index + 1 in holding.branches
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
            for page in reversed(_pages(table)):
                group.drop(page)
        if holding.prefix:
            holding.prefix.is_end |= holding.published > holding.begun
            holding.prefix.uses -= 1
            self._prune(holding.prefix)

    def _free_unread(self, holding: SequencePages) -> None:
        for at, (group, table) in enumerate(zip(self._groups, holding.tables, strict=True)):
            # The host knows what is drawn a dispatch later than it is written: a page is published before it goes.
            index = min(group.first_read(holding.tokens, self.size), holding.published, len(table)) - 1
            following = table[index + 1] if index + 1 < len(table) else 0
            while index >= 0 and (page := table[index]):
                if page != following:
                    group.drop(page)
                    if page in group.cached and not self._is_kept(group, holding, index):
                        self._pass_page(at, page)
                    self.returns += 1
                following, table[index] = page, 0
                index -= 1

    def _is_kept(self, group: _Group, holding: SequencePages, index: int) -> bool:
        """Return whether texts that go on from a sequence's end, or from its branches, read its page of this index."""
        ends = holding.published, *holding.branches
        return any(group.first_read(end * self.size, self.size) <= index < end for end in ends)

    def _pass_page(self, at: int, page: int) -> None:
        """Let a cached page in the middle of texts go before others; at once if it has a state that need not stay."""
        group, prefix = self._groups[at], self._groups[at].prefix_of[page]
        if group.has_states and not prefix.is_end and prefix.length * self.size % group.interval:
            self._forget(at, page)
        else:
            del group.cached[page]
            group.passed[page] = None

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
                self._pass_page(at, prefix.pages[at])

    def _take(self, at: int) -> int:
        """Hold a free page of a group, or the cached one of the least use."""
        group = self._groups[at]
        if not group.free:
            self._forget(at, next(iter(group.passed or group.cached)))
        group.hold(page := group.free.pop())
        return page

    def _forget(self, at: int, page: int) -> None:
        """Free a cached page, which is found no more."""
        group = self._groups[at]
        (group.passed if page in group.passed else group.cached).pop(page)
        group.free.append(page)
        prefix = group.prefix_of.pop(page)
        prefix.pages[at] = 0
        self._prune(prefix)

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
            held = Counter(page for holding in self._holdings for page in _pages(holding.tables[at]))
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


def _pages(table: array) -> list[int]:
    """Return the pages of a table in order, each once."""
    return [page for page in dict.fromkeys(table) if page]


def _root(salt: bytes) -> bytes:
    return hashlib.sha256(b"salt" + salt).digest()


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a page after others. Fields are told apart by their tags and fixed lengths."""
    return hashlib.sha256(b"page" + before + array("q", tokens).tobytes()).digest()
