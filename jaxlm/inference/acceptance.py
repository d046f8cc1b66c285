"""The number of drafts of next tokens that are worth a row each, by how often drafts were accepted. Imports no JAX."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MEMORY = 0.85  # the weight of the share before one more draft
_WORTH = 0.3  # without measured times: on a CPU a row more takes about this share of a small step
_LEAST = 0.05  # less probable drafts are never read
_KEPT = 0.7  # the weight of a measured time before one more


@dataclass
class Acceptance:
    """The share of a generation's drafts that were accepted lately, of those whose predecessors were: of drafts that
    were read and of drafts that were not, since each is compared with what was drawn in its place.

    Speculation by equality (arXiv:2408.07978) accepts the j-th draft with probability share^j, if one is as good as
    another.
    """

    share: float = 0.6

    def update(self, right: int, wrong: int) -> None:
        """Count drafts that equal what was drawn in their places, and those that do not."""
        for was_right in [1.0] * right + [0.0] * wrong:
            self.share = _MEMORY * self.share + (1.0 - _MEMORY) * was_right

    def probabilities(self, most: int) -> list[float]:
        """Return how probable it is that each of so many drafts is accepted."""
        return list(itertools.accumulate([self.share] * most, lambda all, one: all * one))

    def drafts(self, most: int, worth: float) -> int:
        """Return how many of at most so many drafts are accepted with a probability from `worth` on."""
        return sum(probability >= worth for probability in self.probabilities(most))


class DraftWorth:
    """The probability of acceptance from which on a draft is read: that which gives most tokens in a second, by the
    measured times of steps.

    Args:
      rows: the numbers of rows that there are programs for, in order.
      measures: whether times are taken; otherwise the value is fixed, as processes need it that plan alike.
    """

    def __init__(self, rows: Sequence[int], measures: bool):
        self._rows, self._measures = rows, measures
        self._seconds: dict[int, float | None] = {}  # None after a first step, which may have compiled

    def note(self, rows: int, seconds: float) -> None:
        """Measure a step with so many rows, and no prompt."""
        before = self._seconds.get(rows, 0.0)
        if rows not in self._seconds:
            self._seconds[rows] = None
        else:
            self._seconds[rows] = seconds if before is None else _KEPT * before + (1.0 - _KEPT) * seconds

    def of(self, generations: Iterable[Acceptance], most: int) -> float:
        """Return the value for a step of these generations, each of which may have so many drafts."""
        if not self._measures:
            return _WORTH
        probable = [each.probabilities(most) for each in generations]
        drafts = sorted((p for some in probable for p in some if p >= _LEAST), reverse=True)
        best, worth = 0.0, 2.0
        for rows in self._rows:
            if rows < len(probable):
                continue
            taken = min(rows - len(probable), len(drafts))
            rate = (len(probable) + sum(drafts[:taken])) / self._expected(rows)
            if rate > best:
                excluded = drafts[taken] if taken < len(drafts) else 0.0
                best, worth = rate, max(_LEAST, excluded * (1.0 + 1e-9))
        return worth

    def _expected(self, rows: int) -> float:
        """Return the time of a step; of one that has not been measured the least that it may be, so that it will be."""
        known = {each: seconds for each in self._rows if (seconds := self._seconds.get(each))}
        if rows in known or not known:
            return known.get(rows, 1.0)
        smaller = [seconds for each, seconds in known.items() if each < rows]
        larger = [seconds * rows / each for each, seconds in known.items() if each > rows]
        return max([*smaller, *larger[:1]])
