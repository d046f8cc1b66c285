"""Records of a run: lines of JSON, and a plot of their losses."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxlm.core.files import replace
from jaxlm.parallel.processes import is_first


def has_step(row: dict[str, Any]) -> bool:
    """Return whether a row has the number of its step."""
    return isinstance(row.get("step"), int)


class JsonLines:
    """A file of one JSON object per line. A complete line survives a killed process; `valid` says which rows count."""

    def __init__(self, path: Path, valid: Callable[[dict[str, Any]], bool] = has_step):
        self.path, self._valid = path, valid

    def rows(self) -> list[dict[str, Any]]:
        """Return every valid row; lines that a killed process or a bad disk left broken are skipped."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and self._valid(row):
                rows.append(row)
        return rows

    def cut_after(self, step: int) -> None:
        """Drop the rows of steps after `step`, which a resumed run writes again."""
        if self.path.exists():
            self.replace(row for row in self.rows() if row["step"] <= step)

    def replace(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replace the whole file with these rows, atomically; in a job of several processes the first one writes."""
        if is_first():
            replace(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def append(self, row: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system; in a job of several processes the first one writes."""
        if not is_first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def plot_losses(metrics: list[dict], evaluations: list[dict], path: Path) -> None:
    """Plot training and held-out loss over steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], lw=1, label="training batch")
    if evaluations:
        axes.plot([e["step"] for e in evaluations], [e["loss"] for e in evaluations], "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
