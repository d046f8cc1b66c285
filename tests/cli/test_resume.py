"""Runs that are killed, interrupted and moved between meshes end as if nothing had happened."""

import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from runs import COMPILING, SIGNALS, finish, losses, rows, start, wait_for_step, write_config

from jaxlm.cli import main
from jaxlm.runs.folder import Run

STEPS = 200


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    return write_config(folder, f"training.steps={STEPS}", "evaluation.every=40")


def figures(run, name="metrics.jsonl"):
    """{step: (loss, grad_norm)}; each step once, in order."""
    assert list(losses(run, name)) == [row["step"] for row in rows(run, name)]
    return {row["step"]: (row["loss"], row.get("grad_norm")) for row in rows(run, name)}


# A run that is looked at when it is done needs no more.
SHORT = "training.steps=5", "evaluation.every=2", "checkpoint.every=2"


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run that ended, of more steps than two checkpoints are apart, trained in this process."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", str(config), *SHORT, "--out", str(run)]) == 0
    assert list(figures(run)) == [1, 2, 3, 4, 5]
    return run


def test_the_last_evaluation_is_bounded(config, finished, tmp_path):
    """In whole batches, here of 8 × 32 tokens; its steps are those of a run that is measured on all held-out text."""
    run = tmp_path / "run"
    assert main(["train", str(config), *SHORT, "evaluation.final_tokens=300", "--out", str(run)]) == 0
    bounded, whole = (rows(folder, "evaluations.jsonl")[-1] for folder in (run, finished))
    assert 256 < bounded["tokens"] <= 512 < whole["tokens"]
    assert figures(run) == figures(finished)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(start(config, run))
    assert list(figures(run)) == list(range(1, STEPS + 1))
    return run


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("times", [3, 20])
def test_a_run_killed_at_random_moments_ends_in_the_same_losses(config, uninterrupted, tmp_path, times):
    draw = random.Random(1)
    run, kills = tmp_path / "run", 0
    for target in sorted(draw.sample(range(5, STEPS - 60), times)):
        process = start(config, run)
        wait_for_step(process, run, target)
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills == times
    finish(start(config, run))
    assert figures(run) == figures(uninterrupted)
    assert figures(run, "evaluations.jsonl") == figures(uninterrupted, "evaluations.jsonl")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_second_start_is_refused_until_the_first_is_gone(config, tmp_path):
    run = tmp_path / "run"
    first = start(config, run, "training.steps=100000", "checkpoint.every=100000")
    wait_for_step(first, run, 1)
    _, errors = finish(start(config, run), status=2)
    assert errors == f"jaxlm: another jaxlm train is at work in {run}; wait for its end, or choose another --out\n"
    first.kill()
    first.communicate()
    finish(start(config, run, "training.steps=5"))
    assert list(losses(run))[:5] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.exhaustive  # test_stops.py has signals, and test_adapter_runs.py a run that goes on bit-equal
@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_saves_and_says_how_to_go_on(config, uninterrupted, tmp_path, number, status):
    run = tmp_path / "run"
    process = start(config, run)
    wait_for_step(process, run, 30)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    last = errors.strip().splitlines()[-1]
    assert "checkpoint written; to go on: jaxlm train" in last
    stopped = max(losses(run))
    assert f"stopped at step {stopped}" in last and stopped < STEPS
    assert (run / "checkpoints" / str(stopped)).is_dir()
    assert f"resuming from step {stopped}" in finish(start(config, run, before=COMPILING))[1]
    assert figures(run) == figures(uninterrupted)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_moves_from_mesh_to_mesh(config, uninterrupted, tmp_path):
    run = tmp_path / "run"
    # 5 steps are too few for rounding to grow: the tolerance of DESIGN holds from one mesh to the next.
    for steps, mesh in ((20, "mesh.data=2"), (40, "mesh.fsdp=2")):
        key, size = mesh.split("=")
        others = [f"mesh.{axis}=1" for axis in ("data", "fsdp", "tensor") if f"mesh.{axis}" != key]
        finish(start(config, run, f"training.steps={steps}", *others, mesh, devices=int(size)))
    moved, whole = figures(run), figures(uninterrupted)
    assert list(moved) == list(range(1, 41))
    np.testing.assert_allclose([moved[s][0] for s in moved], [whole[s][0] for s in moved], rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_corrupt_checkpoint_costs_only_the_way_from_the_one_before(config, uninterrupted, tmp_path):
    run = tmp_path / "run"
    finish(start(config, run, "training.steps=60"))
    file = max((p for p in (run / "checkpoints" / "60").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    _, errors = finish(start(config, run))
    assert "checkpoint 60 is corrupt" in errors and "resuming from step 40" in errors
    assert figures(run) == figures(uninterrupted)


def refused(capsys, config, run, *overrides):
    """Return the one line that a run is refused with, here: a process takes seconds to start."""
    assert main(["train", str(config), *SHORT, *overrides, "--out", str(run)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_lost_is_not_begun_anew(config, finished, tmp_path, capsys):
    """Its records stay: the checkpoints may be on a disk that is not mounted."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    sums = list((run / "checkpoints").glob("*/checksums.json"))
    for file in sums:
        file.write_bytes(b"")
    assert "/checkpoints is corrupt; restore one from a copy" in refused(capsys, config, run) and len(sums) > 1
    assert all(file.exists() for file in sums)
    shutil.rmtree(run / "checkpoints")
    for _ in "away", "a mount point without its disk":
        line = refused(capsys, config, run)
        assert "/checkpoints has no checkpoint, though metrics.jsonl has 5 steps; put it" in line
        (run / "checkpoints").mkdir(exist_ok=True)
    assert figures(run) == figures(finished)


def test_a_checkpoint_that_is_being_written_is_none(tmp_path):
    """Else a run that ends there would not look for the weights that it began with."""
    run = Run(tmp_path)
    (run.paths.checkpoints / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    assert not run.has_checkpoint
    (run.paths.checkpoints / "10").mkdir()
    assert run.has_checkpoint


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(config, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    assert main(["train", str(config), *SHORT, "--out", str(finished)]) == 0
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.batch=16", "training.batch = 8, not 16"),
        ("model.d_model=64", "model.d_model = 32, not 64"),
        ("training.seed=1", "training.seed = 0, not 1"),
        ("data.held_out=0.2", "data.held_out = 0.1, not 0.2"),
    ],
)
def test_a_run_is_not_continued_as_another(config, finished, override, named, capsys):
    assert named in refused(capsys, config, finished, override)
