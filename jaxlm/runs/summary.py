"""Runs as their folders tell them: state, steps, losses."""

import os
import time
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

from jaxlm.core import copies
from jaxlm.core.addresses import address
from jaxlm.core.errors import InputError
from jaxlm.families.files import CONFIG, read_json, text_of
from jaxlm.runs.folder import Run
from jaxlm.training import manifests
from jaxlm.training.paths import RunPaths
from jaxlm.training.records import JsonLines

State = Literal["running", "finished", "stopped", "imported", "unreadable"]


class RunSummary(NamedTuple):
    """A run as its folder tells it.

    `family`: of the published weights that it holds or began with; None without any. `step` of `steps`: the last
    recorded one. `checkpoint`: the step of the newest checkpoint, from which it would resume; None without one.
    `loss`: of its last training step on record, and `held_out_loss`: of its last evaluation, in nats per token; None
    without one. `age_s`: seconds since something was recorded. `begun_from`: the model that its weights began with, or
    None.
    """

    run: str
    state: State
    family: str | None
    step: int
    steps: int | None
    checkpoint: int | None
    loss: float | None
    held_out_loss: float | None
    age_s: float
    begun_from: str | None


def find(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder and below it, the latest first. Raise InputError if there is no such folder."""
    name = RunPaths(folder).config.name
    copies.pull(folder, lambda names: {each: each.rpartition("/")[2] == name for each in names})
    if not folder.is_dir():
        there_is_none = "is no folder" if address(folder) is None else "does not exist, or holds nothing"
        raise InputError(f"{folder} {there_is_none}; give one that holds runs")
    summaries = []
    for directory, below, _ in os.walk(folder):
        paths = RunPaths(Path(directory))
        run = Run(paths.directory)
        if paths.are_of_a_run:
            below.clear()
            summaries.append(_summary(run))
    return sorted(summaries, key=lambda run: (run.age_s, run.run))


def _summary(run: Run) -> RunSummary:
    paths = run.paths
    training, held_out = JsonLines(paths.metrics).rows(), JsonLines(paths.evaluations).rows()
    step = max((row["step"] for row in (*training, *held_out)), default=0)
    recorded = [path.stat().st_mtime for path in (paths.config, paths.metrics, paths.evaluations) if path.exists()]
    state, steps = _state(run, held_out[-1]["step"] if held_out else 0)
    loss, held_out_loss = (rows[-1].get("loss") if rows else None for rows in (training, held_out))
    age_s = max(time.time() - max(recorded), 0.0)
    whole = (
        s for s in manifests.steps_in(paths.checkpoints) if not manifests.has_lost_files(paths.checkpoints / str(s))
    )
    checkpoint = max(whole, default=None)
    return RunSummary(
        str(paths), state, _family(run), step, steps, checkpoint, loss, held_out_loss, age_s, origin_of(run)
    )


def _family(run: Run) -> str | None:
    try:
        return text_of(read_json(run.paths.huggingface / CONFIG)).get("model_type")
    except InputError:  # none came with it
        return None


def origin_of(run: Run) -> str | None:
    """Return the model that the weights of a run began with, or None; also for a run that is unreadable."""
    try:
        return None if run.begun_from is None else str(run.begun_from)
    except InputError:
        return None


def _steps(paths: RunPaths) -> int | None:
    """Return the last step that the configuration of a run gives, or None. The rest of it may be of another version,
    or of kinds that are not registered here."""
    try:
        steps = tomllib.loads(paths.config.read_text(encoding="utf-8"))["training"]["steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def _state(run: Run, evaluated: int) -> tuple[State, int | None]:
    """Return the state and the last step of a run that was evaluated at some step."""
    if run.is_imported:
        return "imported", None
    steps = _steps(run.paths)
    state: State = "unreadable" if steps is None else "stopped"
    if steps is not None and evaluated >= steps:
        return "finished", steps
    try:
        run.check_free()
    except InputError:
        state = "running"
    return state, steps
