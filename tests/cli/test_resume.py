"""Runs that are killed, interrupted and moved between meshes end as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

CONFIG = """
[model]
vocabulary = 257
context = 32
layers = 2
width = 32
norm = {kind = "layer"}
position = {kind = "learned"}
attention = {heads = 4}
feed_forward = {hidden = 64, activation = "gelu"}
[data]
text = ["TEXT"]
tokenizer = "bytes"
[training]
steps = 240
batch = 8
dtype = "float32"
dropout = 0.1
log_every = 1
[evaluation]
every = 40
batches = 2
[checkpoint]
every = 20
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    draw = random.Random(0)
    text = " ".join(draw.choice(["alpha", "beta", "gamma", "delta", "epsilon"]) for _ in range(20_000))
    (folder / "text.txt").write_text(text)
    path = folder / "tiny.toml"
    path.write_text(CONFIG.replace("TEXT", str(folder / "text.txt")))
    return path


def start(config, run, *overrides):
    code = "import sys; from jaxlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", str(config), "--out", str(run), "mesh.fsdp=1", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def rows(run, name="metrics.jsonl"):
    """{step: (loss, grad_norm)}; each step once, in order, none left out between."""
    found = [json.loads(line) for line in (run / name).read_text().splitlines()]
    steps = [row["step"] for row in found]
    assert steps == sorted(set(steps))
    return {row["step"]: (row["loss"], row.get("grad_norm")) for row in found}


def wait_for(run, process, step):
    """Until a step is recorded, or the process is gone."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and any(f'"step": {n},' in path.read_text() for n in range(step, 241)):
            return
        time.sleep(0.005)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(start(config, run))
    assert list(rows(run)) == list(range(1, 241))
    return run


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_in_the_same_losses(config, uninterrupted, tmp_path):
    draw = random.Random(1)
    run, kills = tmp_path / "run", 0
    for target in sorted(draw.sample(range(5, 180), 6)):
        process = start(config, run)
        wait_for(run, process, target)
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills == 6
    finish(start(config, run))
    assert rows(run) == rows(uninterrupted)
    assert rows(run, "evaluations.jsonl") == rows(uninterrupted, "evaluations.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_how_to_go_on(config, uninterrupted, tmp_path, number, status):
    run = tmp_path / "run"
    process = start(config, run)
    wait_for(run, process, 30)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    last = errors.strip().splitlines()[-1]
    assert "checkpoint written; to go on: jaxlm train" in last
    stopped = max(rows(run))
    assert f"stopped at step {stopped}" in last and stopped < 240
    assert (run / "checkpoints" / str(stopped)).is_dir()
    assert f"resuming from step {stopped}" in finish(start(config, run))
    assert rows(run) == rows(uninterrupted)


@pytest.mark.slow
def test_a_run_moves_from_mesh_to_mesh(config, uninterrupted, tmp_path):
    run = tmp_path / "run"
    # 5 steps are too few for rounding to grow: the tolerance of DESIGN holds from one mesh to the next.
    for steps, mesh in ((20, "mesh.data=2"), (40, "mesh.fsdp=4"), (60, "mesh.tensor=1")):
        key, size = mesh.split("=")
        others = [f"mesh.{axis}=1" for axis in ("data", "fsdp", "tensor") if f"mesh.{axis}" != key]
        finish(start(config, run, f"training.steps={steps}", "optimizer.schedule.decay_steps=240", *others, mesh))
    moved, whole = rows(run), rows(uninterrupted)
    assert list(moved) == list(range(1, 61))
    np.testing.assert_allclose([moved[s][0] for s in moved], [whole[s][0] for s in moved], rtol=1e-4)


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_only_the_way_from_the_one_before(config, uninterrupted, tmp_path):
    run = tmp_path / "run"
    finish(start(config, run, "training.steps=60", "optimizer.schedule.decay_steps=240"))
    file = max((p for p in (run / "checkpoints" / "60").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    errors = finish(start(config, run))
    assert "checkpoint 60 is damaged" in errors and "resuming from step 40" in errors
    assert rows(run) == rows(uninterrupted)


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(config, uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    finish(start(config, uninterrupted))
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.batch=16", "training.batch = 8, not 16"),
        ("model.width=64", "model.attention.head_width = 8, not 16"),
        ("training.seed=1", "training.seed = 0, not 1"),
        ("data.held_out=0.2", "other data"),
    ],
)
def test_a_run_is_not_continued_as_another(config, uninterrupted, override, named):
    process = start(config, uninterrupted, override)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert named in errors.strip().splitlines()[-1]
