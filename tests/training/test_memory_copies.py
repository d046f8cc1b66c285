"""Copies of a state in memory: whole or not there, on two hosts, and onto any mesh."""

import jax
import meshes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core.errors import InputError
from jaxlm.training import memory_copies
from jaxlm.training.checkpoints import Unsaved
from jaxlm.training.memory_copies import MemoryCopies
from jaxlm.training.paths import RunPaths

SPECS = {"matrix": PartitionSpec("fsdp", "tensor"), "gain": PartitionSpec(), "step": PartitionSpec()}
SHAPES = {"matrix": ((16, 8), "float32"), "gain": ((5,), "bfloat16"), "step": ((), "int32")}


def like(mesh):
    return {
        name: jax.ShapeDtypeStruct(*SHAPES[name], sharding=NamedSharding(mesh, spec)) for name, spec in SPECS.items()
    }


def state(mesh, step):
    """Return arrays that are others at each step."""
    numbers = {name: np.arange(np.prod(shape)).reshape(shape) + step for name, (shape, _) in SHAPES.items()}
    return {name: jax.device_put(numbers[name].astype(leaf.dtype), leaf.sharding) for name, leaf in like(mesh).items()}


def opened(tmp_path, mesh, after=0):
    """Return the copies of a start, and the step that they find."""
    copies = MemoryCopies(tmp_path, RunPaths(tmp_path / "run"), like(mesh), mesh)
    return copies, copies.find(after)


def saved(tmp_path, mesh, *steps):
    """Return the copies of a start that finds none and makes some."""
    copies, found = opened(tmp_path, mesh)
    assert found is None
    for step in steps:
        copies.save(step, state(mesh, step))
    return copies


def assert_is(restored, step):
    for name, array in state(meshes.make(), step).items():
        np.testing.assert_array_equal(restored[name], array)


@pytest.mark.parametrize("later", [meshes.layout(), meshes.layout(1, 4, 2), meshes.layout(2, 2, 1)], ids=str)
def test_the_newest_copy_comes_back_onto_any_mesh_to_the_last_bit(later, tmp_path):
    saved(tmp_path, meshes.make(2, 2, 2), 3, 6, 9)
    mesh = meshes.make(**later)
    copies, found = opened(tmp_path, mesh, after=8)
    assert found == 9
    restored = copies.restore()
    assert_is(restored, 9)
    assert all(array.sharding == like(mesh)[name].sharding for name, array in restored.items())
    copies.save(12, restored)
    copies.save(15, restored)  # the copy of the earlier start leaves once there are two
    (root,) = tmp_path.glob("jaxlm-*[!t]")
    assert sorted(folder.name.partition("-")[0] for folder in root.iterdir()) == ["12", "15"]
    copies.clear()
    assert not root.exists() and opened(tmp_path, mesh)[1] is None


def test_a_copy_that_is_older_than_a_checkpoint_does_not_count_and_is_removed(tmp_path):
    saved(tmp_path, meshes.make(), 3, 6)
    assert opened(tmp_path, meshes.make(), after=6)[1] is None
    assert opened(tmp_path, meshes.make())[1] is None
    assert not list(tmp_path.glob("jaxlm-*/*"))


def test_a_start_without_copies_forgets_those_of_earlier_ones(tmp_path):
    """It may train the same steps anew, otherwise."""
    saved(tmp_path, meshes.make(), 3)
    memory_copies.forget(RunPaths(tmp_path / "run"))
    assert opened(tmp_path, meshes.make())[1] is None


@pytest.mark.parametrize("harm", ["flipped", "cut", "unfinished"])
def test_a_copy_that_is_not_whole_gives_way_to_the_one_before_it(harm, tmp_path):
    mesh = meshes.make(1, 4, 2)
    saved(tmp_path, mesh, 3, 6)
    (file,) = tmp_path.glob("jaxlm-*/6-*/0.bin")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    if harm == "unfinished":  # killed before the manifest
        file.with_suffix(".json").unlink()
    else:
        file.write_bytes(content if harm == "flipped" else content[:-1])
    copies, found = opened(tmp_path, mesh)
    assert found == 3
    assert_is(copies.restore(), 3)
    assert not file.exists()


def test_a_copy_of_other_arrays_does_not_count(tmp_path, monkeypatch):
    saved(tmp_path, meshes.make(), 3)
    monkeypatch.setitem(SHAPES, "gain", ((6,), "bfloat16"))
    assert opened(tmp_path, meshes.make())[1] is None


@pytest.mark.parametrize("hosts", [(4, 4), (3, 3, 2), (5, 1, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (4, 1, 2)], ids=str)
def test_each_block_is_on_two_hosts_and_what_was_sent_is_right(sizes, hosts, tmp_path, monkeypatch):
    """Hosts of so many of the eight devices, whose one process writes for all of them."""
    mesh = meshes.make(*sizes)
    host = np.repeat(np.arange(len(hosts)), hosts)

    def host_of(device):
        return str(host[device.id])

    monkeypatch.setattr(MemoryCopies, "_host_of", lambda self, device: host_of(device))
    for path, leaf in like(mesh).items():
        blocks = memory_copies.holders(path, leaf.shape, leaf.sharding)
        rounds = memory_copies.sends(blocks, host_of, mesh)
        received = {block: host_of(to) for pairs in rounds for block, (_, to) in pairs.items()}
        for block, devices in blocks.items():
            assert len({*map(host_of, devices), *([received[block]] if block in received else [])}) >= 2
        assert (block in received) == (len(set(map(host_of, devices))) == 1)
    saved(tmp_path, mesh, 3)
    # Of a block that two hosts have, the last in the file counts: what was sent.
    copies, _ = opened(tmp_path, mesh)
    assert_is(copies.restore(), 3)


def test_too_little_memory_is_refused_before_training_and_named_in_it(tmp_path, monkeypatch):
    mesh = meshes.make()
    copies = saved(tmp_path, mesh)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(Unsaved, match="No space left on device.*unset checkpoint.memory_every"):
        copies.save(3, state(mesh, 3))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(InputError, match=r"2 copies of this host's part .* take 1.05e-06 GB, and .* has 1e-06 GB free"):
        opened(tmp_path, mesh)
    with pytest.raises(InputError, match="checkpoint.memory_folder = .*none cannot be written to"):
        opened(tmp_path / "none", mesh)
