"""What a person sees of a long run: a live bar on a terminal, plain lines elsewhere, always on standard error."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A `training.loop.Display` of `steps` steps; a context, because a bar must be taken down. A `quiet` one shows
    nothing."""

    def __init__(self, steps: int, quiet: bool = False):
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
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
        self._task = self._bar.add_task("step", total=steps, metrics="")

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(line, markup=False, soft_wrap=True)

    def advance(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Move the bar; where there is none, print the metrics."""
        if metrics is None:
            self._bar.update(self._task, completed=step)
            return
        shown = _metrics(metrics)
        self._bar.update(self._task, completed=step, metrics=shown)
        if self._bar.disable:
            self.say(f"step {step}: {shown}")


def _metrics(metrics: dict[str, Any]) -> str:
    loss = "not finite" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
    return f"loss {loss} · {metrics['tokens_per_s']:,.0f} tokens/s"
