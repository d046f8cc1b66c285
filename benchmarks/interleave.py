"""Interleaved timing of processes that do the same work in different ways, under the same machine conditions.

A worker reads a number of steps per line on its standard input and answers with the seconds per step; at the end of its
input it answers with its facts. Each answer is one line of JSON.
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
    """A timed program: `run` does n steps and waits for the last; `facts` gives the device and the peak memory."""

    run: Callable[[int], None]
    facts: Callable[[], dict[str, Any]]


class WorkerResult(NamedTuple):
    """Seconds per step of each block and the facts of a worker, or the error that it failed with."""

    step_s: list[float]
    facts: dict[str, Any]
    failed: str | None


def serve(make: Callable[[], Worker]) -> None:
    """Run as a worker. An error ends it with the facts {"failed": message}."""
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


def run_interleaved(commands: dict[str, list[str]], steps: int, blocks: int) -> dict[str, WorkerResult]:
    """Alternate blocks of steps between the commands, and return each command's result.

    The first block of each is warm-up and ends before the next command starts, so that compilation and autotuning run
    undisturbed. A worker that fails is skipped from then on.
    """
    processes = {}
    for name, command in commands.items():
        processes[name] = process = _Process(command)
        process.block(steps)
        process.step_s.clear()
    for _ in range(blocks):
        for process in processes.values():
            process.block(steps)
    return {name: process.end() for name, process in processes.items()}


def run_or_exit(commands: dict[str, list[str]], steps: int, blocks: int) -> dict[str, WorkerResult]:
    """Return what `run_interleaved` does. Exits with the errors where workers fail."""
    worked = run_interleaved(commands, steps, blocks)
    if failed := [f"{name}: {done.failed}" for name, done in worked.items() if done.failed]:
        raise SystemExit("\n".join(failed))
    return worked


def row(step_s: list[float], tokens: int, jaxlm_s: list[float] | None) -> dict[str, Any]:
    """Return one worker's figures for steps of `tokens` tokens, and jaxlm's time relative to them."""
    return {
        "median_step_s": statistics.median(step_s),
        "min_step_s": min(step_s),
        "median_tokens_per_s": tokens / statistics.median(step_s),
        "jaxlm_over_this": jaxlm_s and statistics.median(j / s for j, s in zip(jaxlm_s, step_s, strict=True)),
        "blocks_step_s": step_s,
    }


def describe(name: str, row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    ratio = row["jaxlm_over_this"]
    return f"{name}: {1e3 * row['median_step_s']:.1f} ms per step, {row['median_tokens_per_s']:,.0f} tokens/s" + (
        f"; jaxlm takes {ratio:.2f} of its time (median of the paired ratios)" if ratio else ""
    )


class _Process:
    """A worker's process, its block times and its last answer."""

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
            pass  # its last line is still to be read
        answer = self._answer()
        if isinstance(answer, dict):
            self._last = answer
        else:
            self.step_s.append(answer)

    def end(self) -> WorkerResult:
        if self._last is None:
            self._popen.stdin.close()
            self._last = self._answer()
        self._popen.wait()
        return WorkerResult(self.step_s, self._last, self._last.get("failed"))

    def _answer(self) -> Any:
        line = self._popen.stdout.readline()
        return json.loads(line) if line else {"failed": f"ended with status {self._popen.wait()}"}
