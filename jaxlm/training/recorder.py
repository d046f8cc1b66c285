"""The recorder of a training run: one object through which the loop writes files and reports to trackers."""

import math
from collections.abc import Iterator
from typing import Any

from jaxlm.parallel.processes import broadcast_from_first, is_first
from jaxlm.training.config import RecordsConfig
from jaxlm.training.paths import RunPaths
from jaxlm.training.records import JsonLines
from jaxlm.training.sinks import Sink, TensorBoard, WeightsAndBiases


class Recorder:
    """A writer of rows of numbers with their `step`, each to the file of its kind and to TensorBoard and W&B.

    A run that resumes after step `resumed` drops later steps from files and sinks. In a job of several processes the
    first one writes, and the other recorders are silent. Close it, or use it as a context.
    """

    def __init__(self, paths: RunPaths, settings: RecordsConfig, resumed: int, config: dict[str, Any]):
        files = {"train": paths.metrics, "evaluation": paths.evaluations, "norms": paths.norms}
        self._files = {kind: JsonLines(path) for kind, path in files.items()}
        self._sinks: list[Sink] = []
        if not is_first():
            return
        for file in self._files.values():
            file.cut_after(resumed)
        if settings.tensorboard:
            self._sinks.append(TensorBoard(paths.tensorboard, resumed))
        if settings.wandb_project is not None:
            self._sinks.append(WeightsAndBiases(paths, settings.wandb_project, config))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            sink.close()

    def write(self, kind: str, row: dict[str, Any]) -> None:
        """Write a row of kind "train", "evaluation" or "norms". Values may be nested dicts and lists of numbers; the
        sinks join their names by "/"."""
        self._files[kind].append(row)
        if self._sinks:
            values = dict(_numbers(kind, {name: value for name, value in row.items() if name != "step"}))
            for sink in self._sinks:
                sink.write(row["step"], values)

    def holds(self, kind: str, step: int) -> bool:
        """Return whether a row of this step is written; the same on every process."""
        return bool(broadcast_from_first(is_first() and any(row["step"] == step for row in self._files[kind].rows())))

    def flush(self) -> None:
        """Flush the sinks, so that the written rows survive the process."""
        for sink in self._sinks:
            sink.flush()


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inside is not None:
        for key, item in inside:
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)
