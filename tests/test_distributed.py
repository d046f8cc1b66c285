"""How a process finds the others of its job."""

import pytest

from jaxlm import accelerators, distributed
from jaxlm.errors import InputError

METADATA = {"agent-worker-number": "1", "worker-network-endpoints": "h0,h1,h2,h3", "tpu-env": ""}


@pytest.fixture
def joined(monkeypatch):
    """What JAX is asked to join, on a machine that looks like a TPU's."""
    import jax
    from jax._src.clusters import cloud_tpu_cluster

    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerators, "found", lambda: ("/dev/accel0",))
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: ("", 404))
    monkeypatch.setattr(distributed, "_native_output_to_stderr", lambda: None)
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *place, **_: asked.append(place))
    return asked


@pytest.fixture
def metadata(joined, monkeypatch):
    """The metadata server of a TPU VM, and what it answers."""
    from jax._src.clusters import cloud_tpu_cluster

    answers = dict(METADATA)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: (answers[key], 200))
    return answers


def test_a_tpu_vm_of_several_hosts_joins_them(joined, metadata):
    distributed.join(None)
    assert joined == [()]


def test_a_tpu_vm_of_one_host_is_alone_but_in_several_slices(joined, metadata):
    metadata["worker-network-endpoints"] = "h0"
    distributed.join(None)
    assert not joined
    metadata["tpu-env"] = "MEGASCALE_NUM_SLICES: '2'"
    distributed.join(None)
    assert joined == [()]


@pytest.mark.parametrize(("hosts", "slices", "joins"), [("h0,h1", "1", 1), ("h0", "2", 1), ("localhost", "1", 0)])
def test_a_pod_joins_the_hosts_of_its_environment(hosts, slices, joins, joined, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", slices)
    distributed.join(None)
    assert len(joined) == joins


@pytest.mark.parametrize(("files", "platforms"), [((), ""), (("/dev/nvidia0",), ""), (("/dev/accel0",), "cpu")])
def test_no_metadata_is_asked_for_without_a_tpu(files, platforms, joined, metadata, monkeypatch):
    monkeypatch.setattr(accelerators, "found", lambda: files)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    metadata.clear()
    distributed.join(None)
    assert not joined


def test_a_tpu_vm_without_an_answer_is_told_of_process(joined, monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster

    def refuse(key):
        raise ConnectionError("refused")

    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", refuse)
    with pytest.raises(InputError, match="metadata server.*refused.*--process"):
        distributed.join(None)
