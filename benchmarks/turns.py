"""Processes that take turns: each does the same work in its own way, and all see the same machine.

A worker answers each number of steps on its standard input with the seconds that a step took, and the end of its input
with its facts: one line of JSON each.
"""

import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple


class Worker(NamedTuple):
    """`run` does n steps and waits for the last; `facts` says where they ran and what memory they took."""

    run: Callable[[int], None]
    facts: Callable[[], dict[str, Any]]


class Worked(NamedTuple):
    """What came of a worker: the seconds of a step in each block and its facts, or why it failed."""

    step_s: list[float]
    facts: dict[str, Any]
    failed: str | None


def answer(make: Callable[[], Worker]) -> None:
    """Be a worker. An error ends it with the facts {"failed": why}."""
    try:
        worker = make()
        for line in sys.stdin:
            steps = int(line)
            began = time.perf_counter()
            worker.run(steps)
            print(json.dumps((time.perf_counter() - began) / steps), flush=True)
        facts = worker.facts()
    except Exception as error:
        traceback.print_exc()
        facts = {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    print(json.dumps(facts), flush=True)


def take_turns(commands: dict[str, list[str]], steps: int, blocks: int) -> dict[str, Worked]:
    """Blocks of steps of each command in turn. The first of each is warm-up, before the next is started: what one
    compiles and tries out, no other disturbs. A worker that fails is left out from then on."""
    processes = {}
    for name, command in commands.items():
        processes[name] = process = _Process(command)
        process.block(steps)
        process.step_s.clear()
    for _ in range(blocks):
        for process in processes.values():
            process.block(steps)
    return {name: process.end() for name, process in processes.items()}


def row(step_s: list[float], tokens: int, jaxlm_s: list[float] | None) -> dict[str, Any]:
    """The figures of one worker, whose step has so many tokens, beside jaxlm's blocks where there are any."""
    return {
        "median_step_s": statistics.median(step_s),
        "min_step_s": min(step_s),
        "median_tokens_per_s": tokens / statistics.median(step_s),
        "jaxlm_over_this": jaxlm_s and statistics.median(j / s for j, s in zip(jaxlm_s, step_s, strict=True)),
        "blocks_step_s": step_s,
    }


def describe(name: str, row: dict[str, Any]) -> str:
    """A row in one line."""
    ratio = row["jaxlm_over_this"]
    return f"{name}: {1e3 * row['median_step_s']:.1f} ms per step, {row['median_tokens_per_s']:,.0f} tokens/s" + (
        f"; jaxlm takes {ratio:.2f} of its time (median of the paired ratios)" if ratio else ""
    )


class _Process:
    def __init__(self, command: list[str]):
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step_s: list[float] = []
        self._last: dict[str, Any] | None = None

    def block(self, steps: int) -> None:
        if self._last is not None:
            return
        try:
            self._popen.stdin.write(f"{steps}\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # its last words are still to be read
        said = self._said()
        if isinstance(said, dict):
            self._last = said
        else:
            self.step_s.append(said)

    def end(self) -> Worked:
        if self._last is None:
            self._popen.stdin.close()
            self._last = self._said()
        self._popen.wait()
        return Worked(self.step_s, self._last, self._last.get("failed"))

    def _said(self) -> Any:
        line = self._popen.stdout.readline()
        return json.loads(line) if line else {"failed": f"ended with status {self._popen.wait()}"}
