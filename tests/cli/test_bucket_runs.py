"""Runs in buckets: trained, killed, resumed and read as runs of this machine are, with the same bits."""

import signal
import subprocess
import sys
import time

import bucket_servers
import jax
import measured_machine
import numpy as np
import pytest
import runs
from bucket_servers import BUCKET

from jaxlm import api
from jaxlm.core import buckets, copies
from jaxlm.core.addresses import place
from jaxlm.core.errors import InputError
from jaxlm.training.paths import RunPaths

_PACE = """
import time
from jaxlm.training.display import Display
from jaxlm.cli.run_bar import RunBar
advance = RunBar.advance
RunBar.advance = lambda *args: (time.sleep(0.05), advance(*args))[1]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    changes = ("training.steps=24", "checkpoint.every=6", "checkpoint.keep=2")
    return runs.write_config(tmp_path_factory.mktemp("text"), *changes)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    """A run of this machine."""
    run = tmp_path_factory.mktemp("here") / "run"
    runs.finish(runs.start(config, run))
    return run


@pytest.fixture(scope="module", params=bucket_servers.SCHEMES)
def bucket(request):
    with bucket_servers.serving(request.param) as (proxy, names):
        yield f"{request.param}://{BUCKET}", proxy


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Give this process, and those that it starts, a cache of their own, as another machine has it."""

    def move(name):
        hardware = tmp_path / name / "jaxlm" / "hardware"
        hardware.mkdir(parents=True)
        measured_machine.keep(hardware)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("machine")
    return move


def committed(run):
    """Return the steps of the checkpoints that are whole in a bucket."""
    names = buckets.find(f"{run}/checkpoints")
    return sorted(int(name.split("/")[-2]) for name in names if name.endswith("/checksums.json"))


def assert_equal_parameters(run, other):
    own, theirs = (api.load(each, dtype="stored").parameters for each in (run, other))
    jax.tree.map(np.testing.assert_array_equal, own, theirs)


def jaxlm(*arguments, status=0):
    command = [sys.executable, "-m", "jaxlm", *arguments]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs", pytest.param("s3", marks=pytest.mark.exhaustive)], indirect=True)
def test_a_run_that_is_killed_goes_on_from_its_bucket_with_equal_bits(config, uninterrupted, bucket, machine):
    run = f"{bucket[0]}/runs/a"
    process = runs.start(config, run, before=_PACE)
    deadline = time.monotonic() + 120
    while not committed(run) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = committed(run)
    assert steps and 24 not in steps
    # A checkpoint of which all but the manifest came, as of a process that is killed while it uploads.
    for name in buckets.find(f"{run}/checkpoints/{steps[-1]}"):
        if not name.endswith("checksums.json"):
            with buckets.open_binary(name) as stream:
                buckets.write(name.replace(f"/{steps[-1]}/", "/23/"), stream.read())
    bucket[1].cuts, bucket[1].after = 2, 3_000
    _, errors = runs.finish(runs.start(config, run))
    assert f"resuming from step {steps[-1]}" in errors and "corrupt" not in errors
    copy = place(run)
    assert runs.losses(copy) == runs.losses(uninterrupted)
    assert runs.losses(copy, "evaluations.jsonl") == runs.losses(uninterrupted, "evaluations.jsonl")
    assert_equal_parameters(run, uninterrupted)
    assert committed(run) == [18, 24] and not [name for name in buckets.find(run) if "/23/" in name or "lease" in name]

    machine("another")
    (name,) = [name for name in buckets.find(f"{run}/checkpoints/24/parameters/d") if "process" not in name]
    with buckets.open_binary(name) as stream:
        content = bytearray(stream.read())
    content[len(content) // 2] ^= 1
    buckets.write(name, bytes(content))
    _, errors = runs.finish(runs.start(config, run))
    assert "checkpoint 24 is corrupt" in errors and "resuming from step 18" in errors
    assert runs.losses(place(run)) == runs.losses(uninterrupted)
    assert 24 in committed(run) and buckets.find(f"{run}/checkpoints/corrupt/24")

    machine("a third")
    (listed,) = api.runs(f"{bucket[0]}/runs")
    assert (listed.run, listed.state, listed.step) == (run, "finished", 24)
    assert not list(place(run).glob("checkpoints/*/parameters"))
    assert api.compare([run, uninterrupted]).keys == {}
    assert_equal_parameters(run, uninterrupted)
    assert [path.parent.name for path in place(run).glob("checkpoints/*/parameters")] == ["24"]


def test_a_run_of_another_machine_is_left_to_it(config, bucket, machine):
    run = f"{bucket[0]}/runs/taken"
    buckets.write(f"{run}/lease.json", b'{"owner": "elsewhere:cache"}')
    said = jaxlm("train", str(config), "--out", run, status=2)
    assert f"another jaxlm train is at work in {run}, on elsewhere" in said and "Traceback" not in said
    assert list(buckets.find(run)) == [f"{run}/lease.json"]
    copies.delete(place(run))


@pytest.mark.parametrize(
    "out, said",
    [
        ("gs://", "argument --out: gs:// is no address in a bucket; write gs://BUCKET/FOLDER (see jaxlm train --help)"),
        ("s3://no-such-bucket/run", "s3://no-such-bucket/run cannot be written: there is no such bucket"),
    ],
)
def test_what_no_run_can_be_written_to_is_one_line(out, said, config, machine):
    with bucket_servers.serving("s3"):
        errors = jaxlm("train", str(config), "--out", out, status=2).splitlines()
    assert [line for line in errors if line.startswith("jaxlm:")] == [f"jaxlm: {said}"] == errors[-1:]


def test_no_run_is_written_to_the_hub():
    with pytest.raises(InputError, match="hf://org/b cannot be written: jaxlm reads the Hub; give gs://, s3:// or"):
        RunPaths(place("hf://org/b")).check_name()
