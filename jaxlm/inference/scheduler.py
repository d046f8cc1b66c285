"""Continuous batching: the choice of the tokens that each step of an inference engine reads. Imports no JAX."""

import bisect
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jaxlm.core.errors import InputError
from jaxlm.inference.acceptance import DraftWorth
from jaxlm.inference.generation import Chunk, DecodeRun, EndReason, Generation
from jaxlm.inference.grammar import Matcher
from jaxlm.inference.pages import GroupHit, Pages, added
from jaxlm.inference.requests import MAX_BIASES, Request
from jaxlm.inference.shard import Admission, Shard


class Full(RuntimeError):
    """A queue that takes no more requests now. The message says how many wait."""


class NeverFits(InputError):
    """A request that could not run even alone."""


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one step on one shard.

    Attributes:
      decode: runs that read the last token that their slot has drawn, and drafts of the next ones, and draw a token
        after each.
      chunks: prompts, or the tokens of a preempted generation, in order.
      slots: of `decode`, then of `chunks`. A generation that is cancelled has no slot any more.
      tables: of the same generations; by group, the pages of the generation at this step, as C ints.
    """

    decode: tuple[DecodeRun, ...]
    chunks: tuple[Chunk, ...]
    slots: tuple[int, ...]
    tables: tuple[tuple[array, ...], ...]

    @property
    def draws(self) -> list[Generation]:
        """The generations for which the step draws tokens."""
        return [part.generation for part, _ in self.rows_of_draws()]

    def rows_of_draws(self) -> Iterator[tuple[DecodeRun | Chunk, range]]:
        """Yield each part for which the step draws tokens, and the indices of its draws."""
        row = 0
        for part, rows in [
            *((run, 1 + run.drafts) for run in self.decode),
            *((chunk, 1) for chunk in self.chunks if chunk.draws),
        ]:
            yield part, range(row, row + rows)
            row += rows

    @property
    def rows_drawn(self) -> int:
        """The rows after which the step draws a token."""
        return sum(len(rows) for _, rows in self.rows_of_draws())


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, by shard. `steps`: how often those that decode are read, each time with what they drew."""

    shards: tuple[ShardPlan, ...]
    steps: int = 1

    @property
    def draws(self) -> list[Generation]:
        """The generations for which the step draws tokens, shard by shard."""
        return [generation for shard in self.shards for generation in shard.draws]

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks of all shards."""
        return [chunk for shard in self.shards for chunk in shard.chunks]


@dataclass
class _Rows:
    """The rows of one shard, as they are chosen; fields as those of `ShardPlan`."""

    decode: list[DecodeRun] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def generations(self) -> list[Generation]:
        return [*(run.generation for run in self.decode), *(chunk.generation for chunk in self.chunks)]

    def planned(self) -> ShardPlan:
        tables = tuple(tuple(table[:] for table in generation.holding.tables) for generation in self.generations)
        slots = tuple(generation.slot for generation in self.generations)
        return ShardPlan(tuple(self.decode), tuple(self.chunks), slots, tables)


class Scheduler:
    """A scheduler of generations over the rows of a step, the slots of the device's state, and pages, of each shard.

    A generation that decodes reads its last token and a few drafts of the next ones, as many as are likely to be
    accepted (`Acceptance`). Its length is then known on the device before it is known here, where it has a least and a
    greatest value: it has pages for the greatest, or as many as there are without taking any from others.

    A generation with a grammar has drafts from the host, which are made behind its last token. Where they are worth a
    step it waits until its draw is read, while steps go on for the others; otherwise it decodes in each step, without
    drafts.

    One thread calls it. A plan is dispatched before `plan`, `commit` or `finish` is called again; `submit` and `cancel`
    may come at any time. The draws of a step may be committed after the next step was planned: tokens are then
    still on the device, and a generation that turns out to have ended leaves a row behind whose draw is dropped. Such
    a row writes to pages of its own, which are at the earliest given to others in the step after, and so is ordered
    before them: each step takes the cache from the one before.

    All is decided in one order, that of `Generation.order`. Every step has a row for each generation that draws, then
    chunks of generations that still read, then of new ones. No generation is admitted past one that waits. A generation
    that lacks pages takes them from the last in order on its shard, which begins again later; so the first always goes
    on, then the next.

    A generation begins on the shard where it has the least to wait for (`Shard.work`): a shard that has its prefix, or
    that has little to do. Where that shard has no room, the generation begins on the next shard that has; a preempted
    generation may begin again on another shard.

    Args:
      pages: of each shard, all alike.
      slots: the most generations that are under way on a shard.
      chunk_tokens: the rows of a step that read prompts on a shard.
      tile: the rows that no two chunks share.
      max_queued: the most requests that wait.
      max_queued_tokens: the most tokens of the requests that wait; a single request may have more.
      max_context: the most tokens of a sequence.
      drafts: the most drafts that a generation reads in a step.
      worth: says which drafts are read; None where `drafts` is 0.
      steps_of: returns the steps of a dispatch in which so many rows of a shard decode and nothing waits.

    `preemptions` counts the times that a generation lost its pages, `drafted` the drafts that steps have read, and
    `accepted` those of them that were drawn.
    """

    def __init__(
        self,
        pages: Sequence[Pages],
        *,
        slots: int,
        chunk_tokens: int,
        tile: int,
        max_queued: int,
        max_queued_tokens: int,
        max_context: int,
        drafts: int = 0,
        worth: DraftWorth | None = None,
        steps_of: Callable[[int], int] = lambda _: 1,
    ):
        if not 1 <= tile <= chunk_tokens or min(slots, max_queued, max_context) < 1:
            raise InputError("a scheduler has a slot, a place in the queue and a tile of chunk_tokens, at least")
        self._shards = [Shard(index, each, slots) for index, each in enumerate(pages)]
        self._tile, self._tiles, self._drafts, self._worth = tile, chunk_tokens // tile, drafts, worth
        self._steps_of = steps_of
        self._max_queued, self._max_queued_tokens = max_queued, max_queued_tokens
        self._longest = int(min(pages[0].capacity, max_context))
        self._ids = itertools.count()
        self._live: dict[int, Generation] = {}
        self._waiting: list[Generation] = []  # in order
        self._waiting_tokens = 0
        self._failed: list[Generation] = []
        self.preemptions = self.drafted = self.accepted = 0
        self._blocked = -1, -1  # the last generation without room, and the count of returns then

    @property
    def live(self) -> Set[int]:
        """The ids of generations that have not ended."""
        return self._live.keys()

    @property
    def waiting(self) -> int:
        """The generations that wait."""
        return len(self._waiting)

    @property
    def hits(self) -> list[GroupHit]:
        """By group of pages, the tokens of prompts that were found and lacked when generations first began."""
        return added(shard.hits for shard in self._shards)

    @property
    def admitted(self) -> int:
        """The generations that are under way."""
        return sum(len(shard.admitted) for shard in self._shards)

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        seed: int = 0,
        salt: bytes = b"",
        stop_token_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> Generation:
        """Put a request into the queue; `stop_token_ids` end the request beside its own, and `matcher` is that of its
        grammar.

        Raises NeverFits if it could not run alone, and Full if too many wait.
        """
        prompt, longest = len(request.prompt), self._longest
        stops = request.ending_ids(stop_token_ids)
        if not prompt or request.max_tokens < 1:
            raise InputError("a request has one token of prompt or more, and max_tokens of 1 or more")
        if request.min_tokens and len(stops) + len(request.sampling.logit_bias or ()) > MAX_BIASES:
            raise InputError(
                f"min_tokens = {request.min_tokens} with {len(stops)} ids that end a text and "
                f"{len(request.sampling.logit_bias or ())} biases: together they may be {MAX_BIASES}"
            )
        needs = request.most_tokens
        if needs > longest:
            size = self._shards[0].pages.size
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
            stop_token_ids=stops,
            priority=priority,
            seed=seed,
            salt=salt,
            matcher=matcher,
        )
        self._live[generation.id] = generation
        self._wait(generation)
        return generation

    def cancel(self, id: int) -> None:
        """End a generation that nobody waits for any more. An id that is unknown, or has ended, is left alone."""
        if generation := self._live.get(id):
            self._end(generation, "cancelled")

    def finish(self, id: int) -> None:
        """End a generation whose text has met a stop string, after `commit`. An id that has ended is left alone."""
        if generation := self._live.get(id):
            self._publish(generation)
            self._end(generation, "stop")

    def failed(self) -> list[Generation]:
        """Return, once each, the generations that `plan` has ended because they could not go on alone."""
        failed, self._failed = self._failed, []
        return failed

    def plan(self) -> StepPlan | None:
        """Return the next step; None if there is nothing to do before a commit or a request."""
        for shard in self._shards:
            shard.tiles = self._tiles
            for generation in shard.admitted:
                self._publish(generation)
        rows, is_open, worth = [_Rows() for _ in self._shards], True, self._least_worth()
        steps = self._steps_together()
        under_way = sorted(itertools.chain.from_iterable(shard.admitted for shard in self._shards), key=_order)
        waiting = self._waiting_for_draws(under_way, worth)
        if waiting is None:
            return None
        later = deque(under_way)  # generations under way that this loop has yet to visit
        while later or (is_open and self._waiting):
            if is_open and self._waiting and not (later and _order(later[0]) < _order(self._waiting[0])):
                is_open = self._admit(self._waiting[0], later)
                continue
            generation = later.popleft()
            shard, start = self._shards[generation.shard], generation.computed
            if generation.is_drawn or generation.id in waiting or (generation.is_reading and not shard.tiles):
                continue
            if generation.is_reading:
                count = min(len(generation.tokens) - start, shard.tiles * self._tile)
                stop = self._extended(generation, start + count, start + count, later)
                if stop == start:
                    continue
                shard.tiles -= -(-(stop - start) // self._tile)
                unscored = generation.unscored
                scored = range(max(start, unscored.start), min(stop, unscored.stop))
                chunk = Chunk(generation, start, stop, stop == len(generation.tokens), scored)
                rows[shard.index].chunks.append(chunk)
                generation.computed = generation.reach = stop
                generation.scored = max(generation.scored, scored.stop)
                if chunk.draws:
                    generation.is_reading = False
                    generation.pending.append(chunk)
            else:
                drafts, tokens = 0, ()
                if generation.matcher is None:
                    drafts = generation.acceptance.drafts(self._drafts, worth)
                elif self._drafts:
                    generation.drafts.expect(generation.matcher, generation.tokens, self._drafts)
                    if not generation.pending:
                        tokens = tuple(generation.drafts.worth(generation.acceptance, worth))
                        drafts = len(tokens)
                most = min(generation.reach + steps + drafts, generation.request.most_tokens)
                limit = self._extended(generation, start + 1, most, later)
                if limit == start:
                    continue
                run = DecodeRun(generation, drafts, limit, tokens, steps)
                rows[shard.index].decode.append(run)
                generation.pending.append(run)
                generation.decode(run)
        planned = tuple(each.planned() for each in rows)
        return StepPlan(planned, steps) if any(each.slots for each in planned) else None

    def commit(
        self, plan: StepPlan, drawn: Mapping[int, Sequence[int]], foreseen: Collection[int] = ()
    ) -> list[tuple[Generation, int]]:
        """Take the token ids that a step has drawn, by the id of the generation: with drafts several or none. Return
        the generations that took tokens, with how many they took: a generation that had ended drops its tokens, and
        the token that ends a generation those after it. An id among the `stop_token_ids` of a generation ends the
        generation and is not added to its tokens. A generation whose grammar lets no token follow ends with an error.

        Args:
          foreseen: ids of generations of which the last of these tokens equals the draft in its place.
        """
        taken = []
        for generation in plan.draws:
            if generation.end:
                continue
            run, ids = generation.pending.popleft(), drawn[generation.id]
            if self._drafts and ids and isinstance(run, DecodeRun):
                self.drafted += run.drafts
                self.accepted += len(ids) - 1
                if generation.matcher:
                    right = generation.drafts.compare(ids)
                else:
                    right = len(ids) - 1 + (generation.id in foreseen)
                generation.acceptance.update(right, wrong=right < min(len(ids), self._drafts))
            end, count = None, 0
            for token in ids:
                count += 1
                if token in generation.stop_token_ids:
                    end = "stop"
                    break
                end = generation.take(token)
                self._waiting_tokens += generation.holding is None
                if end:
                    break
            if generation.holding:
                generation.settle()
            if end:
                self._publish(generation)
                self._end(generation, end)
            if count:
                taken.append((generation, count))
        return taken

    def _steps_together(self) -> int:
        """Return the steps of the next dispatch: several where each generation draws, none waits, no draw waits for
        another, and some have as many tokens to draw."""
        drawing = [[each for each in shard.admitted if not each.is_drawn] for shard in self._shards]
        generations = [*itertools.chain.from_iterable(drawing)]
        if self._waiting or not generations:
            return 1
        if any(each.is_reading or each.matcher or each.request.hidden for each in generations):
            return 1
        steps = self._steps_of(max(map(len, drawing)))
        return steps if max(each.request.most_tokens - each.computed for each in generations) >= steps else 1

    def _least_worth(self) -> float:
        """Return how probable a draft must be to be read in the next step: there, by the shard that decodes most."""
        if not self._worth:
            return 1.0
        decoding = ([each.acceptance for each in shard.admitted if not each.is_reading] for shard in self._shards)
        return self._worth.of(max(decoding, key=len), self._drafts)

    def _waiting_for_draws(self, under_way: Sequence[Generation], worth: float) -> set[int] | None:
        """Return the ids of the generations with a grammar that wait until a draw of theirs is read; None where all
        wait for one of them, so that they share the next step."""
        going_on = [each for each in under_way if not each.is_drawn]
        if not any(each.matcher for each in going_on) or not self._drafts:
            return set()
        accepted = {
            each.id: sum(each.acceptance.probabilities(each.acceptance.drafts(self._drafts, worth)))
            for each in going_on
            if each.matcher and not each.is_reading
        }
        if all(accepted.get(each.id) for each in going_on):
            return None if any(each.pending for each in going_on) else set()
        # A step is lost to one that waits, as others go on: it must gain a token by it.
        return {each.id for each in going_on if each.pending and accepted.get(each.id, 0.0) >= 1.0}

    def _admit(self, generation: Generation, later: deque[Generation]) -> bool:
        """Let a generation begin, and be the first of `later`, if a shard has a slot and room for the tokens to read.

        The slot and the room may be taken from the last of `later`.
        """
        if not any(shard.tiles for shard in self._shards):
            return False
        if generation.pending or self._blocked == (generation.id, self._returns):
            return False  # a draw has yet to be read, or no page came back since there was no room
        ways: list[Admission] = []
        for shard in self._by_work(generation):
            ways.append(shard.admission(generation, later))
            if ways[-1].is_early or ways[-1].victims == 0:
                break
        is_early = ways[-1].is_early
        possible = [] if is_early else [way for way in ways if way.victims is not None]
        best = min(possible, key=lambda way: way.victims, default=None)
        is_admitted = best is not None and best.shard.tiles > 0
        for way in ways:
            if way is not best or not is_admitted:
                way.decline()
        if is_admitted:
            del self._waiting[0]
            self._waiting_tokens -= len(generation.tokens)
            for _ in range(best.victims):
                self._preempt_last(best.shard, later)
            best.shard.begin(generation, best.holding)
            later.appendleft(generation)
        elif best is None and not is_early:
            self._blocked = generation.id, self._returns
        return is_admitted

    @property
    def _returns(self) -> int:
        return sum(shard.pages.returns for shard in self._shards)

    def _by_work(self, generation: Generation) -> Sequence[Shard]:
        """Return the shards, the best for a generation first."""
        return sorted(self._shards, key=lambda shard: shard.work(generation)) if len(self._shards) > 1 else self._shards

    def _extended(self, generation: Generation, written: int, most: int, later: deque[Generation]) -> int:
        """Give a generation room for `most` tokens, or as many as there can be, and return how many.

        Takes pages from the last of `later` while there is no room for `written` tokens, which the step writes for
        certain. A generation that finds no other's pages ends with an error.
        """
        shard = self._shards[generation.shard]
        while (room := shard.pages.room(generation.holding)) < written and self._preempt_last(shard, later):
            pass
        stop = max(min(most, room), generation.computed)
        shard.pages.extend(generation.holding, stop, min(written, stop))
        if stop == generation.computed and len(shard.admitted) == 1 and not generation.pending:
            self._end(generation, "error")
            self._failed.append(generation)
        return stop

    def _preempt_last(self, shard: Shard, later: deque[Generation]) -> bool:
        """Take pages and slot from the last of `later` on a shard; return whether there is one."""
        victim = next((other for other in reversed(later) if other.shard == shard.index), None)
        if victim is None:
            return False
        later.remove(victim)
        shard.stop(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self._wait(victim)
        return True

    def _wait(self, generation: Generation) -> None:
        bisect.insort(self._waiting, generation, key=_order)
        self._waiting_tokens += len(generation.tokens)

    def _end(self, generation: Generation, end: EndReason) -> None:
        generation.end = end
        del self._live[generation.id]
        if generation.holding:
            self._shards[generation.shard].stop(generation)
        else:
            self._waiting.remove(generation)
            self._waiting_tokens -= len(generation.tokens)

    def _publish(self, generation: Generation) -> None:
        """Publish the pages of a generation that a dispatched step has filled."""
        holding, computed = generation.holding, generation.computed
        if holding:
            pages = self._shards[generation.shard].pages
            if computed // pages.size > holding.published:
                pages.publish(holding, generation.tokens[:computed])


def _order(generation: Generation) -> tuple[int, int]:
    return generation.order
