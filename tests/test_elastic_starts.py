"""The starts of an elastic job: who takes part, on which mesh, and when it ends. Stand-ins train."""

import json
import signal
import subprocess
import sys

import pytest
import runs

from jaxlm.config import load
from jaxlm.core.errors import InputError
from jaxlm.parallel.processes import LOST, ProcessSpec
from jaxlm.runs import elastic
from jaxlm.runs.job_folder import JobFolder

# A process of a job whose children end as they are told: by a status, or a signal if that is negative.
PROCESS = """
import json, os, sys, time
from pathlib import Path
from jaxlm.config import load
from jaxlm.parallel.processes import ProcessSpec
from jaxlm.runs import elastic
from jaxlm.runs.job_folder import JobFolder
config, run, spec, ends = sys.argv[1:]
elastic._POLL_S = 0.02
ends, starts, me = json.loads(ends), Path(run + spec[0]), os.getpid()
spec, experiment = elastic.supervised(ProcessSpec.parse(spec), load(Path(config)), JobFolder(Path(run)))
assert os.getpid() != me
before = starts.read_text() if starts.exists() else ""
starts.write_text(f"{before}{spec.index}/{spec.count}@{spec.coordinator} data {experiment.mesh.data}\\n")
while not before and not all(os.path.exists(run + str(i)) for i in range(spec.count)):
    time.sleep(0.01)  # as processes that join
end = ends[min(before.count("\\n"), len(ends) - 1)]
os.kill(os.getpid(), -end) if end < 0 else os._exit(end)
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "texts").mkdir()
    return runs.write_config(tmp_path / "texts", "mesh.data=3", "training.batch=12")


def run_job(config, tmp_path, *ends):
    """Run a job of processes whose children end so; return each one's status, starts and last line."""
    port = runs.free_port()
    job = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", PROCESS, str(config), str(tmp_path / "run")),
                *(f"{i}/{len(ends)}@127.0.0.1:{port}", json.dumps(end)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, end in enumerate(ends)
    ]
    ended = []
    for i, process in enumerate(job):
        _, said = process.communicate(timeout=120)
        starts = (tmp_path / f"run{i}").read_text().replace(f":{port}", ":P").replace(f":{port + 1}", ":P+1")
        ended.append((process.returncode, starts.splitlines(), (said.splitlines() or [""])[-1]))
    return ended


def test_those_that_are_left_go_on_with_fewer_replicas(config, tmp_path):
    first, lost, last = run_job(config, tmp_path, [LOST, 0], [-signal.SIGKILL], [-signal.SIGABRT, 0])
    assert first[:2] == (0, ["0/3@127.0.0.1:P data 3", "0/2@127.0.0.1:P+1 data 2"])
    assert first[2] == "jaxlm: going on with 2 of 3 processes, with mesh.data = 2"
    assert lost[:2] == (128 + signal.SIGKILL, ["1/3@127.0.0.1:P data 3"])
    assert lost[2] == "jaxlm: process 1 ended with SIGKILL; the others go on without it"
    assert last[:2] == (0, ["2/3@127.0.0.1:P data 3", "1/2@127.0.0.1:P+1 data 2"])


@pytest.mark.exhaustive
def test_the_first_process_may_be_lost_and_bad_input_ends_only_its_own(config, tmp_path):
    lost, first, second = run_job(config, tmp_path, [2], [LOST, 0], [LOST, 0])
    assert lost[0] == 2
    assert [each[1][-1] for each in (first, second)] == ["0/2@127.0.0.1:P+1 data 2", "1/2@127.0.0.1:P+1 data 2"]


@pytest.mark.exhaustive
def test_starts_that_lose_a_process_that_comes_back_end(config, tmp_path):
    for status, starts, said in run_job(config, tmp_path, [LOST], [LOST], [LOST]):
        assert (status, len(starts)) == (1, elastic._STARTS_ALIKE)
        assert "3 starts lost a process and all came back" in said


@pytest.mark.parametrize(
    ("overrides", "count", "left", "part"),
    [
        (["mesh.data=4", "training.batch=12"], 4, 3, (3, 3)),
        (["mesh.data=4", "training.batch=8"], 4, 3, (2, 2)),  # 3 does not divide the batch
        (["mesh.data=2", "mesh.fsdp=2", "training.batch=8"], 4, 3, (2, 1)),  # a replica needs two processes
        (["mesh.data=4", "training.batch=8"], 2, 1, (1, 2)),  # of two devices each
        (["mesh.data=3", "training.batch=12"], 3, 3, (3, 3)),
        (["mesh.data=all", "training.batch=8"], 4, 3, (3, None)),
        (["mesh.fsdp=all", "training.batch=8"], 4, 2, (2, None)),
    ],
)
def test_as_many_processes_go_on_as_the_mesh_and_the_batch_can_use(config, overrides, count, left, part):
    assert elastic._part(load(config, ["mesh.data=1", *overrides]), count, left) == part


def test_a_mesh_that_cannot_do_with_fewer_processes_is_refused(config):
    experiment = load(config, ["mesh.data=1", "mesh.fsdp=4", "training.batch=8"])
    with pytest.raises(InputError, match=r"3 of 4 processes are left, on which no mesh.data up to 1 fits the rest"):
        elastic._part(experiment, 4, 3)


def test_replicas_of_local_sgd_do_not_become_fewer(config):
    experiment = load(config, ["mesh.data=4", "training.batch=12", "training.local_sgd.period=2"])
    assert elastic._part(experiment, 4, 4) == (4, 4)
    with pytest.raises(InputError, match=r"3 of 4 .* are left, and the replicas of training.local_sgd stay as many"):
        elastic._part(experiment, 4, 3)


def test_a_job_that_its_launcher_describes_is_refused(config, tmp_path):
    with pytest.raises(InputError, match="give --process INDEX/COUNT@HOST:PORT"):
        elastic.supervised(None, load(config), JobFolder(tmp_path / "run"))


def test_the_address_is_the_one_on_the_coordinators_network():
    assert elastic._own_address("127.0.0.1:9876") == "127.0.0.1"
    assert elastic._own_address("0.0.0.0:9876").count(".") == 3
    with pytest.raises(InputError, match="nowhere.invalid cannot be found"):
        elastic._own_address("nowhere.invalid:9876")
    assert ProcessSpec.parse("0/2@[::1]:9876").coordinator.rpartition(":")[0] == elastic._own_address("[::1]:9876")
