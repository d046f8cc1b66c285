"""Multi-process jobs: the losses of one process, from the same rows, and an exit of all when one is lost."""

import json
import math
import signal
import time
from types import SimpleNamespace

import meshes
import numpy as np
import pytest
import runs
from matrices import sampled
from runs import SIGNALS, losses
from store_fixtures import write_store

from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import bytes_tokenizer
from jaxlm.parallel import devices

pytestmark = pytest.mark.slow

DEVICES, STEPS = 4, 24
RARE = f"evaluation.every={STEPS}", f"checkpoint.every={STEPS}"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return runs.write_config(
        tmp_path_factory.mktemp("processes"),
        "training.batch=16",
        "training.microbatches=2",
        f"training.steps={STEPS}",
        "evaluation.every=8",
        "checkpoint.every=8",
        "mesh.data=2",
        "mesh.fsdp=2",
        "model.num_layers=1",
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The losses of one process with all devices, which is this one."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(config), "--out", str(run), *RARE]) == 0
    return losses(run)


# A lost process is missed sooner than after the 30 s that users wait.
HASTY = "from jaxlm.parallel import processes; processes._HEARTBEAT_TIMEOUT_S = 10"


def start(config, folders, *overrides, each=None, port=None, before=""):
    """Start the processes of a job, one per run folder. `each`: extra overrides per process."""
    count, port = len(folders), port or runs.free_port()
    places = [() if count == 1 else ("--process", f"{i}/{count}@127.0.0.1:{port}") for i in range(count)]
    return [
        runs.start(config, run, *overrides, *own, *place, devices=DEVICES // count, before=before)
        for run, own, place in zip(folders, each or [()] * count, places, strict=True)
    ]


def finish(processes):
    """Wait for all processes. Return standard output and standard error of each."""
    said = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(errors for _, errors in said)
    return said


def assert_close(actual, expected):
    """Compare losses to 1e-5 relative, the tolerance in float32 across meshes and processes."""
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose([actual[s] for s in expected], list(expected.values()), rtol=1e-5)


def test_two_processes_train_to_the_losses_of_one(config, whole, tmp_path):
    run = tmp_path / "run"
    (first, _), (second, quiet) = finish(start(config, [run] * 2, *RARE, "training.steps=8", "--json"))
    assert_close(losses(run), {step: loss for step, loss in whole.items() if step <= 8})
    assert json.loads(first)["step"] == 8  # one object, without output of the network library
    assert second == "" and "step" not in quiet


@pytest.mark.exhaustive  # tests/inference/test_leader.py has engines that follow another
def test_two_processes_draw_the_sample_of_one(config, tmp_path):
    """By an engine on a mesh over both."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    for folders in ([alone], [both] * 2):
        finish(start(config, folders, "training.steps=8", "records.sample_tokens=24"))
    assert (both / "sample.txt").read_text() == (alone / "sample.txt").read_text()


@pytest.mark.exhaustive
def test_each_process_writes_a_profile(config, tmp_path):
    finish(start(config, [tmp_path / "run"] * 2, "training.steps=8", "--profile", "3:5"))
    for index in range(2):
        assert list((tmp_path / "run" / "profile" / f"process-{index}").rglob("*.xplane.pb"))


@pytest.mark.exhaustive  # the sample of it is the last start in the test of SIGTERM
@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_processes_resumes_in_another_number(count, config, whole, tmp_path):
    run = tmp_path / "run"
    finish(start(config, [run] * 2, "training.steps=10"))
    finish(start(config, [run] * count))
    assert_close(losses(run), whole)


@pytest.mark.exhaustive
def test_a_lost_process_ends_the_others_and_a_restart_resumes(config, whole, tmp_path):
    run = tmp_path / "run"
    survivor, lost = start(config, [run] * 2, "training.steps=100000", "checkpoint.keep=1", before=HASTY)
    runs.wait_for_step(survivor, run, 12)
    lost.kill()
    began = time.monotonic()
    _, said = survivor.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert survivor.returncode != 0
    assert "lost another process" in said or "another task died" in said
    behind = max(max(losses(run)) + 8, STEPS)
    _, said = finish(start(config, [run] * 2, f"training.steps={behind}"))[0]
    assert "resuming from step" in said and max(losses(run)) == behind
    assert_close({s: x for s, x in losses(run).items() if s <= STEPS}, whole)


@pytest.mark.exhaustive
def test_bad_input_of_one_process_ends_all(config, tmp_path):
    first, second = start(config, [tmp_path / "run", tmp_path / "elsewhere"], before=HASTY)
    _, said = runs.finish(second, status=2)
    assert said.splitlines()[-1].endswith("elsewhere is not there for every process; choose an --out that all share")
    began = time.monotonic()
    _, said = first.communicate(timeout=120)
    assert first.returncode != 0 and time.monotonic() - began < 60
    assert "lost another process" in said or "another task died" in said


def test_other_settings_in_one_process_are_refused_by_all(config, tmp_path):
    first, second = start(config, [tmp_path / "run"] * 2, each=[(), ("optimizer.learning_rate=0.1",)])
    for index, process in enumerate((first, second)):
        _, said = runs.finish(process, status=2)
        assert said.splitlines() == [
            f"jaxlm: process {index} of 2: settings of process 1 differ from those of process 0 "
            "(optimizer.learning_rate = 0.1, not 0.0003); start all with the same CONFIG, key=value and COUNT"
        ]
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_leaves_a_process_without_devices_is_refused(monkeypatch):
    """Two processes have two devices each."""
    there = [SimpleNamespace(process_index=index) for index in (0, 0, 1, 1)]
    monkeypatch.setattr("jaxlm.parallel.devices.start", lambda wanted: there)
    monkeypatch.setattr(
        "jaxlm.parallel.mesh.make_mesh",
        lambda layout, all_: SimpleNamespace(devices=np.array(all_[: (n := math.prod(layout.values()))]), size=n),
    )
    assert devices.mesh_here(4, lambda count: meshes.layout(2, 2)).size == 4
    with pytest.raises(InputError, match="a mesh of 2 of 4 devices leaves process 1 without any; start fewer"):
        devices.mesh_here(2, lambda count: meshes.layout(1, 2))


@pytest.mark.exhaustive
def test_a_mesh_that_leaves_a_process_without_devices_is_refused_by_all(config, tmp_path):
    processes = start(config, [tmp_path / "run"] * 2, "mesh.data=1", "mesh.fsdp=2")
    for index, process in enumerate(processes):
        _, said = runs.finish(process, status=2)
        assert said.splitlines()[-1] == (
            f"jaxlm: process {index} of 2: a mesh of 2 of 4 devices leaves process 1 without any; "
            "start fewer processes, or let the sizes of [mesh] multiply to 4"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("index", "other"), sampled([pytest.param(0, 1), pytest.param(1, 0)], ["1-0"]))
def test_a_process_that_times_out_says_for_whom(index, other, config, tmp_path):
    address = f"127.0.0.1:{runs.free_port()}"
    soon = "from jaxlm.parallel import processes; processes._SAY_AFTER_S, processes._JOIN_TIMEOUT_S = 1, 3"
    process = runs.start(config, tmp_path / "run", "--process", f"{index}/2@{address}", before=soon)
    _, said = runs.finish(process, status=1)
    ours = [line for line in said.splitlines() if line.startswith("jaxlm: ")]
    whom = f"process {other} to meet at {address}"
    assert ours == [
        f"jaxlm: process {index} of 2 waits for {whom}",
        f"jaxlm: process {index} of 2 timed out after 3 s waiting for {whom}; "
        "start all processes, each with its own index",
    ]
    assert said.splitlines()[-1] == ours[-1]


@pytest.mark.parametrize(("number", "status"), sampled(SIGNALS, ["SIGTERM"]))
def test_a_signal_ends_a_process_that_waits_for_others(number, status, config, tmp_path):
    soon = "from jaxlm.parallel import processes; processes._SAY_AFTER_S = 1"
    place = f"0/2@127.0.0.1:{runs.free_port()}"
    process = runs.start(config, tmp_path / "run", "--process", place, before=soon)
    runs.wait_for_line(process, "waits for process 1")
    began = time.monotonic()
    process.send_signal(number)
    _, said = runs.finish(process, status)
    assert time.monotonic() - began < 15
    assert "stopped before the first step; to go on: jaxlm train" in said.splitlines()[-1]


@pytest.mark.exhaustive
def test_sigterm_for_one_process_stops_all_at_the_same_step(config, whole, tmp_path):
    run = tmp_path / "run"
    processes = start(config, [run] * 2, "training.steps=100000")
    runs.wait_for_step(processes[0], run, 3)
    processes[1].send_signal(signal.SIGTERM)
    (_, said), _ = finish(processes)
    assert "stopped at step" in said and "to go on: jaxlm train" in said
    if max(losses(run)) < STEPS:
        finish(start(config, [run]))
    assert_close({s: x for s, x in losses(run).items() if s <= STEPS}, whole)


@pytest.mark.exhaustive
def test_a_run_outlives_the_readers_of_its_output_and_saves_when_its_terminal_is_closed(config, tmp_path):
    run = tmp_path / "run"
    first, second = start(config, [run] * 2, "training.steps=100000", "checkpoint.every=100000")
    runs.wait_for_step(first, run, 3)
    first.stdout.close()
    first.stderr.close()
    runs.wait_for_step(first, run, max(losses(run)) + 5)
    for _ in range(2):  # from both shell and system
        first.send_signal(signal.SIGHUP)
    runs.finish(second)
    assert first.wait(timeout=60) == 0
    assert max(losses(run)) == max(int(step.name) for step in (run / "checkpoints").iterdir())


@pytest.mark.exhaustive
def test_the_same_command_again_leaves_a_job_at_work_alone(config, tmp_path):
    run, port = tmp_path / "run", runs.free_port()
    job = start(config, [run] * 2, "training.steps=100000", port=port)
    runs.wait_for_step(job[0], run, 3)
    for again in start(config, [run] * 2, "training.steps=100000", port=port):
        _, said = runs.finish(again, status=2)
        assert said == f"jaxlm: another jaxlm train is at work in {run}; wait for its end, or choose another --out\n"
    runs.wait_for_step(job[0], run, max(losses(run)) + 3)
    job[0].send_signal(signal.SIGTERM)
    finish(job)


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
