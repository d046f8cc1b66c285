"""Goodput: the share of a run's time that is spent in training steps, and what takes the rest."""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core import units
from jaxlm.training.records import JsonLines

# Phases of the loop: waiting for the device, the loop's own work in parallel to it, fetching the next batch.
DEVICE, HOST, DATA = "device", "host", "data"
# The part of fetching during which the device is idle.
DATA_WAIT = "data_wait"
_STEPS = (DEVICE, HOST, DATA)
_IMPORTED = time.monotonic()
_WRITE_EVERY_S = 5.0


def process_age() -> float:
    """Return the seconds since this process began; where the system does not tell, since this module's import."""
    try:
        with open("/proc/self/stat") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, ValueError):
        return time.monotonic() - _IMPORTED


class Clock:
    """Seconds of a process by phase. Every moment belongs to exactly one phase: the innermost `phase` block."""

    def __init__(self) -> None:
        self._phase, self._since = "startup", time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float, startup=process_age())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time of a block to a phase."""
        outer = self._phase
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds from one phase to another."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until now."""
        self._switch(self._phase)
        return dict(self._seconds)

    def _switch(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now


class ThroughputMeter:
    """Throughput since the last line of metrics, and the longest step (`longest_s`). Time between steps, such as that
    of evaluations, does not count."""

    def __init__(self, clock: Clock):
        self._clock, self.longest_s = clock, 0.0
        self.restart()

    def restart(self) -> None:
        """Begin to count anew."""
        self._began, self._steps, self._tokens, self._learned_tokens = self._clock.seconds(), 0, 0, 0
        self._last = time.perf_counter()

    def add(self, tokens: int, learned_tokens: int | None = None) -> None:
        """Count a completed step on so many tokens, all of which are learned unless it is said how many."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        self._learned_tokens += tokens if learned_tokens is None else learned_tokens
        before, self._last = self._last, time.perf_counter()
        self.longest_s = max(self.longest_s, self._last - before)

    def rates(self) -> dict[str, float]:
        """Return `step_s`, `tokens_per_s`, and per step `host_s`, the host's own work, and `data_wait_s`, the wait for
        the next batch; where not all tokens are learned also `learned_tokens_per_s`. Host and device work at the same
        time: only host time beyond a step delays it."""
        now = self._clock.seconds()
        spent = {name: now.get(name, 0.0) - self._began.get(name, 0.0) for name in (*_STEPS, DATA_WAIT)}
        seconds = max(sum(spent.values()), 1e-9)
        rates = {"tokens_per_s": self._tokens / seconds}
        if self._learned_tokens != self._tokens:
            rates["learned_tokens_per_s"] = self._learned_tokens / seconds
        return {
            "step_s": seconds / self._steps,
            **rates,
            "host_s": spent[HOST] / self._steps,
            "data_wait_s": (spent[DATA] + spent[DATA_WAIT]) / self._steps,
        }


class Goodput(NamedTuple):
    """`share` of the seconds of all attempts that was spent in training steps that count; `seconds` by phase."""

    share: float
    seconds: dict[str, float]
    attempts: int

    def __str__(self) -> str:
        others = sorted(
            ((s, name) for name, s in self.seconds.items() if name != "training" and s >= 0.05), reverse=True
        )
        explained = ", ".join(f"{name.replace('_', ' ')} {units.seconds(s)}" for s, name in others)
        spent, whole = units.seconds(self.seconds["training"]), units.seconds(sum(self.seconds.values()))
        over = f" over {self.attempts} attempts" if self.attempts > 1 else ""
        rest = f"; the rest: {explained}" if explained else ""
        return f"goodput {self.share:.1%}: {spent} of {whole}{over} in training steps{rest}"


class Attempts:
    """A file with one line per attempt (start) of a run: its steps and its seconds by phase, updated while it lasts."""

    def __init__(self, path: Path, clock: Clock, step: int):
        self._file, self._clock = self.file(path), clock
        self._earlier = self._file.rows()
        self._own = {"from_step": step, "to_step": step}
        self._written = 0.0
        self.write(now=True)

    @staticmethod
    def file(path: Path) -> JsonLines:
        """Return the file of earlier attempts."""
        return JsonLines(path, _is_attempt)

    def write(self, step: int | None = None, now: bool = False) -> None:
        """Record that `step` steps are done; write the file at most every few seconds, or `now`."""
        self._own["to_step"] = self._own["to_step"] if step is None else step
        if now or time.monotonic() - self._written > _WRITE_EVERY_S:
            self._written = time.monotonic()
            self._file.replace(self._rows())

    def goodput(self) -> Goodput:
        """Return the goodput of all attempts until now."""
        return summary(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return [*self._earlier, {**self._own, "seconds": self._clock.seconds()}]


def _is_attempt(row: dict[str, Any]) -> bool:
    steps, seconds = (row.get("from_step"), row.get("to_step")), row.get("seconds")
    timed = isinstance(seconds, dict) and all(isinstance(s, int | float) for s in seconds.values())
    return timed and all(isinstance(step, int) for step in steps)


def summary(attempts: Iterable[dict[str, Any]]) -> Goodput:
    """Sum the lines of `Attempts`.

    Steps after the checkpoint from which the next attempt resumed are `lost_steps`. Time in which no process ran does
    not count.
    """
    attempts = list(attempts)
    total: dict[str, float] = defaultdict(float, training=0.0)
    for attempt, following in itertools.zip_longest(attempts, attempts[1:]):
        for name, seconds in attempt["seconds"].items():
            total["training" if name in _STEPS else name] += seconds
        done, lost = attempt["to_step"] - attempt["from_step"], 0
        if following is not None:
            lost = min(max(attempt["to_step"] - following["from_step"], 0), done)
        if lost:
            seconds = sum(attempt["seconds"].get(name, 0.0) for name in _STEPS) * lost / done
            total["training"] -= seconds
            total["lost_steps"] += seconds
    return Goodput(total["training"] / max(sum(total.values()), 1e-9), dict(total), len(attempts))
