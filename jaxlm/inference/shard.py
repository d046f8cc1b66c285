"""One shard of the devices of an engine: the sequences whose pages and slots it has. Imports no JAX."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxlm.inference.generation import Generation
from jaxlm.inference.pages import GroupHit, Pages, SequencePages, added


@dataclass(frozen=True, eq=False)
class Admission:
    """A way for a generation to begin on a shard, with the pages of its prefix: the way is taken or declined.

    Attributes:
      victims: how few generations must go for this one to have a slot and room; None if there is no such number.
      is_early: an earlier generation reads the same next page now, so that waiting for that page is better.
    """

    shard: "Shard"
    holding: SequencePages
    victims: int | None
    is_early: bool

    def decline(self) -> None:
        """Give back the pages."""
        self.shard.pages.release(self.holding)


class Shard:
    """The pages, the free slots and the generations of one shard. Its devices know no sequences of other shards.

    Attributes:
      admitted: the generations that are under way here.
      tiles: the tiles left for prompts in the step that is being planned.
      hits: by group of pages, the tokens of prompts that were found and lacked when generations first began.
    """

    def __init__(self, index: int, pages: Pages, slots: int):
        self.index, self.pages, self.tiles = index, pages, 0
        self.admitted: list[Generation] = []
        self.hits = [GroupHit() for _ in pages.held]
        self._slots = list(range(slots))  # a heap of the free ones

    def work(self, generation: Generation) -> int:
        """Return how many tokens are to be read here before a generation draws: its own but for a prefix that is cached
        here, those of others, and a page for each generation that is under way."""
        cached = self.pages.cached_tokens(generation.shareable, generation.salt)
        others = sum(len(other.tokens) - other.computed for other in self.admitted if other.is_reading)
        return len(generation.tokens) - cached + others + self.pages.size * len(self.admitted)

    def admission(self, generation: Generation, later: Sequence[Generation]) -> Admission:
        """Return how a generation could begin here. Its slot and pages may come from the last of `later`.

        Generations in `later` are of lower priority: of one priority the oldest are under way. A page stays free for
        each generation that stays and may come to need one, so that its next token does not take pages from this
        generation at once.
        """
        holding = self.pages.match(generation.shareable, generation.salt, len(generation.tokens))
        if self._reads_next_page_of(generation, holding):
            return Admission(self, holding, None, True)
        later = [other for other in reversed(later) if other.shard == self.index]
        size = self.pages.size
        growing = {other.id for other in self.admitted if other.holding.room(size) < other.request.most_tokens}
        for count in range(len(later) + 1):
            without = [victim.holding for victim in itertools.islice(later, count)]
            spare = len(growing - {victim.id for victim in itertools.islice(later, count)})
            has_room = self.pages.has_room(holding, len(generation.tokens), spare, without)
            if has_room and len(self._slots) + count:
                return Admission(self, holding, count, False)
        return Admission(self, holding, None, False)

    def _reads_next_page_of(self, generation: Generation, holding: SequencePages) -> bool:
        end = holding.tokens + self.pages.size
        return end < len(generation.shareable) and any(
            other.holding.published * self.pages.size < end <= len(other.tokens)
            and other.salt == generation.salt
            and other.order < generation.order
            and other.tokens[:end] == generation.tokens[:end]
            for other in self.admitted
        )

    def begin(self, generation: Generation, holding: SequencePages) -> None:
        """Give a generation a slot, and pages that begin with those of its prefix."""
        if not generation.preemptions:
            generation.cached = holding.tokens
            self.hits = added([self.hits, holding.hits])
        generation.shard, generation.slot = self.index, heapq.heappop(self._slots)
        generation.holding, generation.is_reading = holding, True
        generation.computed = generation.reach = holding.tokens
        self.admitted.append(generation)

    def stop(self, generation: Generation) -> None:
        """Take pages and slot from a generation."""
        self.pages.release(generation.holding)
        self.admitted.remove(generation)
        heapq.heappush(self._slots, generation.slot)
        generation.holding, generation.shard, generation.slot = None, -1, -1
        generation.computed = generation.reach = 0
