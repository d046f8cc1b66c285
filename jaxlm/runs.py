"""Runs side by side: their states, the keys that differ, and their losses, read from their folders."""

import os
import time
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxlm.config import Experiment, leaves
from jaxlm.core.errors import InputError
from jaxlm.families.files import CONFIG, read_json, text_of
from jaxlm.run import Run
from jaxlm.training.paths import RunPaths
from jaxlm.training.records import JsonLines

State = Literal["running", "finished", "stopped", "imported", "unreadable"]
_POINTS = 8  # at which losses are compared


class RunSummary(NamedTuple):
    """A run as its folder tells it.

    `family`: of the published weights that it holds or began with; None without any. `step` of `steps`: the last
    recorded one. `loss`: of its last training step on record, and `held_out_loss`: of its last evaluation, in nats per
    token; None without one. `age_s`: seconds since something was recorded. `begun_from`: the model that its weights
    began with, or None.
    """

    run: str
    state: State
    family: str | None
    step: int
    steps: int | None
    loss: float | None
    held_out_loss: float | None
    age_s: float
    begun_from: str | None


class LossesAt(NamedTuple):
    """The loss of each run after `at` steps, or training tokens."""

    at: int
    losses: list[float]


class Losses(NamedTuple):
    """The losses of runs where all have one, at equal steps and at equal numbers of training tokens."""

    steps: list[LossesAt]
    tokens: list[LossesAt]


class RunComparison(NamedTuple):
    """Runs side by side: the keys whose values differ, with the value of each run, and their losses in nats per token.

    A key that a run does not have is None there. `--from` is the model that a run began with. `unmeasured`: the runs
    that have no loss on record, such as imported weights.
    """

    runs: list[str]
    unmeasured: list[str]
    keys: dict[str, list[Any]]
    training: Losses
    held_out: Losses


class _Curves(NamedTuple):
    """The losses of a run by step, and the tokens of a step."""

    name: str
    tokens_per_step: int
    training: dict[int, float]
    held_out: dict[int, float]


def find(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder and below it, the latest first. Raise InputError if there is no such folder."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; give one that holds runs")
    found = []
    for directory, below, _ in os.walk(folder):
        paths = RunPaths(Path(directory))
        run = Run(paths.directory)
        if paths.are_of_a_run:
            below.clear()
            found.append(_summary(run))
    return sorted(found, key=lambda run: (run.age_s, run.run))


def _summary(run: Run) -> RunSummary:
    paths = run.paths
    training, held_out = JsonLines(paths.metrics).rows(), JsonLines(paths.evaluations).rows()
    step = max((row["step"] for row in (*training, *held_out)), default=0)
    recorded = [path.stat().st_mtime for path in (paths.config, paths.metrics, paths.evaluations) if path.exists()]
    state, steps = _state(run, held_out[-1]["step"] if held_out else 0)
    last = [rows[-1].get("loss") if rows else None for rows in (training, held_out)]
    age_s = max(time.time() - max(recorded), 0.0)
    return RunSummary(str(paths), state, _family(run), step, steps, *last, age_s, _origin(run))


def _family(run: Run) -> str | None:
    try:
        return text_of(read_json(run.paths.huggingface / CONFIG)).get("model_type")
    except InputError:  # none came with it
        return None


def _origin(run: Run) -> str | None:
    try:
        return None if run.begun_from is None else str(run.begun_from)
    except InputError:  # of a run that is unreadable
        return None


def _state(run: Run, evaluated: int) -> tuple[State, int | None]:
    """Return the state and the last step of a run that was evaluated at some step."""
    if run.is_imported:
        return "imported", None
    try:
        state, steps = "stopped", run.experiment().training.steps
    except InputError:
        state, steps = "unreadable", None
    if steps is not None and evaluated >= steps:
        return "finished", steps
    try:
        run.check_free()
    except InputError:
        state = "running"
    return state, steps


def compare(folders: Sequence[Path], picture: Path | None = None) -> RunComparison:
    """Compare runs, and draw their curves as a PNG at `picture`. Raise InputError for a folder that is no run, or
    a picture that cannot be written.
    """
    runs = [Run(folder) for folder in folders]
    experiments = [run.experiment() for run in runs]
    curves = [_curves(run, experiment) for run, experiment in zip(runs, experiments, strict=True)]
    if picture is not None:
        _draw(curves, picture)
    return RunComparison(
        [str(run.paths) for run in runs],
        [curve.name for curve in curves if not curve.training and not curve.held_out],
        _differing([_keys(run, experiment) for run, experiment in zip(runs, experiments, strict=True)]),
        _losses(curves, lambda run: run.training),
        _losses(curves, lambda run: run.held_out),
    )


def _curves(run: Run, experiment: Experiment) -> _Curves:
    training, held_out = (
        {row["step"]: row["loss"] for row in JsonLines(path).rows() if isinstance(row.get("loss"), float)}
        for path in (run.paths.metrics, run.paths.evaluations)
    )
    return _Curves(str(run.paths), experiment.training.batch * experiment.training.sequence, training, held_out)


def _keys(run: Run, experiment: Experiment) -> dict[str, Any]:
    """Return the keys of a run, with the model that it began with, whose tokenizer it keeps a copy of."""
    values = dict(leaves(experiment.model_dump(mode="json", exclude_none=True)))
    if (origin := _origin(run)) is None:
        return values
    if values["data.tokenizer"] == str(run.paths.tokenizer):
        del values["data.tokenizer"]
    return values | {"--from": origin}


def _differing(values: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for each in values for key in each)
    found = {key: [each.get(key) for each in values] for key in keys}
    return {key: each for key, each in found.items() if any(value != each[0] for value in each)}


def _losses(runs: Sequence[_Curves], curve: Callable[[_Curves], dict[int, float]]) -> Losses:
    by_step = [curve(run) for run in runs]
    by_tokens = [{step * run.tokens_per_step: loss for step, loss in curve(run).items()} for run in runs]
    return Losses(_in_common(by_step), _in_common(by_tokens))


def _in_common(curves: Sequence[dict[int, float]]) -> list[LossesAt]:
    """Return the losses at up to _POINTS places that all curves have, evenly spaced, the last among them."""
    places = sorted(reduce(set.intersection, map(set, curves)))
    few = min(len(places), _POINTS)
    chosen = [places[(i + 1) * len(places) // few - 1] for i in range(few)]
    return [LossesAt(at, [curve[at] for curve in curves]) for at in chosen]


def _draw(runs: Sequence[_Curves], path: Path) -> None:
    """Draw training losses (lines) and held-out losses (dots) over steps, and over tokens where a step's differ."""
    from matplotlib.figure import Figure

    scales: dict[str, Callable[[_Curves], int]] = {"step": lambda run: 1}
    if len({run.tokens_per_step for run in runs}) > 1:
        scales["training tokens"] = lambda run: run.tokens_per_step
    figure = Figure(figsize=(7 * len(scales), 4), layout="constrained")
    for axes, (name, scale) in zip(figure.subplots(1, len(scales), squeeze=False)[0], scales.items(), strict=True):
        for number, run in enumerate(runs):
            color = f"C{number}"
            steps = [scale(run) * step for step in run.training]
            axes.plot(steps, list(run.training.values()), lw=1, color=color, label=run.name)
            axes.plot([scale(run) * step for step in run.held_out], list(run.held_out.values()), "o", color=color)
        axes.set(xlabel=name, ylabel="loss (nats per token); dots: held out")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
