import errno
import functools
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import orbax.checkpoint as ocp
import pytest
from matrices import sampled

from jaxlm.core.errors import InputError, RunFailed
from jaxlm.models import tree as model_tree
from jaxlm.parallel.batches import put_batch
from jaxlm.training import checkpoints, manifests
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.paths import RunPaths
from jaxlm.training.step import TrainStep

pytestmark = pytest.mark.usefixtures("programs_once")

MESH = (2, 2, 2)


def like(mesh, model=None):
    steps = TrainStep(model or model_fixtures.model(), *model_fixtures.sections(), model_fixtures.optimization())
    return model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))


def trained(directory, steps):
    """Train some steps and save after each; return the saved states."""
    mesh, states = meshes.make(*MESH), {}
    with jax.set_mesh(mesh), Checkpoints(directory, steps) as saved:
        compiled = model_fixtures.jitted(
            model_fixtures.model(), model_fixtures.sections(), mesh, model_fixtures.optimization()
        )
        state = compiled.begin(model_fixtures.placed(model_fixtures.model(), mesh))
        for step in range(1, steps + 1):
            state, _ = compiled.train(state, put_batch(model_fixtures.batch(seed=step), mesh))
            states[step] = jax.tree.map(lambda x: np.array(x, copy=True), state)
            # The next step reuses the buffers while this one is still being written.
            saved.save(state, None)
    return states


@functools.cache
def begun():
    """Return the first state of a run on one device, on the host."""
    return model_fixtures.run_steps(model_fixtures.model(), model_fixtures.sections(), [])[1]


def state_of(step):
    """Return a state whose every array is another at every step."""
    return jax.tree.map(lambda x: x + x.dtype.type(step), begun())


def written(directory, losses, keep=2):
    """Save a state for each held-out loss, from one device and without training; return the states."""
    states = {step: state_of(step) for step in range(1, len(losses) + 1)}
    with jax.set_mesh(meshes.make()), Checkpoints(directory, keep) as saved:
        for loss, state in zip(losses, states.values(), strict=True):
            saved.save(jax.device_put(state), loss)
    return states


def steps_in(directory):
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


def never(line):
    raise AssertionError(line)


def flip_a_byte(folder):
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_state_comes_back_to_the_last_bit_though_its_buffers_were_reused(tmp_path):
    states = trained(tmp_path, 3)
    for step, state in states.items():
        restored = checkpoints.restore_state(tmp_path, step, like(meshes.make(*MESH)))
        chex.assert_trees_all_equal(jax.device_get(restored), state)


@pytest.mark.parametrize("mesh", sampled([(1, 1, 1), (8, 1, 1), (1, 2, 4)], ["(1, 2, 4)"]), ids=str)
def test_a_state_from_one_mesh_restores_onto_another(tmp_path, mesh):
    states = trained(tmp_path, 1)
    mesh = meshes.make(*mesh)
    restored = checkpoints.restore_state(tmp_path, 1, like(mesh))
    chex.assert_trees_all_equal(jax.device_get(restored), states[1])
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like(mesh)), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_parameters_restore_alone_and_are_rounded_as_they_are_read(tmp_path):
    saved = written(tmp_path, [None])[1].parameters
    whole = like(meshes.make()).parameters
    for dtype in (jnp.float32, jnp.bfloat16):
        wanted = jax.tree.map(lambda leaf, dtype=dtype: leaf.update(dtype=dtype), whole)
        restored = checkpoints.restore_parameters(tmp_path, 1, wanted)
        chex.assert_trees_all_equal(
            jax.device_get(restored), jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), saved)
        )


def test_little_of_a_checkpoint_waits_in_memory_to_be_written(tmp_path, monkeypatch):
    """An array is compressed in pieces, into files that are small: Orbax keeps a few in memory, by default of 2 GB. Of
    parameters alone it compresses one shard after another, or several small ones."""
    handler, limits = ocp.BasePyTreeCheckpointHandler, []

    def limited(save_concurrent_bytes):
        limits.append(save_concurrent_bytes)
        return handler(save_concurrent_bytes=save_concurrent_bytes)

    monkeypatch.setattr(ocp, "BasePyTreeCheckpointHandler", limited)
    monkeypatch.setattr(checkpoints, "_AT_ONCE_BYTES", 1)
    noise = jnp.asarray(np.random.default_rng(0).random((6, 2**21), np.float32))  # 50 MB that hardly shrink
    parameters = {"x": noise, "y": noise[:, 0]}
    checkpoints.save_parameters(tmp_path, parameters)
    assert limits == [noise.nbytes + 1]
    sizes = [file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()]
    assert sum(sizes) > 40e6 and max(sizes) < checkpoints._FILE_BYTES + 2 * checkpoints._CHUNK_BYTES
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), parameters)
    chex.assert_trees_all_equal(checkpoints.restore_parameters(tmp_path, 0, like), parameters)


def test_the_newest_and_the_best_stay(tmp_path):
    written(tmp_path, [3.0, 1.0, 2.0, 2.5, None, 2.6])
    assert steps_in(tmp_path) == [2, 5, 6]
    assert manifests.newest_verified(tmp_path, never) == 6
    assert manifests.best_verified(tmp_path, never) == 2


def test_the_best_stays_the_best_when_a_run_is_resumed(tmp_path):
    written(tmp_path, [1.0, 2.0, 3.0])
    with Checkpoints(tmp_path, 2) as saved:
        for step, loss in enumerate((4.0, 5.0, 6.0), start=4):
            saved.save(state_of(step), loss)
    assert steps_in(tmp_path) == [1, 5, 6]


def test_a_loss_that_is_measured_later_counts_for_the_best(tmp_path):
    states = written(tmp_path, [3.0, None])
    with Checkpoints(tmp_path, 1) as saved:
        saved.note(2, 1.0)
        saved.note(1, None)
        flip_a_byte(tmp_path / "1")
        saved.note(1, 5.0)
        assert manifests.newest_verified(tmp_path, never) == 2
        assert "does not match" in manifests.corruption_of(tmp_path / "1")  # its manifest was not rewritten
        state = jax.tree.map(np.copy, states[2])
        for step in (3, 4):
            saved.save(state._replace(step=np.int32(step)), 2.0)
    assert steps_in(tmp_path) == [2, 4]
    assert manifests.best_verified(tmp_path, never) == 2 and manifests.newest_verified(tmp_path, never) == 4
    assert "metrics/metrics" in json.loads((tmp_path / "2" / "checksums.json").read_text())


def test_a_corrupt_checkpoint_is_reported_and_the_one_before_it_used(tmp_path):
    states = written(tmp_path, [None, None])
    flip_a_byte(tmp_path / "2")
    lines = []
    assert manifests.newest_verified(tmp_path, lines.append) == 1
    assert len(lines) == 1 and "checkpoint 2 is corrupt" in lines[0] and "checksum" in lines[0]
    restored = checkpoints.restore_state(tmp_path, 1, like(meshes.make()))
    chex.assert_trees_all_equal(jax.device_get(restored), states[1])


def test_a_corrupt_best_checkpoint_gives_way_to_the_next_best(tmp_path):
    written(tmp_path, [1.0, 3.0, 2.0])
    flip_a_byte(tmp_path / "1")
    assert manifests.best_verified(tmp_path, lambda line: None) == 3


@pytest.mark.parametrize("what", ["a file is missing", "a file is cut short", "there are no checksums"])
def test_other_corruption_is_seen_too(tmp_path, what):
    written(tmp_path, [None])
    sums = tmp_path / "1" / "checksums.json"
    largest = max((p for p in (tmp_path / "1").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    match what:
        case "a file is missing":
            largest.unlink()
        case "a file is cut short":
            largest.write_bytes(largest.read_bytes()[:-1])
        case _:
            sums.unlink()
    assert manifests.newest_verified(tmp_path, lambda line: None) is None


def test_every_file_of_a_checkpoint_is_under_a_checksum(tmp_path):
    written(tmp_path, [1.0])
    files = {p.relative_to(tmp_path / "1").as_posix() for p in (tmp_path / "1").rglob("*") if p.is_file()}
    covered = set(json.loads((tmp_path / "1" / "checksums.json").read_text()))
    # Orbax's commit markers are written after the checksums, and hold nothing that is restored.
    assert files - covered == {"checksums.json", "_CHECKPOINT_METADATA", "commit_success.txt"}


def test_corrupt_checkpoints_are_set_aside_not_lost_and_their_steps_written_again(tmp_path):
    states = written(tmp_path, [None, None])
    flip_a_byte(tmp_path / "2")
    assert manifests.resume_from(tmp_path, lambda line: None) == 1
    assert steps_in(tmp_path) == [1] and (tmp_path / "corrupt" / "2").is_dir()
    mesh = meshes.make()
    with jax.set_mesh(mesh), Checkpoints(tmp_path, 2) as saved:
        saved.save(jax.device_put(states[2]), None)
    assert manifests.newest_verified(tmp_path, never) == 2
    chex.assert_trees_all_equal(jax.device_get(checkpoints.restore_state(tmp_path, 2, like(mesh))), states[2])


@pytest.mark.parametrize(
    "number, name",
    sampled(
        [
            pytest.param(number, name, id=f"{errno.errorcode[number]}-{name}")
            for number in (errno.EIO, errno.ESTALE)
            for name in ("checksums.json", "metrics/metrics")
        ],
        ["EIO-checksums.json", "ESTALE-metrics/metrics"],
    ),
)
def test_what_a_disk_refuses_is_not_corrupt_and_what_another_host_removed_is_gone(tmp_path, monkeypatch, number, name):
    written(tmp_path, [1.0, 2.0], keep=2)
    plain = Path.read_text

    def read_text(path, *arguments):
        if path == tmp_path / "2" / name:
            raise OSError(number, os.strerror(number), str(path))
        return plain(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_text)
    if number == errno.EIO:
        with pytest.raises(RunFailed, match=rf"2/{name} cannot be read \(Input/output error\); fix that, or"):
            manifests.resume_from(tmp_path, never)
        assert steps_in(tmp_path) == [1, 2]
    else:
        assert manifests.newest_verified(tmp_path, lambda line: None) == 1


def test_if_all_are_corrupt_none_is_set_aside(tmp_path):
    written(tmp_path, [None, None])
    flip_a_byte(tmp_path / "1")
    flip_a_byte(tmp_path / "2")
    with pytest.raises(InputError, match="every checkpoint in .* is corrupt; restore one from a copy, or"):
        manifests.resume_from(tmp_path, lambda line: None)
    assert steps_in(tmp_path) == [1, 2]
    assert manifests.resume_from(tmp_path / "new", never) is None


def test_a_checkpoint_that_is_removed_while_it_is_read_does_not_blame_the_model(tmp_path):
    written(tmp_path, [None])
    wanted = like(meshes.make()).parameters
    shutil.rmtree(tmp_path / "1" / "parameters" / "d")
    with pytest.raises(checkpoints.Gone, match="checkpoint 1 of .* was removed while it was read; try again"):
        checkpoints.restore_parameters(tmp_path, 1, wanted)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(checkpoints.Gone, match="checkpoint 1 of"):
        checkpoints.restore_parameters(tmp_path, 1, wanted)


@pytest.mark.parametrize(
    "content",
    sampled(
        [b"", b"{", b"\xff", b"{}", b"3", b"null", b'{"held_out_loss": "x"}'],
        lambda content: content in (b"{", b"null"),
    ),
)
def test_a_loss_that_cannot_be_read_costs_its_own_checkpoint_alone(tmp_path, content):
    """Orbax compares the losses of all checkpoints, and would fail at the start."""
    states = written(tmp_path, [1.0, 2.0], keep=2)
    (tmp_path / "1" / "metrics" / "metrics").write_bytes(content)
    (tmp_path / "007").mkdir()
    said: list[str] = []
    assert manifests.best_verified(tmp_path, said.append) == 2 and not said
    assert manifests.resume_from(tmp_path, said.append) == 2
    assert said == ["checkpoint 1 is corrupt (its loss cannot be read); it is moved to corrupt/"]
    (tmp_path / "007").rmdir()
    state = jax.tree.map(np.copy, states[2])
    with Checkpoints(tmp_path, 2) as saved:
        saved.save(state._replace(step=np.int32(3)), 3.0)
    assert steps_in(tmp_path) == [2, 3] and (tmp_path / "corrupt" / "1").is_dir()


def test_an_average_that_is_not_there_is_refused_in_one_line(tmp_path):
    written(tmp_path, [None])
    parameters = like(meshes.make()).parameters
    with pytest.raises(InputError, match=r"checkpoint 1 of .* does not match \[model\] .*average"):
        checkpoints.restore_parameters(tmp_path, 1, parameters, average=True)


def test_what_a_killed_process_left_half_written_is_no_checkpoint(tmp_path):
    written(tmp_path, [None])
    half = tmp_path / "2.orbax-checkpoint-tmp"
    (tmp_path / "1").rename(half)
    (half / "commit_success.txt").unlink()
    assert manifests.newest_verified(tmp_path, never) is None
    with Checkpoints(tmp_path, 2):
        pass
    assert not half.exists()


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path):
    written(tmp_path, [None])
    for other, names in (
        (model_fixtures.model(d_model=64), "64"),
        (model_fixtures.model(tied_embeddings=True), "unembedding"),
    ):
        with pytest.raises(InputError) as refused:
            checkpoints.restore_parameters(tmp_path, 1, like(meshes.make(), other).parameters)
        said = str(refused.value)
        assert re.fullmatch(
            rf"checkpoint 1 of .* does not match \[model\] \(.*{names}.*\); restore the configuration.*", said
        )
        assert "\n" not in said and "strict" not in said and "partial_restore" not in said


def test_a_full_disk_takes_no_checkpoint_and_leaves_those_that_are_there(tmp_path, monkeypatch):
    """A full disk is found before anything is written; one that fills meanwhile, from Orbax's error."""
    mesh = meshes.make(*MESH)
    state = jax.device_put(begun(), jax.tree.map(lambda x: x.sharding, like(mesh)))
    size = checkpoints.bytes_of(state)
    with jax.set_mesh(mesh), Checkpoints(tmp_path, keep=2) as saved:
        saved.save(state._replace(step=state.step + 3), None)
        saved.wait()
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
        with pytest.raises(
            checkpoints.Unsaved, match=r"cannot write a checkpoint to .* \(a checkpoint takes .* from step 3$"
        ):
            saved.save(state, None)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))

        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, "unwritable", lambda folder: "Operation not permitted")
            with pytest.raises(checkpoints.Unsaved, match=r"\(Operation not permitted\); fix that, and .* step 3$"):
                saved.save(state, None)

        def refuses():
            raise ValueError("RESOURCE_EXHAUSTED: writing \"a\": Failed: No space left on device [os_error_code='28']")

        with monkeypatch.context() as patched:
            patched.setattr(saved._manager, "wait_until_finished", refuses)
            with pytest.raises(checkpoints.Unsaved, match=r"\(No space left on device\); make room, and"):
                saved.wait()
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize(
    "name",
    sampled(["{a,b}", "a%20b#c", "ä é", "-a", "file:a", "s3:", "a[b", "a]b[c", "$HOME ~"], ["{a,b}", "a%20b#c", "ä é"]),
)
def test_a_folder_of_any_name_that_is_not_refused_holds_checkpoints(tmp_path, name):
    paths = RunPaths(tmp_path / name)
    paths.check_name()
    states = written(paths.checkpoints, [1.0])
    restored = checkpoints.restore_state(paths.checkpoints, 1, like(meshes.make()))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, restored), states[1])


@pytest.mark.parametrize("name", ["lr=[1e-3]", "a*b", "a?b", "a\\b", "**", "gs:"])
def test_a_name_that_orbax_reads_as_a_pattern_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    for folder in (tmp_path / name, Path("run")):  # wherever in the path
        with pytest.raises(InputError, match="cannot be written to such a path; choose another --out"):
            RunPaths(folder).check_name()


def test_a_checkpoint_that_cannot_be_opened_is_none(tmp_path):
    """As Orbax leaves it below a folder whose name is a pattern."""
    folder = tmp_path / "lr=[1e-3]" / "checkpoints"
    with pytest.raises(RunFailed, match="can be read back with 0 of .* arrays"):
        written(folder, [1.0])
    assert not steps_in(folder) and manifests.newest_verified(folder, never) is None
