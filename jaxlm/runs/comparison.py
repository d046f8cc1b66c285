"""Runs side by side: the keys that differ, and their losses, read from their folders."""

import tomllib
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.config.step_sizes import SIZE_KEYS
from jaxlm.core.addresses import with_addresses
from jaxlm.core.errors import InputError
from jaxlm.core.moved_keys import with_present_keys
from jaxlm.core.schema import leaves
from jaxlm.runs.folder import Run
from jaxlm.runs.summary import origin_of
from jaxlm.training.records import JsonLines

_POINTS = 8  # at which losses are compared


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


def compare(folders: Sequence[Path], picture: Path | None = None) -> RunComparison:
    """Compare runs, and draw their curves as a PNG at `picture`. Raise InputError for a folder that is no run, or
    a picture that cannot be written.
    """
    runs = [Run(folder) for folder in folders]
    recorded = [_recorded(run) for run in runs]
    curves = [_curves(run, values) for run, values in zip(runs, recorded, strict=True)]
    if picture is not None:
        _draw(curves, picture)
    return RunComparison(
        [str(run.paths) for run in runs],
        [curve.name for curve in curves if not curve.training and not curve.held_out],
        _differing([_keys(run, values) for run, values in zip(runs, recorded, strict=True)]),
        _losses(curves, lambda run: run.training),
        _losses(curves, lambda run: run.held_out),
    )


def _recorded(run: Run) -> dict[str, Any]:
    """Return the configuration of a run by dotted key; where it cannot be checked here, as without a plug-in, as it is
    written. Raises InputError for a folder that is no run, and where the size of a step is not on record."""
    try:
        return dict(leaves(run.experiment().model_dump(mode="json", exclude_none=True)))
    except InputError:
        if not run.paths.are_of_a_run:
            raise
        try:
            written = tomllib.loads(run.paths.config.read_text(encoding="utf-8"))
            values = dict(leaves(with_present_keys(written)))
        except (OSError, ValueError):
            values = {}
        if not all(isinstance(values.get(key), int) for key in SIZE_KEYS["train"]):
            raise
        return values


def _curves(run: Run, recorded: dict[str, Any]) -> _Curves:
    training, held_out = (
        {row["step"]: row["loss"] for row in JsonLines(path).rows() if isinstance(row.get("loss"), float)}
        for path in (run.paths.metrics, run.paths.evaluations)
    )
    batch, sequence = (recorded[key] for key in SIZE_KEYS["train"])
    return _Curves(str(run.paths), batch * sequence, training, held_out)


def _keys(run: Run, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a run, with the model that it began with, whose tokenizer it keeps a copy of."""
    values = dict(recorded)
    if (origin := origin_of(run)) is None:
        return values
    if values.get("data.tokenizer") == with_addresses(run.paths.tokenizer):
        del values["data.tokenizer"]
    return values | {"--from": origin}


def _differing(values: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for each in values for key in each)
    by_key = {key: [each.get(key) for each in values] for key in keys}
    return {key: each for key, each in by_key.items() if any(value != each[0] for value in each)}


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
