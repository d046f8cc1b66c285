"""What a run writes down: lines of JSON, and a picture of their losses."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxlm.core.files import replace
from jaxlm.parallel.processes import is_first


def of_a_step(row: dict[str, Any]) -> bool:
    """Whether a line says of which step it is."""
    return isinstance(row.get("step"), int)


class JsonLines:
    """A file of one JSON object per line, each of which is `whole`; whole lines survive a killed process."""

    def __init__(self, path: Path, whole: Callable[[dict[str, Any]], bool] = of_a_step):
        self.path, self._whole = path, whole

    def rows(self) -> list[dict[str, Any]]:
        """Every whole line; a killed process or a bad disk may have left others broken."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and self._whole(row):
                rows.append(row)
        return rows

    def cut_after(self, step: int) -> None:
        """Drop the lines of later steps, by their `step`, so that a resumed run writes them again."""
        if self.path.exists():
            self.replace(row for row in self.rows() if row["step"] <= step)

    def replace(self, rows: Iterable[dict[str, Any]]) -> None:
        """Put these lines in place of all there are, at once; in a job of several processes the first writes."""
        if is_first():
            replace(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def append(self, row: dict[str, Any]) -> None:
        """Write one line through to the operating system; in a job of several processes the first writes."""
        if not is_first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def plot_losses(metrics: list[dict], evaluations: list[dict], path: Path) -> None:
    """Training and held-out loss over steps, as a PNG."""
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
