"""Processes that are killed at random moments: no more steps are repeated than lie between two copies in memory."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import runs
from runs import losses, rows

from jaxlm.cli import main

pytestmark = pytest.mark.slow

STEPS, EVERY = 60, 4
NO_CHECKPOINTS = "checkpoint.every=100000", "evaluation.every=100000"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    return runs.write_config(
        folder, "training.batch=12", "training.dropout=0", f"training.steps={STEPS}", "model.num_layers=1"
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The losses of one process with one device, which is this one."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(config), "--out", str(run), *NO_CHECKPOINTS]) == 0
    return losses(run)


@pytest.fixture
def memory(tmp_path):
    """Keys of copies in a folder that takes the place of a host's memory."""
    (tmp_path / "memory").mkdir()
    return f"checkpoint.memory_every={EVERY}", f"checkpoint.memory_folder={tmp_path / 'memory'}"


def assert_close(actual, expected):
    """Compare losses to 1e-5 relative, the tolerance in float32 across meshes and processes."""
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose([actual[s] for s in expected], list(expected.values()), rtol=1e-5)


def test_a_killed_run_goes_on_from_memory_with_the_same_losses(config, whole, memory, tmp_path):
    run = tmp_path / "run"
    process = runs.start(config, run, *NO_CHECKPOINTS, *memory)
    runs.wait_for_step(process, run, random.randint(EVERY, STEPS - 20))
    process.kill()
    process.communicate()
    reached = max(losses(run))
    assert not list((run / "checkpoints").iterdir())
    _, said = runs.finish(runs.start(config, run, *NO_CHECKPOINTS, *memory))
    (_, second) = rows(run, "goodput.jsonl")
    assert f"resuming from step {second['from_step']}, which is in memory" in said
    assert reached - second["from_step"] <= EVERY and second["from_step"] % EVERY == 0
    assert_close(losses(run), whole)
    assert not list((tmp_path / "memory").glob("jaxlm-*/*"))  # a checkpoint has the last step


# A lost process is missed sooner than after 30 s, and not awaited as long.
HASTY = """
from jaxlm.parallel import processes
from jaxlm.runs import elastic
processes._HEARTBEAT_TIMEOUT_S = elastic._SETTLE_S = 10
"""


def children_of(process):
    """Return the numbers of the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def start_elastic(config, run, *overrides):
    """Start the three processes of a job, of one device each."""
    port = runs.free_port()
    return [
        runs.start(
            *(config, run, "mesh.data=3", *NO_CHECKPOINTS, *overrides, "--elastic"),
            *("--process", f"{i}/3@127.0.0.1:{port}"),
            before=HASTY,
        )
        for i in range(3)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("whole_host", [False, True])
@pytest.mark.parametrize("lost", [0, 2])
def test_the_others_go_on_without_a_lost_process(lost, whole_host, config, whole, memory, tmp_path):
    """The parent of the process that is lost is killed with it, as by its host, or not."""
    run = tmp_path / "run"
    job = start_elastic(config, run, *memory)
    runs.wait_for_step(job[0], run, random.randint(EVERY, STEPS - 20))
    (child,) = children_of(job[lost])
    if whole_host:
        job[lost].kill()
    os.kill(child, signal.SIGKILL)
    reached, began = max(losses(run)), time.monotonic()
    said = {i: process.communicate(timeout=300)[1] for i, process in enumerate(job)}
    assert [process.returncode for process in job] == [
        (-9 if whole_host else 137) if i == lost else 0 for i in (0, 1, 2)
    ]
    assert "jaxlm: going on with 2 of 3 processes, with mesh.data = 2" in said[1 if lost == 0 else 0]
    first, second = rows(run, "goodput.jsonl")
    assert 0 <= max(reached, first["to_step"]) - second["from_step"] <= EVERY + 1  # a step may be recorded meanwhile
    assert second["from_step"] > 0
    assert_close(losses(run), whole)
    assert [row["config"]["mesh"]["data"] for row in rows(run, "history.jsonl")] == [3, 2]
    assert time.monotonic() - began < 120


@pytest.mark.exhaustive
def test_processes_are_lost_until_one_is_left(config, whole, memory, tmp_path):
    run = tmp_path / "run"
    job = dict(enumerate(start_elastic(config, run, *memory, "training.steps=1500")))
    while len(job) > 1:
        before = len(rows(run, "goodput.jsonl"))
        runs.wait_for_step(job[min(job)], run, max(losses(run), default=0) + random.randint(2 * EVERY, 20))
        lost = random.choice(list(job))
        (child,) = children_of(job[lost])
        os.kill(child, signal.SIGKILL)
        runs.finish(job.pop(lost), 137)
        deadline = time.monotonic() + 120
        while len(rows(run, "goodput.jsonl")) <= max(before, 1) and time.monotonic() < deadline:
            time.sleep(0.1)
    (last,) = job.values()
    runs.wait_for_step(last, run, STEPS)
    last.send_signal(signal.SIGTERM)
    runs.finish(last)
    attempts = rows(run, "goodput.jsonl")
    assert [row["config"]["mesh"]["data"] for row in rows(run, "history.jsonl")] == [3, 2, 1]
    for earlier, later in zip(attempts, attempts[1:], strict=False):
        assert earlier["to_step"] - later["from_step"] <= EVERY + 1
    assert_close({step: loss for step, loss in losses(run).items() if step <= STEPS}, whole)


@pytest.mark.exhaustive
def test_a_signal_to_one_parent_stops_the_job_with_a_checkpoint(config, whole, memory, tmp_path):
    run = tmp_path / "run"
    job = start_elastic(config, run, *memory, "training.steps=100000")
    runs.wait_for_step(job[0], run, EVERY)
    (child,) = children_of(job[1])
    job[1].send_signal(signal.SIGTERM)
    os.kill(child, signal.SIGTERM)  # a launcher tells all of its processes
    for process in job:
        runs.finish(process)
    assert [path.name for path in (run / "checkpoints").iterdir()] == [str(max(losses(run)))]
    assert not list((tmp_path / "memory").glob("jaxlm-*/*"))


# Each process has a folder of its own in place of a host's memory, and a lost one is missed sooner than after 30 s.
APART = """
from pathlib import Path
from jaxlm.parallel import processes
from jaxlm.training import loop
processes._HEARTBEAT_TIMEOUT_S = 10
loop.Path = lambda folder: Path(folder) / str(processes.process_index())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [0, 1, 2, None])
def test_the_memory_of_one_host_may_be_lost(lost, config, whole, memory, tmp_path):
    """The state is in three parts, each on one host, and each host has that of another too."""
    for index in range(3):
        (tmp_path / "memory" / str(index)).mkdir()
    run, sharded = tmp_path / "run", ("mesh.fsdp=3", "model.d_model=48", *NO_CHECKPOINTS, *memory)
    alone = tmp_path / "alone"
    assert main(["train", str(config), "--out", str(alone), "model.d_model=48", *NO_CHECKPOINTS]) == 0

    def start(count, *more):
        port = runs.free_port()
        places = [("--process", f"{i}/{count}@127.0.0.1:{port}") if count > 1 else () for i in range(count)]
        return [runs.start(config, run, *sharded, *more, *place, before=APART) for place in places]

    job = start(3)
    runs.wait_for_step(job[0], run, random.randint(EVERY, STEPS - 20))
    for process in job:
        process.kill()
        process.communicate()
    reached = max(losses(run))
    if lost is not None:
        shutil.rmtree(tmp_path / "memory" / str(lost))
        (tmp_path / "memory" / str(lost)).mkdir()
    for process in start(3):
        runs.finish(process)
    (_, second) = rows(run, "goodput.jsonl")
    assert 0 < second["from_step"] and reached - second["from_step"] <= EVERY
    assert_close(losses(run), losses(alone))
    assert [path.name for path in (run / "elastic").iterdir()] == ["memory_name"]
