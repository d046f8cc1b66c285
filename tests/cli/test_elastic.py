"""Processes that are killed at random moments: no more steps are repeated than lie between two copies in memory."""

import random
import shutil

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
    return runs.write_config(folder, "training.batch=12", f"training.steps={STEPS}", "model.num_layers=1")


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
