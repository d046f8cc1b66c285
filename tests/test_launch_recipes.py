"""What the launchers' recipes do at a signal, with programs in the place of Slurm's and of jaxlm."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "launch"


@pytest.fixture
def programs(tmp_path):
    """An environment in which these names are these shell scripts; each call is a line of the file `calls`."""

    def make(**scripts: str) -> dict[str, str]:
        for name, script in scripts.items():
            program = tmp_path / name
            program.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {tmp_path}/calls\n{script}\n')
            program.chmod(0o755)
        return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return make


@pytest.mark.parametrize(
    ("ended", "status", "requeued"),
    [
        ('{"run": "out", "stopped": "SIGTERM"}', 0, True),
        ('{"run": "out", "stopped": null}', 0, False),
        ("", 1, False),
    ],
)
def test_slurm_requeues_a_run_that_its_time_limit_stopped(ended, status, requeued, programs, tmp_path):
    environment = programs(srun=f"echo '{ended}'; exit {status}", scontrol="")
    environment |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
    command = ["bash", str(LAUNCH / "slurm.sh"), "a.toml", "out", "training.steps=5"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == status and done.stdout.strip() == ended, done.stderr
    srun, *others = (tmp_path / "calls").read_text().splitlines()
    assert srun.endswith("--cpus-per-task=8 jaxlm train a.toml --out out --json training.steps=5")
    assert others == (["scontrol requeue 7"] if requeued else [])


@pytest.mark.parametrize(("told", "status"), [(True, 143), (False, 0)])
def test_a_pod_that_is_told_to_stop_saves_and_does_not_count_as_done(told, status, programs, tmp_path):
    yaml = pytest.importorskip("yaml")
    worker = yaml.safe_load((LAUNCH / "gke.yaml").read_text())["spec"]["replicatedJobs"][0]
    (container,) = worker["template"]["spec"]["template"]["spec"]["containers"]
    waits = f"trap 'sleep 0.3; touch {tmp_path}/saved; exit 0' TERM; echo ready; sleep 30 & wait"
    pod = subprocess.Popen(
        container["command"] + container["args"],
        stdout=subprocess.PIPE,
        text=True,
        env=programs(jaxlm=waits if told else "echo ready"),
    )
    assert pod.stdout.readline() == "ready\n"
    if told:
        pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=20) == status and (tmp_path / "saved").exists() == told
    assert (tmp_path / "calls").read_text() == f"jaxlm train {' '.join(container['args'])}\n"
