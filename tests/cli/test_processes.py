"""Several processes are one job: the losses of one process, from the same rows, and an end for all when one is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxlm.data.packing import Rows
from jaxlm.data.store import write_store
from jaxlm.data.tokenizers import bytes_tokenizer

pytestmark = pytest.mark.slow

DEVICES, STEPS = 8, 24
CONFIG = """
[model]
vocabulary = 257
context = 32
layers = 2
width = 32
norm = {kind = "rms"}
position = {kind = "rotary"}
attention = {heads = 4}
feed_forward = {hidden = 64, activation = "silu", gated = true}
[data]
text = ["TEXT"]
tokenizer = "bytes"
[training]
steps = 24
batch = 16
microbatches = 2
dtype = "float32"
dropout = 0.1
log_every = 1
[optimizer.schedule]
decay_steps = 24
[mesh]
data = 2
fsdp = 4
[evaluation]
every = 8
batches = 2
[checkpoint]
every = 8
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    draw = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    (folder / "text.txt").write_text(" ".join(draw.choice(words, 20_000)))
    path = folder / "tiny.toml"
    path.write_text(CONFIG.replace("TEXT", str(folder / "text.txt")))
    return path


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The losses of one process with eight devices."""
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(start(config, run, 1))
    return losses(run)


def start(config, run, count, *overrides):
    """The processes of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(DEVICES // count)}
    code = "import sys; from jaxlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", str(config), "--out", str(run), *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    if count == 1:
        return [subprocess.Popen(command, **pipes)]
    return [subprocess.Popen([*command, "--process", f"{i}/{count}@127.0.0.1:{port}"], **pipes) for i in range(count)]


def finish(processes):
    """What each wrote to standard output and standard error."""
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


def losses(run):
    return {row["step"]: row["loss"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def assert_close(actual, expected):
    """DESIGN's measure across meshes and processes, in float32."""
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose([actual[s] for s in expected], list(expected.values()), rtol=1e-5)


def wait_for_step(run, step):
    for _ in range(600):
        if (run / "metrics.jsonl").exists() and max(losses(run), default=0) >= step:
            return
        time.sleep(0.1)
    pytest.fail(f"no step {step} within a minute")


def test_two_processes_train_to_the_losses_of_one(config, whole, tmp_path):
    (first, _), (second, quiet) = finish(start(config, tmp_path / "run", 2, "--json"))
    assert_close(losses(tmp_path / "run"), whole)
    assert json.loads(first)["step"] == STEPS  # one object, and nothing of the network library around it
    assert second == "" and "step" not in quiet


@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_processes_resumes_in_another_number(count, config, whole, tmp_path):
    run = tmp_path / "run"
    finish(start(config, run, 2, "training.steps=10"))
    finish(start(config, run, count))
    assert_close(losses(run), whole)


def test_a_lost_process_ends_the_others_and_a_restart_resumes(config, whole, tmp_path):
    run = tmp_path / "run"
    survivor, lost = start(config, run, 2, "training.steps=100000", "checkpoint.keep=1")
    wait_for_step(run, 12)
    lost.kill()
    began = time.monotonic()
    _, said = survivor.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert survivor.returncode != 0
    assert "lost another one" in said or "another task died" in said
    behind = max(max(losses(run)) + 8, STEPS)
    _, said = finish(start(config, run, 2, f"training.steps={behind}"))[0]
    assert "resuming from step" in said and max(losses(run)) == behind
    assert_close({s: x for s, x in losses(run).items() if s <= STEPS}, whole)


def test_sigterm_for_one_process_stops_all_at_the_same_step(config, whole, tmp_path):
    run = tmp_path / "run"
    processes = start(config, run, 2, "training.steps=100000")
    wait_for_step(run, 3)
    processes[1].send_signal(signal.SIGTERM)
    (_, said), _ = finish(processes)
    assert "stopped at step" in said and "to go on: jaxlm train" in said
    if max(losses(run)) < STEPS:
        finish(start(config, run, 2))
    assert_close({s: x for s, x in losses(run).items() if s <= STEPS}, whole)


def test_shares_of_a_batch_are_its_rows(tmp_path):
    from jaxlm.data.loader import evaluation_batches, training_batches

    store = write_store(tmp_path / "tokens", ["some text, " * 50, "other text"], bytes_tokenizer())
    rows = Rows(store, 16)
    shares = [0, 1, 4], [2, 3], [5]
    parts = [next(training_batches([(rows, 1.0)], 6, 0, 3, share)) for share in shares]
    joined = np.concatenate([part["tokens"] for part in parts])[np.argsort(np.concatenate(shares))]
    np.testing.assert_array_equal(joined, next(training_batches([(rows, 1.0)], 6, 0, 3))["tokens"])
    last = [list(evaluation_batches(rows, 6, share=share))[-1] for share in shares]
    joined = np.concatenate([part["targets"] for part in last])[np.argsort(np.concatenate(shares))]
    np.testing.assert_array_equal(joined, list(evaluation_batches(rows, 6))[-1]["targets"])
