"""The accuracy of counted times against measured ones, over many published figures."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.costs.published.cases import CountedCase

# The error above which a miss of a measured figure is explained in cases.toml.
LARGE = 0.25


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of the counted times of `count` measured figures.

    `median` and `ninetieth` are percentiles of the absolute error, relative to the measured figure; `inside` is the
    share of figures in their bracket, and `width` the median of the brackets' ends, the larger over the smaller.
    `impossible` is the number of figures that are faster than the lower bound of time.
    """

    count: int
    median: float
    ninetieth: float
    inside: float
    width: float
    impossible: int

    @classmethod
    def of(cls, rows: Sequence[CountedCase]) -> "Accuracy":
        """Return the accuracy of one or more counted measured figures."""
        errors = sorted(abs(row.error) for row in rows)
        return cls(
            len(rows),
            statistics.median(errors),
            errors[math.ceil(0.9 * len(errors)) - 1],
            sum(row.verdict == "inside" for row in rows) / len(rows),
            statistics.median(max(row.bracket) / min(row.bracket) for row in rows),
            sum(row.impossible for row in rows),
        )

    def row(self) -> dict[str, Any]:
        """Return the accuracy as JSON."""
        return dict(self.__dict__)


def is_judged(row: CountedCase) -> bool:
    """Return whether accuracy is asked of a figure: of measured ones that are counted as they ran."""
    return row.measured and not row.case.reported


def by(key: Callable[[CountedCase], str], rows: Iterable[CountedCase]) -> dict[str, Accuracy]:
    """Return the accuracy of measured figures for each value of a key, in the order in which they occur."""
    groups: dict[str, list[CountedCase]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {name: Accuracy.of(group) for name, group in groups.items()}


def large_misses(rows: Iterable[CountedCase]) -> list[CountedCase]:
    """Return the judged figures whose error is above `LARGE`, the largest first."""
    missed = (row for row in rows if is_judged(row) and abs(row.error) > LARGE)
    return sorted(missed, key=lambda row: -abs(row.error))
