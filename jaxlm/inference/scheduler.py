"""Continuous batching: the choice of the tokens that each step of an inference engine reads. Imports no JAX."""

import bisect
import heapq
import itertools
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.inference.pages import Holding, Pages
from jaxlm.inference.requests import Request

# "stop": one of its `ends`, or `finish`; "length": its `max_tokens`; "error": it can never go on.
EndReason = Literal["stop", "length", "cancelled", "error"]


class Full(RuntimeError):
    """A queue that takes no more requests now. The message says how many wait."""


class NeverFits(InputError):
    """A request that could not run even alone."""


@dataclass(eq=False)
class Generation:
    """A request that is being answered.

    Attributes:
      tokens: the prompt and what has been drawn and read back, without an id among `ends`.
      prompt: tokens of the prompt, the boundary for penalties and usage.
      ends: the ids that end it.
      priority: smaller is sooner; then the smaller id.
      seed: of its random numbers.
      salt: prefixes are shared under one salt alone.
      holding: its pages; None while it waits.
      slot: the index of its state on the device; -1 while it waits.
      computed: tokens whose keys are dispatched.
      pending: draws that are dispatched and not read back.
      cached: prompt tokens that were found when it first began.
      preemptions: times that its pages went to another, to be computed again.
      end: None while it lives.
    """

    id: int
    request: Request
    tokens: list[int]
    prompt: int
    ends: frozenset[int]
    priority: int
    seed: int
    salt: bytes
    holding: Holding | None = None
    slot: int = -1
    computed: int = 0
    pending: int = 0
    cached: int = 0
    preemptions: int = 0
    end: EndReason | None = None
    is_reading: bool = field(default=True, repr=False)  # has yet to draw since it was admitted

    @property
    def order(self) -> tuple[int, int]:
        """Its place among all: what comes before is served before."""
        return self.priority, self.id

    @property
    def drawn(self) -> int:
        """The tokens drawn and read back, without one that ended it."""
        return len(self.tokens) - self.prompt

    @property
    def is_drawn(self) -> bool:
        """True once the last token that it may draw is dispatched."""
        return self.drawn + self.pending >= self.request.max_tokens

    @property
    def shareable(self) -> list[int]:
        """The tokens that it need not read if others have: none whose log-probability after it is asked for."""
        scored = self.request.scores_from
        return self.tokens if scored is None else self.tokens[: scored + 1]


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a generation, to be read; where these are all, it `draws` the next."""

    generation: Generation
    start: int
    stop: int
    draws: bool

    @property
    def is_scored(self) -> bool:
        """True if log-probabilities of tokens after some of these are asked for."""
        scored = self.generation.request.scores_from
        return scored is not None and scored < self.stop and self.start < self.generation.prompt


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step.

    Attributes:
      decode: generations that read one token, the last that their slot has drawn, and draw the next.
      positions: of these tokens.
      chunks: prompts, or the tokens of a preempted generation, in order.
      slots: of `decode`, then of `chunks`. A generation that is cancelled has none any more.
      tables: likewise; by group, the pages of the generation at this step, as C ints.
    """

    decode: tuple[Generation, ...]
    positions: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    slots: tuple[int, ...]
    tables: tuple[tuple[array, ...], ...]

    @property
    def draws(self) -> list[Generation]:
        """The generations for which the step draws a token."""
        return [*self.decode, *(chunk.generation for chunk in self.chunks if chunk.draws)]


class Draw(NamedTuple):
    """A token that a generation has drawn, and its end if this is the last. An id among its `ends` is not kept."""

    generation: Generation
    token: int
    end: EndReason | None


class Scheduler:
    """A scheduler of generations over the rows of a step, the slots of the device's state, and pages.

    One thread calls it. A plan is dispatched before `plan`, `commit` or `finish` is called again; `submit` and `cancel`
    may come at any time. The draws of a step may be committed after the next step was planned: tokens are then
    still on the device, and a generation that turns out to have ended leaves a row behind whose draw is dropped. Such
    a row writes to pages of its own, which are at the earliest given to others in the step after, and so is ordered
    before them: each step takes the cache from the one before.

    All is decided in one order, that of `Generation.order`. Every step has a row for each generation that draws, then
    chunks of those that still read, then of new ones. Nothing is admitted past one that waits. A generation that lacks
    pages takes them from the last in order, which begins again later; so the first always goes on, then the next.

    Args:
      slots: the most generations that are under way.
      chunk_tokens: the rows of a step that read prompts.
      tile: the rows that no two chunks share.
      max_queued: the most requests that wait.
      max_queued_tokens: the most tokens of theirs; a single one may have more.
      max_context: the most tokens of a sequence.

    `preemptions` counts the times that one lost its pages.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        slots: int,
        chunk_tokens: int,
        tile: int,
        max_queued: int,
        max_queued_tokens: int,
        max_context: int,
    ):
        if not 1 <= tile <= chunk_tokens or min(slots, max_queued, max_context) < 1:
            raise InputError("a scheduler has a slot, a place in the queue and a tile of chunk_tokens, at least")
        self._pages = pages
        self._tile, self._tiles = tile, chunk_tokens // tile
        self._max_queued, self._max_queued_tokens = max_queued, max_queued_tokens
        self._longest = int(min(pages.capacity, max_context))
        self._slots = list(range(slots))
        self._ids = itertools.count()
        self._live: dict[int, Generation] = {}
        self._waiting: list[Generation] = []  # in order
        self._waiting_tokens = 0
        self._admitted: list[Generation] = []
        self._planned: tuple[Generation, ...] = ()  # in the plan before
        self._failed: list[Generation] = []
        self.preemptions = 0
        self._blocked = -1, -1  # the last that had no room, and the count of returns then

    @property
    def live(self) -> Set[int]:
        """The ids of generations that have not ended."""
        return self._live.keys()

    @property
    def waiting(self) -> int:
        """The generations that wait."""
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        """The generations that are under way."""
        return len(self._admitted)

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        seed: int = 0,
        salt: bytes = b"",
        ends: Collection[int] = (),
    ) -> Generation:
        """Put a request into the queue; `ends` are ids that end it beside its own.

        Raises NeverFits if it could not run alone, and Full if too many wait.
        """
        prompt, longest = len(request.prompt), self._longest
        if not prompt or request.max_tokens < 1:
            raise InputError("a request has one token of prompt or more, and max_tokens of 1 or more")
        needs = request.most_tokens
        if needs > longest:
            size = self._pages.size
            raise NeverFits(
                f"a prompt of {prompt} tokens and max_tokens = {request.max_tokens} need a cache of {needs} tokens "
                f"({-(-needs // size)} pages), and a sequence has at most {longest} ({-(-longest // size)} pages); "
                "shorten the prompt or lower max_tokens"
            )
        tokens = self._waiting_tokens
        if len(self._waiting) >= self._max_queued or (tokens and tokens + prompt > self._max_queued_tokens):
            raise Full(
                f"{len(self._waiting)} requests of {tokens} tokens wait; the queue takes {self._max_queued} "
                f"of {self._max_queued_tokens} tokens; try again later"
            )
        generation = Generation(
            id=next(self._ids),
            request=request,
            tokens=list(request.prompt),
            prompt=prompt,
            ends=frozenset((*(request.ends or ()), *(() if request.ignores_ends else ends))),
            priority=priority,
            seed=seed,
            salt=salt,
        )
        self._live[generation.id] = generation
        self._wait(generation)
        return generation

    def cancel(self, id: int) -> None:
        """End a generation that nobody waits for any more. One that has ended, or never was, is left alone."""
        if generation := self._live.get(id):
            self._end(generation, "cancelled")

    def finish(self, id: int) -> None:
        """End a generation whose text has met a stop string, after `commit`. One that has ended is left alone."""
        if generation := self._live.get(id):
            self._publish(generation)
            self._end(generation, "stop")

    def failed(self) -> list[Generation]:
        """Return, once each, those that `plan` has ended because they could not go on alone."""
        failed, self._failed = self._failed, []
        return failed

    def plan(self) -> StepPlan | None:
        """Return the next step; None if there is nothing to do before a commit or a request."""
        for generation in self._planned:
            self._publish(generation)
        decode: list[Generation] = []
        positions: list[int] = []
        chunks: list[Chunk] = []
        tiles, is_open = self._tiles, True
        later = deque(sorted(self._admitted, key=_order))  # those under way that this loop has yet to come to
        while later or (is_open and self._waiting):
            if is_open and self._waiting and not (later and _order(later[0]) < _order(self._waiting[0])):
                is_open = tiles > 0 and self._admit(self._waiting[0], later)
                continue
            generation = later.popleft()
            start = generation.computed
            if generation.is_drawn or (generation.is_reading and not tiles):
                continue
            rows = min(len(generation.tokens) - start, tiles * self._tile) if generation.is_reading else 1
            stop = self._extended(generation, start + rows, later)
            if stop == start:
                continue
            if generation.is_reading:
                tiles -= -(-(stop - start) // self._tile)
                draws = stop == len(generation.tokens)
                chunks.append(Chunk(generation, start, stop, draws))
                generation.is_reading = not draws
            else:
                draws = True
                decode.append(generation)
                positions.append(start)
            generation.computed = stop
            generation.pending += draws
        self._planned = (*decode, *(chunk.generation for chunk in chunks))
        if not self._planned:
            return None
        tables = tuple(tuple(table[:] for table in generation.holding.tables) for generation in self._planned)
        slots = tuple(generation.slot for generation in self._planned)
        return StepPlan(tuple(decode), tuple(positions), tuple(chunks), slots, tables)

    def commit(self, plan: StepPlan, drawn: Mapping[int, int]) -> list[Draw]:
        """Take the tokens that a step has drawn, by id; those of generations that have ended are dropped."""
        draws = []
        for generation in plan.draws:
            if generation.end:
                continue
            token = drawn[generation.id]
            generation.pending -= 1
            if token not in generation.ends:
                generation.tokens.append(token)
                self._waiting_tokens += generation.holding is None
                end = "length" if generation.drawn == generation.request.max_tokens else None
            else:
                end = "stop"
            if end:
                self._publish(generation)
                self._end(generation, end)
            draws.append(Draw(generation, token, end))
        return draws

    def _admit(self, generation: Generation, later: deque[Generation]) -> bool:
        """Let one begin, and be the first of `later`, if it has a slot and room for what it has to read.

        It may take them from the last of `later`. A page for each of the others stays free, so that what they draw next
        does not take it from this one again at once.
        """
        if generation.pending or self._blocked == (generation.id, self._pages.returns):
            return False  # a draw has yet to be read, or nothing came back since there was no room
        holding = self._pages.match(generation.shareable, generation.salt)
        is_early = self._is_being_read(generation, holding)
        victims = None if is_early else self._victims(generation, holding, later)
        if victims is None:
            self._pages.release(holding)
            if not is_early:
                self._blocked = generation.id, self._pages.returns
            return False
        del self._waiting[0]
        self._waiting_tokens -= len(generation.tokens)
        for _ in range(victims):
            self._preempt(later.pop())
        if not generation.preemptions:
            generation.cached = holding.tokens
        generation.holding, generation.computed, generation.is_reading = holding, holding.tokens, True
        generation.slot = heapq.heappop(self._slots)
        self._admitted.append(generation)
        later.appendleft(generation)
        return True

    def _victims(self, generation: Generation, holding: Holding, later: deque[Generation]) -> int | None:
        """Return how few of the last of `later` must go for one to have a slot and room; None if all are not enough.

        These are of lower priority: of one priority the oldest are under way.
        """
        for count in range(len(later) + 1):
            without = [victim.holding for victim in itertools.islice(reversed(later), count)]
            spare = len(self._admitted) - count
            has_room = self._pages.has_room(holding, len(generation.tokens), spare, without)
            if has_room and len(self._slots) + count:
                return count
        return None

    def _is_being_read(self, generation: Generation, holding: Holding) -> bool:
        """Return whether one before it reads the same next page now: then it is better to wait for that."""
        end = holding.tokens + self._pages.size
        return end < len(generation.shareable) and any(
            other.holding.published * self._pages.size < end <= len(other.tokens)
            and other.salt == generation.salt
            and _order(other) < _order(generation)
            and other.tokens[:end] == generation.tokens[:end]
            for other in self._admitted
        )

    def _extended(self, generation: Generation, stop: int, later: deque[Generation]) -> int:
        """Give a generation room for `stop` tokens, or as many as there can be, and return how many.

        Takes pages from the last of `later` while it must. One that has nobody else's to take ends with an error.
        """
        while (room := self._pages.room(generation.holding)) < stop and later:
            self._preempt(later.pop())
        stop = max(min(stop, room), generation.computed)
        self._pages.extend(generation.holding, stop)
        if stop == generation.computed and len(self._admitted) == 1 and not generation.pending:
            self._end(generation, "error")
            self._failed.append(generation)
        return stop

    def _preempt(self, generation: Generation) -> None:
        self._stop(generation)
        generation.preemptions += 1
        self.preemptions += 1
        self._wait(generation)

    def _wait(self, generation: Generation) -> None:
        bisect.insort(self._waiting, generation, key=_order)
        self._waiting_tokens += len(generation.tokens)

    def _end(self, generation: Generation, end: EndReason) -> None:
        generation.end = end
        del self._live[generation.id]
        if generation.holding:
            self._stop(generation)
        else:
            self._waiting.remove(generation)
            self._waiting_tokens -= len(generation.tokens)

    def _stop(self, generation: Generation) -> None:
        """Take pages and slot from a generation."""
        self._pages.release(generation.holding)
        self._admitted.remove(generation)
        heapq.heappush(self._slots, generation.slot)
        generation.holding, generation.slot, generation.computed = None, -1, 0

    def _publish(self, generation: Generation) -> None:
        """Publish the pages of a generation that a dispatched step has filled."""
        holding, computed = generation.holding, generation.computed
        if holding and computed // self._pages.size > holding.published:
            self._pages.publish(holding, generation.tokens[:computed])


def _order(generation: Generation) -> tuple[int, int]:
    return generation.order
