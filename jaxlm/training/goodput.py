"""Where a run's time goes: the share of it that was spent in training steps, and what took the rest."""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.training.records import JsonLines

# The phases of the loop: waiting for the device, the loop's own work beside it, fetching the next batch.
DEVICE, HOST, DATA = "device", "host", "data"
# Fetching that the device stood still for.
DATA_WAIT = "data_wait"
_STEPS = (DEVICE, HOST, DATA)
_IMPORTED = time.monotonic()
_WRITE_EVERY_S = 5.0


def process_age() -> float:
    """Seconds since this process began; since the import of this module where the system does not tell."""
    try:
        with open("/proc/self/stat") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, ValueError):
        return time.monotonic() - _IMPORTED


class Clock:
    """The seconds of a process by phase. Every moment belongs to one phase: the innermost `phase` block around it."""

    def __init__(self) -> None:
        self._phase, self._since = "startup", time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float, startup=process_age())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block of this phase."""
        outer = self._phase
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds of one phase as another's."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase until now."""
        self._switch(self._phase)
        return dict(self._seconds)

    def _switch(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now


class Pace:
    """Steps since the last line of metrics, and how long each took. Time between steps, as of evaluations, is not in
    it."""

    def __init__(self, clock: Clock):
        self._clock, self.longest_s = clock, 0.0
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._began, self._steps, self._tokens = self._clock.seconds(), 0, 0
        self._last = time.perf_counter()

    def add(self, tokens: int) -> None:
        """A step is done."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        before, self._last = self._last, time.perf_counter()
        self.longest_s = max(self.longest_s, self._last - before)

    def rates(self) -> dict[str, float]:
        """`step_s`, `tokens_per_s`, and of each step `host_s`, the host's own work, and `data_wait_s`, until the next
        batch was there. The host works while the device does: only what exceeds a step delays it."""
        now = self._clock.seconds()
        spent = {name: now.get(name, 0.0) - self._began.get(name, 0.0) for name in (*_STEPS, DATA_WAIT)}
        seconds = max(sum(spent.values()), 1e-9)
        return {
            "step_s": seconds / self._steps,
            "tokens_per_s": self._tokens / seconds,
            "host_s": spent[HOST] / self._steps,
            "data_wait_s": (spent[DATA] + spent[DATA_WAIT]) / self._steps,
        }


class Goodput(NamedTuple):
    """`share` of all seconds of all starts that were spent in training steps that counted; `seconds` of everything."""

    share: float
    seconds: dict[str, float]
    starts: int

    def __str__(self) -> str:
        others = sorted(
            ((s, name) for name, s in self.seconds.items() if name != "training" and s >= 0.05), reverse=True
        )
        explained = ", ".join(f"{name.replace('_', ' ')} {_duration(s)}" for s, name in others)
        spent, whole = _duration(self.seconds["training"]), _duration(sum(self.seconds.values()))
        begun = f" over {self.starts} starts" if self.starts > 1 else ""
        rest = f"; the rest: {explained}" if explained else ""
        return f"goodput {self.share:.1%}: {spent} of {whole}{begun} in training steps{rest}"


class Starts:
    """A file with a line per start of a run with its seconds by phase, kept up to date while it lasts."""

    def __init__(self, path: Path, clock: Clock, step: int):
        self._file, self._clock = self.file(path), clock
        self._earlier = self._file.rows()
        self._own = {"from_step": step, "to_step": step}
        self._written = 0.0
        self.write(now=True)

    @staticmethod
    def file(path: Path) -> JsonLines:
        """The lines of earlier starts."""
        return JsonLines(path, _of_a_start)

    def write(self, step: int | None = None, now: bool = False) -> None:
        """`step` steps are done; written at most every few seconds, or `now`."""
        self._own["to_step"] = self._own["to_step"] if step is None else step
        if now or time.monotonic() - self._written > _WRITE_EVERY_S:
            self._written = time.monotonic()
            self._file.replace(self._rows())

    def goodput(self) -> Goodput:
        """Over all starts until now."""
        return summary(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return [*self._earlier, {**self._own, "seconds": self._clock.seconds()}]


def _of_a_start(row: dict[str, Any]) -> bool:
    steps, seconds = (row.get("from_step"), row.get("to_step")), row.get("seconds")
    timed = isinstance(seconds, dict) and all(isinstance(s, int | float) for s in seconds.values())
    return timed and all(isinstance(step, int) for step in steps)


def summary(starts: Iterable[dict[str, Any]]) -> Goodput:
    """Add up the lines of `Starts`.

    The steps that a start did after the checkpoint from which the next one went on are `lost_steps`. Time in which
    no process ran is not counted.
    """
    starts = list(starts)
    total: dict[str, float] = defaultdict(float, training=0.0)
    for start, following in itertools.zip_longest(starts, starts[1:]):
        for name, seconds in start["seconds"].items():
            total["training" if name in _STEPS else name] += seconds
        done, lost = start["to_step"] - start["from_step"], 0
        if following is not None:
            lost = min(max(start["to_step"] - following["from_step"], 0), done)
        if lost:
            seconds = sum(start["seconds"].get(name, 0.0) for name in _STEPS) * lost / done
            total["training"] -= seconds
            total["lost_steps"] += seconds
    return Goodput(total["training"] / max(sum(total.values()), 1e-9), dict(total), len(starts))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
