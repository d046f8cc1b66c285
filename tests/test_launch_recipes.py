"""The launch recipes at a signal, with stand-ins for Slurm's programs and for jaxlm."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from jaxlm import config
from jaxlm.cli import _parse
from jaxlm.config import mesh_layout
from jaxlm.costs.hardware.target import Target
from jaxlm.parallel.layout import Layout, over_slices

LAUNCH = Path(__file__).parents[1] / "launch"


@pytest.fixture
def programs(tmp_path):
    """Return an environment in which these names are these shell scripts; each call is a line of the file `calls`."""

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


@pytest.mark.parametrize(
    ("ended", "status", "requeued"),
    [
        ('{"run": "out", "stopped": "SIGTERM"}', 0, True),
        ('{"run": "out", "stopped": null}', 137, False),  # of a process that was lost
        ("", 1, False),
    ],
)
def test_slurm_goes_on_without_a_lost_process_until_the_run_ends(ended, status, requeued, programs, tmp_path):
    srun = f'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=1 "$@"; exit {status}'
    jaxlm = f"echo devices $JAX_LOCAL_DEVICE_IDS >> {tmp_path}/calls; echo '{ended}'"
    environment = programs(srun=srun, jaxlm=jaxlm, scontrol="echo node-7; echo node-8")
    environment |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NODELIST": "node-[7-8]"}
    command = ["bash", str(LAUNCH / "slurm_elastic.sh"), "a.toml", "out", "mesh.data=8", "data.text=a b"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == (0 if ended else status), done.stderr
    _, srun, jaxlm, devices, *others = (tmp_path / "calls").read_text().splitlines()
    assert srun.startswith("srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpus-per-task=8 bash -c ")
    given = "train a.toml --out out --json mesh.data=8 data.text=a b --elastic --process 3/8@node-7:9876"
    assert (jaxlm, devices) == (f"jaxlm {given}", "devices 1")
    assert others == (["scontrol requeue 7"] if requeued else [])
    assert _parse(given.replace("a b", "ab").split()).elastic


@pytest.mark.parametrize(("told", "status"), [(True, 143), (False, 0)])
def test_a_pod_that_is_told_to_stop_saves_and_does_not_count_as_done(told, status, programs, tmp_path):
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


def test_a_tpu_slice_trains_on_without_the_connection_that_started_it(programs, tmp_path):
    home = tmp_path / "home" / "jaxlm"
    home.mkdir(parents=True)
    remote = 'for last; do :; done; cd "$HOME"; exec bash -c "${last#--command=}"'
    waits = f"echo trains; until [ -e {tmp_path}/gone ]; do sleep 0.05; done; echo ends"
    environment = programs(gcloud=remote, jaxlm=waits) | {"HOME": str(home.parent)}
    recipe = ["bash", str(LAUNCH / "cloud_tpu.sh"), "name", "zone", "a.toml", "/runs/a", "data.text=a b"]
    subprocess.run(recipe, check=True, env=environment, timeout=20, capture_output=True)
    (tmp_path / "gone").touch()
    log, deadline = home / "train.log", time.monotonic() + 20
    while log.read_text() != "trains\nends\n" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.read_text() == "trains\nends\n"
    ssh, jaxlm = (tmp_path / "calls").read_text().splitlines()
    assert ssh.startswith("gcloud compute tpus tpu-vm ssh name --zone=zone --worker=all --command=cd jaxlm && ")
    assert jaxlm == "jaxlm train a.toml --out /runs/a data.cache=/runs/cache data.text=a b"


def test_a_pod_without_good_input_is_not_started_again_and_a_preempted_one_always():
    spec = yaml.safe_load((LAUNCH / "gke.yaml").read_text())["spec"]
    (worker,) = spec["replicatedJobs"]
    (container,) = worker["template"]["spec"]["template"]["spec"]["containers"]
    preempted, bad = worker["template"]["spec"]["podFailurePolicy"]["rules"]
    assert preempted["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert bad["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    # As Kubernetes documents them.
    said = [
        "Pod a/b has condition DisruptionTarget matching FailJob rule at index 0",
        f"Container {container['name']} for pod a/b failed with exit code 2 matching FailJob rule at index 1",
    ]
    rules = spec["failurePolicy"]["rules"]
    matched = [
        next(rule["action"] for rule in rules if any(re.search(p, line) for p in rule["onJobFailureMessagePatterns"]))
        for line in said
    ]
    assert matched == ["RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"]


def test_two_slices_are_a_job_each_with_a_replica_of_the_model():
    """Otherwise the recipe is that of one slice."""
    one, two = (yaml.safe_load((LAUNCH / name).read_text()) for name in ("gke.yaml", "gke_two_slices.yaml"))
    (of_one,), (of_two,) = (each["spec"]["replicatedJobs"] for each in (one, two))
    containers = [each["template"]["spec"]["template"]["spec"]["containers"][0] for each in (of_one, of_two)]
    arguments = containers[1].pop("args")
    assert arguments[:4] == containers[0].pop("args")[:4]
    assert two["metadata"].pop("annotations") == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert (of_one.pop("replicas"), of_two.pop("replicas")) == (1, 2) and one == two
    chips = 2 * of_two["template"]["spec"]["completions"] * containers[1]["resources"]["limits"]["google.com/tpu"]
    target = Target.parse("tpu-v5e:2*4x4")
    assert target.chips == chips
    layout = mesh_layout.layout(config.load(LAUNCH.parent / arguments[0], arguments[4:]), target.devices)
    assert over_slices(layout, target.slices) == Layout(data=2)


def test_slurm_drains_a_server_at_its_time_limit_and_asks_for_another_turn(programs, tmp_path):
    server = "trap 'echo drained >> %s/calls; exit 0' TERM; touch %s/up; while true; do sleep 0.05; done"
    environment = programs(jaxlm=server % (tmp_path, tmp_path), scontrol="") | {"SLURM_JOB_ID": "7"}
    job = subprocess.Popen(
        ["bash", str(LAUNCH / "serve_slurm.sh"), "model", "keys", "--slots", "8"], env=environment, cwd=tmp_path
    )
    while not (tmp_path / "up").exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0
    given = "serve model --host 0.0.0.0 --port 8000 --api-key-file keys --drain-seconds 150 --slots 8"
    assert (tmp_path / "calls").read_text().splitlines() == [f"jaxlm {given}", "drained", "scontrol requeue 7"]
    _parse(given.split())


def test_slurm_keeps_the_status_of_a_server_that_ends_by_itself(programs, tmp_path):
    environment = programs(jaxlm="exit 2", scontrol="") | {"SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(LAUNCH / "serve_slurm.sh"), "model", "keys"], env=environment, cwd=tmp_path)
    assert done.returncode == 2 and "scontrol" not in (tmp_path / "calls").read_text()


def test_kubernetes_gives_a_server_time_to_drain_and_asks_for_its_health():
    deployment, service = yaml.safe_load_all((LAUNCH / "serve_gke.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    asked = _parse(container["args"])
    assert asked.drain_seconds < pod["terminationGracePeriodSeconds"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": asked.port}
    assert service["spec"]["ports"][0]["targetPort"] == asked.port == container["ports"][0]["containerPort"]
    assert (
        str(asked.api_key_file) == "/keys/keys"
        and service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    )
