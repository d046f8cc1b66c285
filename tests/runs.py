"""Small training runs in separate processes, as a user starts them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import meshes
import pytest

from jaxlm.config import load
from jaxlm.data.tokenizers import Tokenizer, bytes_tokenizer
from jaxlm.runs.folder import Run
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.step import TrainStep

CONFIG = """
[model]
vocab_size = 257
context_length = 32
num_layers = 2
d_model = 32
norm = {kind = "layer"}
position = {kind = "learned"}
attention = {num_heads = 4}
feed_forward = {d_ff = 64, activation = "gelu"}
[data]
text = "TEXT"
tokenizer = "bytes"
held_out = 0.1
[execution]
dtype = "float32"
[training]
steps = 40
batch = 8
dropout = 0.1
log_every = 1
[evaluation]
every = 20
batches = 2
[checkpoint]
every = 20
[records]
tensorboard = false
sample_tokens = 0
[mesh]
fsdp = 1
"""


def write_config(folder: Path, *overrides: str) -> Path:
    """Write a configuration and forty documents to train on."""
    draw = random.Random(0)
    for i in range(40):
        text = " ".join(draw.choice(["alpha", "beta", "gamma", "delta", "epsilon"]) for _ in range(500))
        (folder / f"{i}.txt").write_text(text)
    path = folder / "tiny.toml"
    path.write_text(CONFIG.replace("TEXT", str(folder)))
    path.write_text(load(path, overrides).to_toml())
    return path


def untrained(folder: Path, *overrides: str, tokenizer: Tokenizer | None = None) -> Path:
    """Make a run with a checkpoint of step 0, in this process."""
    folder.mkdir()
    run, config = Run(folder), write_config(folder, *overrides)
    config.rename(run.paths.config)
    run.paths.data.write_text(json.dumps({"digest": "of no data", "held_out_bytes": 1}))
    (tokenizer or bytes_tokenizer()).save(run.paths.tokenizer)
    experiment, mesh = run.experiment(), meshes.make()
    steps = TrainStep.of(experiment).jitted(mesh)
    with jax.set_mesh(mesh), Checkpoints(run.paths.checkpoints, keep=1) as saved:
        saved.save(steps.init(), None)
    return folder


# Prepended code for a run that must compile its own programs.
COMPILING = "import jax; jax.config.update('jax_enable_compilation_cache', False)"

# Signals that stop a run, with the status that it ends with.
SIGNALS = [pytest.param(signal.SIGTERM, 0, id="SIGTERM"), pytest.param(signal.SIGINT, 130, id="SIGINT")]

_started: list[subprocess.Popen] = []

# Under nohup, as tests may run, a closed terminal sends no signal.
_AT_A_TERMINAL = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"


def start(config: Path, run: Path, *arguments: str, devices: int = 1, before: str = "") -> subprocess.Popen:
    """Start `jaxlm train`, after the Python code `before`. The process is ended with its test."""
    code = f"{_AT_A_TERMINAL}\n{before}\nimport sys; from jaxlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", str(config), "--out", str(run), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(devices)
    )
    _started.append(process)
    return process


def environment(devices: int = 1) -> dict[str, str]:
    """Return the environment of a subprocess, which shares the compilation cache of the tests."""
    return {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}


def end_all() -> None:
    """Kill the processes that a failed test left running."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def finish(process: subprocess.Popen, status: int = 0) -> tuple[str, str]:
    """Wait for the end of a process. Return its standard output and standard error."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == status, errors
    return out, errors


def wait_for_line(process: subprocess.Popen, part: str) -> None:
    """Wait until a line with this part appears on standard error."""
    said = ""
    for line in process.stderr:
        said += line
        if part in line:
            return
    raise AssertionError(said)


def wait_for_step(process: subprocess.Popen, run: Path, step: int) -> None:
    """Wait until a step is recorded, or the process has exited."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if max(losses(run), default=0) >= step:
            return
        time.sleep(0.005)
    if process.poll() is None:
        raise AssertionError(f"no step {step} in two minutes")


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    """Return the complete lines of a file of the run."""
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"] if path.exists() else []


def losses(run: Path, name: str = "metrics.jsonl") -> dict[int, float]:
    """Return {step: loss}. Assert that steps are unique and in order."""
    found = rows(run, name)
    steps = [row["step"] for row in found]
    assert steps == sorted(set(steps))
    return dict(zip(steps, (row["loss"] for row in found), strict=True))
