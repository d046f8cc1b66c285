"""Progress of a long run: a live bar on a terminal, plain lines elsewhere, always on standard error."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from jaxlm.cli.tables import wrapped
from jaxlm.core import units
from jaxlm.training.display import Display

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def saying(doing: str) -> Iterator[None]:
    """Print a line about what is being done, and show it on a terminal for the length of a block."""
    with working(doing) as say:
        say(f"jaxlm: {doing} …")
        yield


@contextmanager
def working(doing: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done for the length of a block, and yield a function that prints a sentence."""
    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print("\n".join(wrapped(line, sys.stderr)), markup=False, soft_wrap=True)

    with console.status(doing, spinner="line"):
        yield say


class Bar(Display):
    """A display of `steps` steps; a context, because a bar must be taken down."""

    def __init__(self, steps: int):
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._steps = steps
        self._task: TaskID | None = None
        self._reading: Progress | None = None
        self._said = time.monotonic()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._end_reading()

    def mute(self) -> None:
        """Show nothing from here on."""
        self._console.quiet = True

    def say(self, line: str) -> None:
        """Print a line above the bar: of a run's log, whole at any width, so that it can be searched."""
        self._console.print(line, markup=False, soft_wrap=True)

    def example(self, title: str, pieces: Sequence[tuple[str, bool]]) -> None:
        """Print a conversation, what is learned in green; without colours, in brackets."""
        self.say(title)
        shown = Text()
        for piece, learned in pieces:
            marked = f"⟦{piece}⟧" if learned and self._console.color_system is None else piece
            shown.append(marked, "bold green" if learned else "dim")
        self._console.print(shown, soft_wrap=True)

    def progress(self, doing: str, done: int, size: int) -> None:
        """Show `done` of `size` bytes of the work before the first step, in a bar of its own; without a terminal, in a
        line every ten seconds."""
        if self._bar.disable:
            if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES and done < size:
                self._said = time.monotonic()
                self.say(f"{doing}: {units.size(done)} of {units.size(size)}")
            return
        if self._reading is None:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(compact=True)
            self._reading = Progress(*columns, console=self._console, transient=True)
            self._reading.add_task(doing)
            self._reading.start()
        self._reading.update(self._reading.task_ids[0], description=doing, completed=done, total=size)
        if done >= size:
            self._end_reading()

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.stop()
            self._reading = None

    def begin(self, step: int, steps: int | None = None) -> None:
        """Show the bar, at this step: those before it are no measure of the time left."""
        self._end_reading()  # a terminal shows one at a time
        self._task = self._bar.add_task("step", total=steps or self._steps, completed=step, metrics="")
        self._bar.start()

    def advance(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Move the bar; without a terminal, print the metrics."""
        if self._task is None:
            self.begin(step)
        assert self._task is not None
        if metrics is None:
            self._bar.update(self._task, completed=step)
            return
        shown = _metrics(metrics)
        self._bar.update(self._task, completed=step, metrics=shown)
        if self._bar.disable:
            self.say(f"step {step}: {shown}")


def _metrics(metrics: dict[str, Any]) -> str:
    loss = "not finite" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
    rate = f"{metrics['tokens_per_s']:,.0f} tokens/s"
    if "learned_tokens_per_s" in metrics:
        rate += f", {metrics['learned_tokens_per_s']:,.0f} of them learned"
    epoch = [f"epoch {epoch:.{1 if epoch >= 1 else 2}f}" for epoch in [metrics.get("epoch")] if epoch is not None]
    return " · ".join([f"loss {loss}", *preferences(metrics), *epoch, rate])


def preferences(metrics: dict[str, Any]) -> list[str]:
    """Return in words how well the chosen answers are told from the rejected ones; empty without preferences."""
    words = ("accuracy", ".1%"), ("margin", ".4f")
    return [f"{name} {metrics[name]:{form}}" for name, form in words if metrics.get(name) is not None]


@contextmanager
def counting(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Show on a terminal how many of so many are done for the length of a block, and yield a function that counts
    one."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True)
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task(doing, total=total)
        yield lambda: shown.advance(task)
