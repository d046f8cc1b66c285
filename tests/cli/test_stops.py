"""Ends before the last step: at any moment, soon, and with nothing lost."""

import json
import signal
import time

import pytest
from matrices import sampled
from runs import SIGNALS, finish, losses, rows, start, wait_for_line, write_config

from jaxlm.training.manifests import held_out_loss

SLOW_EVALUATION = """
import time
from jaxlm.training import evaluation
batches = evaluation.evaluation_batches
def slowly(*arguments):
    for batch in batches(*arguments):
        time.sleep(DELAY)
        yield batch
evaluation.evaluation_batches = slowly
"""
SLOW_STEPS = """
import time
from jaxlm.training import loop
batches = loop.training_batches
def slowly(*arguments, **options):
    for batch in batches(*arguments, **options):
        time.sleep(0.2)
        yield batch
loop.training_batches = slowly
"""
# As in a compiler: no signal interrupts it, and the interpreter is free for other threads.
STUCK = """
import ctypes, signal, jaxlm.data.dataset as dataset
def prepare(*arguments):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGALRM})
    print("stuck", flush=True)
    ctypes.CDLL(None).sleep(60)
dataset.prepare = prepare
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    return write_config(folder, "data.held_out=0.5", "evaluation.batches=100000", "checkpoint.every=1000")


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    _, errors = finish(start(config, run))
    assert "goodput" in errors
    return run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_signal_in_an_evaluation_does_not_wait_for_it_and_it_is_done_later(config, uninterrupted, tmp_path):
    run = tmp_path / "run"
    process = start(config, run, "--json", before=SLOW_EVALUATION.replace("DELAY", "0.5"))
    wait_for_line(process, "step 20:")
    time.sleep(1.0)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and time.monotonic() - asked < 10, errors
    assert "stopped at step 20, checkpoint written; to go on: jaxlm train" in errors.splitlines()[-1]
    printed = json.loads(out)
    assert (printed["stopped"], printed["step"]) == ("SIGTERM", 20) and not losses(run, "evaluations.jsonl")

    out, errors = finish(start(config, run, "--json"))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert losses(run, name) == losses(uninterrupted, name)
    # It is what this checkpoint is compared by, though it was written before.
    assert held_out_loss(run / "checkpoints", 20) == losses(run, "evaluations.jsonl")[20]
    goodput = rows(run, "goodput.jsonl")
    assert [(row["from_step"], row["to_step"]) for row in goodput] == [(0, 20), (20, 40)]
    printed = json.loads(out)
    assert printed["stopped"] is None and 0 < printed["goodput"] < 1
    assert sum(printed["seconds"].values()) == pytest.approx(sum(sum(row["seconds"].values()) for row in goodput))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "delay",
    [
        pytest.param("0.5", id="all text"),
        pytest.param("0.5 * (arguments[2] is not None)", id="what it is compared by"),
    ],
)
def test_a_signal_in_the_last_evaluation_leaves_it_to_the_next_start(config, uninterrupted, tmp_path, delay):
    run = tmp_path / "run"
    delayed = SLOW_EVALUATION.replace("DELAY", delay)
    options = "evaluation.every=1000", "records.sample_tokens=2"
    process = start(config, run, *options, before=delayed)
    wait_for_line(process, "step 40:")
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped at step 40, checkpoint written" in errors, errors
    assert not losses(run, "evaluations.jsonl") and not (run / "sample.txt").exists()
    finish(start(config, run, *options))
    assert losses(run, "evaluations.jsonl")[40] == losses(uninterrupted, "evaluations.jsonl")[40]
    assert held_out_loss(run / "checkpoints", 40) == losses(run, "evaluations.jsonl")[40]
    assert (run / "sample.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), sampled(SIGNALS, ["SIGTERM"]))
def test_before_the_first_step_a_signal_ends_it_though_a_compiler_does_not_hear(config, tmp_path, number, status):
    process = start(config, tmp_path / "run", before=STUCK)
    assert process.stdout.readline() == "stuck\n"
    asked = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status and time.monotonic() - asked < 15, errors
    assert "stopped before the first step; to go on: jaxlm train" in errors.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_before_the_first_step_too_hours_end_it_though_a_compiler_does_not_hear(config, tmp_path):
    began = time.monotonic()
    process = start(config, tmp_path / "run", "--max-hours", str(15 / 3600), "--json", before=STUCK)
    out, errors = finish(process)
    assert out.startswith("stuck\n") and time.monotonic() - began < 15 + 15, errors
    assert json.loads(out.splitlines()[-1])["stopped"] == "max_hours"
    assert "stopped before the first step; to go on: jaxlm train" in errors.splitlines()[-1]


SLOW_CHECKPOINT = """
import sys, time
from jaxlm.training.checkpoints import Checkpoints
write = Checkpoints._write_manifest
def slowly(self):
    print("writing the manifest", file=sys.stderr, flush=True)
    time.sleep(3)
    write(self)
Checkpoints._write_manifest = slowly
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_signal_while_the_last_checkpoint_is_written_waits_for_it(config, tmp_path):
    run = tmp_path / "run"
    process = start(config, run, "training.steps=10", "evaluation.every=1000", "--json", before=SLOW_CHECKPOINT)
    wait_for_line(process, "writing the manifest")
    process.send_signal(signal.SIGTERM)
    out, errors = finish(process)
    assert "stopped at step 10, checkpoint written" in errors.splitlines()[-1]
    printed = json.loads(out)
    assert (printed["step"], printed["stopped"]) == (10, "SIGTERM") and (run / "checkpoints" / "10").is_dir()
    assert not (run / "sample.txt").exists()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(config, tmp_path):
    process = start(config, tmp_path / "run", before=SLOW_EVALUATION.replace("DELAY", "30"))
    wait_for_line(process, "step 20:")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and time.monotonic() - asked < 5, errors


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_ends_before_its_hours_are_over_and_goes_on(config, tmp_path):
    run = tmp_path / "run"
    hours = 30 / 3600
    began = time.monotonic()
    settings = "training.steps=100000", "evaluation.every=100000"
    out, errors = finish(start(config, run, *settings, "--max-hours", str(hours), "--json", before=SLOW_STEPS))
    lasted = time.monotonic() - began
    printed = json.loads(out)
    assert printed["stopped"] == "max_hours" and lasted < 3600 * hours + 5
    assert (run / "checkpoints" / str(printed["step"])).is_dir()
    assert f"stopped at step {printed['step']}, checkpoint written; to go on: jaxlm train" in errors.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_profile_names_steps_and_is_written(config, tmp_path):
    import jax

    run = tmp_path / "run"
    _, errors = finish(start(config, run, "training.steps=8", "evaluation.batches=1", "--profile", "3:6"))
    assert "xprof --logdir" in errors
    _, again = finish(start(config, run, "training.steps=9", "evaluation.batches=1", "--profile", "3:6"))
    assert "no profile: steps 3 to 5 are done, up to 8" in again
    (file,) = (run / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    steps = [
        dict(event.stats)["step_num"]
        for plane in planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert sorted(set(steps)) == [3, 4, 5]
    assert b"layers/attention/query" in file.read_bytes()
