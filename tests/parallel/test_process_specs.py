"""Joining the other processes of a job, and the errors that end one."""

import errno
import time
from types import SimpleNamespace

import pytest

from jaxlm.core import accelerators
from jaxlm.core.errors import InputError
from jaxlm.parallel import processes

METADATA = {"agent-worker-number": "1", "worker-network-endpoints": "h0,h1,h2,h3", "tpu-env": ""}


@pytest.fixture
def joined(monkeypatch):
    """The arguments of `jax.distributed.initialize`, on a machine that looks like a TPU host."""
    import jax
    from jax._src.clusters import cloud_tpu_cluster

    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerators, "found", lambda: ("/dev/accel0",))
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: ("", 404))
    monkeypatch.setattr(processes, "native_output_to_stderr", lambda: None)
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *spec, **_: asked.append(spec))
    return asked


class Store:
    """A key-value store shared by processes, used one after another."""

    def __init__(self):
        self.values = {}
        self.key_value_set = self.values.__setitem__

    def wait_at_barrier(self, name, timeout_in_ms):
        pass

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def blocking_key_value_get(self, key, timeout_in_ms):
        return self.values[key]


@pytest.fixture
def be(monkeypatch):
    """A function that makes this process number `index` of two."""
    store = Store()

    def be(index):
        state = SimpleNamespace(process_id=index, num_processes=2, client=store)
        monkeypatch.setattr(processes, "_state", lambda: state)

    return be


@pytest.fixture
def metadata(joined, monkeypatch):
    """The answers of the metadata server of a TPU VM."""
    from jax._src.clusters import cloud_tpu_cluster

    answers = dict(METADATA)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: (answers[key], 200))
    return answers


def test_a_tpu_vm_of_several_hosts_joins_them(joined, metadata):
    processes.join(None)
    assert joined == [()]


def test_a_tpu_vm_of_one_host_is_alone_but_in_several_slices(joined, metadata):
    metadata["worker-network-endpoints"] = "h0"
    processes.join(None)
    assert not joined
    metadata["tpu-env"] = "MEGASCALE_NUM_SLICES: '2'"
    processes.join(None)
    assert joined == [()]


@pytest.mark.parametrize(("hosts", "slices", "joins"), [("h0,h1", "1", 1), ("h0", "2", 1), ("localhost", "1", 0)])
def test_a_pod_joins_the_hosts_of_its_environment(hosts, slices, joins, joined, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", slices)
    processes.join(None)
    assert len(joined) == joins


@pytest.mark.parametrize(("files", "platforms"), [((), ""), (("/dev/nvidia0",), ""), (("/dev/accel0",), "cpu")])
def test_no_metadata_is_asked_for_without_a_tpu(files, platforms, joined, metadata, monkeypatch):
    monkeypatch.setattr(accelerators, "found", lambda: files)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    metadata.clear()
    processes.join(None)
    assert not joined


def test_a_tpu_vm_without_an_answer_is_told_of_process(joined, monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster

    def refuse(key):
        raise ConnectionError("refused")

    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", refuse)
    with pytest.raises(InputError, match="metadata server.*refused.*--process"):
        processes.join(None)


@pytest.mark.parametrize("size", [2, "two"])
def test_a_launcher_that_jax_does_not_know_is_told_of_process(size, monkeypatch):
    """JAX 0.10 does not recognise Open MPI 5."""
    for name, value in {"WORLD_SIZE": size, "WORLD_RANK": 0, "WORLD_LOCAL_RANK": 0}.items():
        monkeypatch.setenv(f"OMPI_COMM_{name}", str(value))
    monkeypatch.setattr(processes, "native_output_to_stderr", lambda: None)

    import jax

    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(InputError, match="coordinator_address.*Open MPI 5.*--process INDEX/COUNT@HOST:PORT"):
        processes.join(None)


def test_an_explicit_spec_has_all_devices_under_any_launcher(joined, monkeypatch):
    import jax

    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    processes.join(processes.ProcessSpec(1, 2, "10.0.0.1:9876"))
    assert given["cluster_detection_method"] == "deactivate" and "local_device_ids" not in given


def test_a_difference_between_processes_is_named(be):
    be(0)
    processes.check_same("settings", {"COUNT": 2, "optimizer": {"kind": "adamw", "learning_rate": 0.1}}, "agree")
    be(1)
    with pytest.raises(InputError) as refused:
        processes.check_same("settings", {"COUNT": 2, "optimizer": {"kind": "adamw", "learning_rate": 0.2}}, "agree")
    difference = "optimizer.learning_rate = 0.2, not 0.1"
    assert str(refused.value) == f"settings of process 1 differ from those of process 0 ({difference}); agree"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            "UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [127.0.0.1]",
            "lost another process",
        ),
        ("DEADLINE_EXCEEDED: Barrier timed out. Id: jaxlm compiled", "lost another process"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes", "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), "left on device: metrics.jsonl; make room"),
        (
            OSError(errno.EISDIR, "Is a directory", ".a-1", None, "a"),
            "Is a directory: a; remove it, or choose another path",
        ),
        (InputError("that is bad"), "jaxlm: process 1 of 2: that is bad"),
    ],
)
def test_why_a_process_ends_is_one_line(error, says, be, capsys):
    import jax

    be(1)
    processes._say_why(jax.errors.JaxRuntimeError(error) if isinstance(error, str) else error)
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_an_error_of_the_compiler_is_no_lost_process(be, capsys):
    import jax

    be(1)
    processes._say_why(jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel: bad shape"))
    said = capsys.readouterr().err
    assert "lost" not in said and "INTERNAL: Mosaic failed to compile TPU kernel: bad shape" in said.splitlines()[-1]


def test_a_process_that_does_not_come_though_it_agreed_is_lost(joined, monkeypatch):
    """The others of an elastic job then start without it."""
    import jax

    ended = []
    monkeypatch.setattr(processes, "_JOIN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(processes.os, "_exit", ended.append)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: time.sleep(0.3))
    for agreed in (False, True):
        processes.join(processes.ProcessSpec(1, 2, "127.0.0.1:9876", agreed))
    assert ended == [1, processes.LOST]
