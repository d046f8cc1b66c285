"""The schedule of a pipeline: which microbatch a stage carries when. Imports no JAX.

A stage has R chunks of layers: chunk k of stage s is chunk k S + s of the model, so that a microbatch goes around all S
stages R times. Stages work in lockstep, on one chunk in each tick. S microbatches go through all chunks before the next
S begin. Stage s begins with its first item of work, a microbatch and a chunk, in tick s, and takes the next one
in each tick. The last stage goes back through the last chunk in the tick in which it has gone forward; items come back
in the same order with the last chunk first, and stage s begins S − 1 − s ticks after the last stage (1F1B, and
interleaved with R > 1: Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

So the first R S − 1 ticks have forward passes alone, the last R S − 1 backward passes alone, and those between them
both. The work around the stages follows them: in a tick in which the last stage has carried a microbatch through the
last chunk, its loss is computed; what enters the first stage is computed a tick ahead, and the gradient that leaves it
is used a tick later. Then all three fall into the same ticks, S in each period of R S.
"""

import heapq
import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import jax

# A stage, a tick, an item of work or what follows from them: an integer, or an array of integers in a traced loop.
Integer = TypeVar("Integer", int, "jax.Array")


class TickSpan(NamedTuple):
    """Ticks that follow one another and do the same: forward passes, backward passes, and what is around the stages
    (`at_ends`)."""

    ticks: int
    goes_forward: bool
    goes_back: bool
    at_ends: bool


class Ticks(NamedTuple):
    """The ticks of M microbatches on S stages of R chunks each. With several chunks S has to divide M.

    A stage does nothing useful in S − 1 of R M + S − 1 forward passes through a chunk, and in as many backward passes.
    """

    stages: int
    microbatches: int
    rounds: int = 1

    @property
    def alone(self) -> int:
        """The ticks with forward passes alone, and those with backward passes alone."""
        return self.rounds * self.stages - 1

    @property
    def items(self) -> int:
        """The items of work of a stage: microbatches through each of its chunks."""
        return self.rounds * self.microbatches

    @property
    def passes(self) -> int:
        """The forward passes of each stage, idle ones among them; the backward passes are as many."""
        return self.items + self.stages - 1

    @property
    def ticks(self) -> int:
        """All ticks."""
        return self.passes + self.alone

    @property
    def at_ends(self) -> int:
        """The times that what is before the first stage is computed, idle ones among them, and its gradient."""
        return self.microbatches + self.stages

    @property
    def bubble(self) -> float:
        """The share of the time of stages in which they are idle."""
        return (self.stages - 1) / self.passes

    @property
    def kept(self) -> int:
        """The inputs of a stage that are kept for backward passes at once: 2 S − 1, or (R + 1) S − 1 of several chunks,
        and no more however many microbatches there are."""
        return 1 + max(self.places)

    @property
    def places(self) -> tuple[int, ...]:
        """The place, from 0, of the kept input of each item of forward work; places of what has gone back are used
        again. They serve all stages, of which the first keeps each input longest."""
        return _places(*self)

    @property
    def phases(self) -> tuple[tuple[int, tuple[TickSpan, ...]], ...]:
        """The ticks in their order: spans that follow one another, and how many times they do."""
        group = self.microbatches if self.rounds == 1 else self.stages
        between, edge = (self.rounds - 1) * self.stages, self.stages - 1

        def of(*spans: TickSpan) -> tuple[TickSpan, ...]:
            return tuple(span for span in spans if span.ticks)

        phases = (
            (1, of(TickSpan(edge, True, False, True), TickSpan(between, True, False, False))),
            (
                self.microbatches // group - 1,
                of(TickSpan(group, True, True, True), TickSpan(between, True, True, False)),
            ),
            (1, of(TickSpan(group, True, True, True))),
            (1, of(TickSpan(between, False, True, False), TickSpan(edge, False, True, True))),
        )
        return tuple((times, spans) for times, spans in phases if times and spans)

    # Of an item that is not there these give what means nothing.

    def item_forward(self, stage: int | Integer, tick: Integer) -> Integer:
        """Return the item of work that a stage carries forward in a tick, if it is one of `items`."""
        return tick - stage

    def item_back(self, stage: int | Integer, tick: Integer) -> Integer:
        """Return the item of work that a stage carries back in a tick, if it is one of `items`."""
        return tick - self.alone - (self.stages - 1 - stage)

    def microbatch(self, item: Integer) -> Integer:
        """Return the microbatch of an item of either direction."""
        return item // (self.rounds * self.stages) * self.stages + item % self.stages

    def round_forward(self, item: Integer) -> Integer:
        """Return the index, among the chunks of a stage, of the one that an item goes forward through."""
        return item // self.stages % self.rounds

    def round_back(self, item: Integer) -> Integer:
        """Return the index of the chunk that an item goes back through."""
        return self.rounds - 1 - self.round_forward(item)

    def as_forward(self, item: Integer) -> Integer:
        """Return the item of forward work of which this item of backward work has the gradients."""
        return item + (self.round_back(item) - self.round_forward(item)) * self.stages


class Move(NamedTuple):
    """Chunks that stages send at once, one each. `pairs`: from which stage to which. `taken`: by the sending stage, the
    index of the chunk among those that are stored there. `placed`: by the receiving stage, the index of the chunk among
    those that run there."""

    pairs: tuple[tuple[int, int], ...]
    taken: tuple[int, ...]
    placed: tuple[int, ...]


@lru_cache(maxsize=64)
def moves(stages: int, rounds: int) -> tuple[Move, ...]:
    """Return the moves, as many as rounds, that bring chunks from where they are stored to where they run: stage s
    stores the chunks from s R on, in the order of layers, and runs each S-th from s on."""
    period, all_moves = math.lcm(stages, rounds), []
    for i in range(rounds):
        # In each move a stage sends one of its R chunks and gets one: the R chunks of either have different i.
        chunks = [chunk for chunk in range(stages * rounds) if (chunk + chunk // period) % rounds == i]
        pairs = tuple((chunk // rounds, chunk % stages) for chunk in chunks)
        to = sorted(chunks, key=lambda chunk: chunk % stages)
        all_moves.append(Move(pairs, tuple(c % rounds for c in chunks), tuple(c // stages for c in to)))
    return tuple(all_moves)


@lru_cache(maxsize=64)
def _places(stages: int, microbatches: int, rounds: int) -> tuple[int, ...]:
    ticks = Ticks(stages, microbatches, rounds)
    of_item: list[int] = []
    free: list[int] = []
    for tick in range(ticks.items):  # of the first stage
        gone = ticks.item_back(0, tick - 1)
        if gone >= 0:
            heapq.heappush(free, of_item[ticks.as_forward(gone)])
        of_item.append(heapq.heappop(free) if free else 1 + max(of_item, default=-1))
    return tuple(of_item)
