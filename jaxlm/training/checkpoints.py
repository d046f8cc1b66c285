"""Checkpoints: Orbax writes them, asynchronously and atomically, and reads them onto any mesh."""

import logging
import math
import re
import shutil
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxlm.core import buckets, copies
from jaxlm.core.addresses import address
from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.files import unwritable
from jaxlm.models.tree import Tree, paths
from jaxlm.parallel.processes import first_process_first, is_first
from jaxlm.training import manifests
from jaxlm.training.manifests import LOSS
from jaxlm.training.paths import written_apart
from jaxlm.training.state import TrainState

# The folder that Orbax writes to before it renames it to the step.
_IN_PROGRESS = "*.orbax-checkpoint-tmp*"
# The system's reason, at the end of TensorStore's message.
_SYSTEM_REASON = re.compile(r": ([^:]+) \[os_error_code=")
# Reasons that deleting something removes.
_FULL = re.compile(r"No space|quota| are free", re.IGNORECASE)
# The start of Orbax's advice on its own options, after the mismatch, of which _REASON characters are shown.
_ADVICE = re.compile(r"\.? *Truncating/padding is|\s*If this mismatch is")
_REASON = 300
# The least rate of a disk or network that is fit for training.
_BYTES_PER_S = 1e8
# Compressed at a time of an array, and the least size of a file: a few such files wait in memory to be written.
_CHUNK_BYTES, _FILE_BYTES = 2**23, 2**24
# Written at once where no memory is to be had; a shard is written whole.
_AT_ONCE_BYTES = 2**26
_FILES = 4096  # of an item, at most; larger files then
# How much longer processes wait for the slowest one.
_PATIENCE_S = 1200

# Orbax logs each of its phases there, and repeats raised errors with the tracebacks of its threads.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class Unsaved(RunFailed):
    """A checkpoint that could not be written."""


class Gone(RunFailed):
    """A checkpoint that was removed while it was read, for example by a run that is still training."""


class Checkpoints:
    """A writer of the checkpoints of one run. Close it, or use it as a context, to complete the last one.

    Each step has a folder with `parameters`, `average` and `local` if the state has them, and `rest` (the other fields
    of `TrainState`), keyed by tree path.
    """

    def __init__(self, directory: Path, keep: int, size: int = 0, at_once: int | None = None):
        """Open the writer.

        Args:
          size: the bytes of a state, which sets the timeout: all bytes are written, then read again for their
            checksums, while processes wait for one another.
          at_once: the bytes of parameters, more than those of a shard, that are compressed and wait for the disk at
            once; None: all of them.
        """
        self._directory = directory.absolute()
        with first_process_first("cleaning checkpoints"):
            for left in self._directory.glob(_IN_PROGRESS):  # from a process that was killed while saving
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        policies = [
            LatestN(keep),
            BestN(get_metric_fn=lambda metrics: -metrics[LOSS], n=1, keep_checkpoints_without_metrics=False),
        ]
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics[LOSS],  # without it Orbax records no metrics
            best_mode="min",
            preservation_policy=AnyPreservationPolicy(policies),
            async_options=ocp.AsyncOptions(
                timeout_secs=int(_PATIENCE_S + 2 * size / _BYTES_PER_S), post_finalization_callback=self._write_manifest
            ),
        )
        handlers = None
        if at_once is not None:
            impl = ocp.BasePyTreeCheckpointHandler(save_concurrent_bytes=at_once)
            handlers = {"parameters": ocp.PyTreeCheckpointHandler(handler_impl=impl)}
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
        self._began = self._longest_s = 0.0

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        with self._refusals_named():
            self._manager.close()

    def save(self, state: TrainState, held_out_loss: float | None) -> None:
        """Begin to write a state; return when its buffers may be reused. Raises Unsaved, also for the save before."""
        self.check_room(bytes_of(state))
        self.save_items(int(state.step), items_of(state), held_out_loss)

    def save_items(self, step: int, parts: dict[str, Any], held_out_loss: float | None) -> None:
        """Begin to write the items of a step, as `save` does."""
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(**{name: _to_save(item) for name, item in parts.items()})
        metrics = None if held_out_loss is None else {LOSS: held_out_loss}
        self.wait()
        self._began, self._arrays = time.monotonic(), {name: len(jax.tree.leaves(item)) for name, item in parts.items()}
        with self._refusals_named():
            self._manager.save(step, args=items, metrics=metrics)

    def note(self, step: int, held_out_loss: float | None) -> None:
        """Record the held-out loss of a checkpoint that was written before the loss was measured."""
        with first_process_first("noting the loss"):
            folder = self._directory / str(step)
            if is_first() and held_out_loss is not None and folder.is_dir():
                manifests.record_held_out_loss(folder, held_out_loss)
        self._manager.reload()

    def check_room(self, size: int) -> None:
        """Raise Unsaved if the disk has no room for `size` bytes or the folder is not writable, before anything is
        written: Orbax would wait for its folders for ever."""
        if refusal := unwritable(self._directory):
            raise self._unsaved(refusal)
        free = shutil.disk_usage(self._directory).free
        if free < size:
            raise self._unsaved(f"a checkpoint takes {size / 1e9:.2g} GB, and there {free / 1e9:.2g} GB are free")

    def expected_s(self, size: int) -> float:
        """Return the expected seconds to write `size` bytes: the longest time so far; at first a careful guess."""
        return self._longest_s or size / _BYTES_PER_S

    def wait(self) -> None:
        """Wait until every save is complete. Raises Unsaved."""
        with self._refusals_named():
            self._manager.wait_until_finished()
            self._drop_removed()

    def _drop_removed(self) -> None:
        """Remove from its bucket what was removed here: older checkpoints, and one that was not written to its end."""
        url = address(self._directory)
        for name in buckets.names_in(url) if url is not None and is_first() else ():
            if name.isdecimal() and not (self._directory / name).is_dir():
                copies.delete(self._directory / name)

    @contextmanager
    def _refusals_named(self) -> Iterator[None]:
        """Turn storage errors that Orbax raises in a block into Unsaved."""
        try:
            yield
        except (ValueError, OSError, RunFailed) as error:
            reason = _SYSTEM_REASON.search(str(error))
            raise self._unsaved(reason[1] if reason else str(error).partition("\n")[0][:200]) from error

    def _unsaved(self, reason: str) -> Unsaved:
        newest = max(manifests.steps_in(self._directory), default=None)
        resumes = "restarts from its beginning" if newest is None else f"resumes from step {newest}"
        advice = "make room" if _FULL.search(reason) else "fix that"
        return Unsaved(f"cannot write a checkpoint to {self._directory} ({reason}); {advice}, and the run {resumes}")

    def _write_manifest(self) -> None:
        """Open what was written, and write the manifest into the folder that Orbax is about to rename: every committed
        checkpoint has one."""
        for folder in self._directory.glob(_IN_PROGRESS) if is_first() else ():
            for name, arrays in self._arrays.items():
                if (found := _arrays_in(folder / name)) != arrays:
                    raise OSError(f"{name} can be read back with {found} of {arrays} arrays")
            manifests.write_manifest(folder)
            self._upload(folder)
        self._longest_s = max(self._longest_s, time.monotonic() - self._began)

    def _upload(self, folder: Path) -> None:
        """Upload the records of the run and then the checkpoint, whose manifest comes last and makes it one."""
        run, step = self._directory.parent, self._directory / folder.name.partition(".")[0]
        if address(run) is None:
            return
        copies.check_free(run)
        copies.push(run, leave_out=written_apart)
        copies.delete(step)  # of a process that was killed while it uploaded
        copies.push(folder, to=step)


def _arrays_in(folder: Path) -> int:
    """Return the number of arrays that can be found in an item of a checkpoint, opened as a restore opens it."""
    base = {"driver": "file", "path": f"{folder}/"}
    try:
        keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    except ValueError:
        return 0
    return sum(key.rpartition(b"/")[2] in (b".zarray", b"zarr.json") for key in keys)


def bytes_of(state: TrainState) -> int:
    """Return the bytes of a checkpoint of a state, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(items_of(state)))


def restore_state(directory: Path, step: int, like: TrainState) -> TrainState:
    """Return the training state of a step, laid out as `like`: `jax.ShapeDtypeStruct`s with shardings on any mesh. It
    has neither base nor working copy. Raises InputError where it is of another number of replicas (`local`)."""
    if like.local is not None and (folder := directory / str(step) / "local").is_dir():
        stored, name = paths(_metadata(folder)["parameters"]), next(iter(paths(like.parameters)))
        found, wanted = stored[name].shape[0], paths(like.local.parameters)[name].shape[0]
        if found != wanted:
            raise InputError(
                f"checkpoint {step} of {directory} is of {found} replicas of training.local_sgd, and the mesh has "
                f"{wanted}: set mesh.data={found}"
            )
    return state_of(_restore(directory, step, as_stored=False, **items_of(like)))


def state_of(items: dict[str, Any]) -> TrainState:
    """Return the state of the items of a checkpoint, with neither base nor working copy."""
    parts = dict(items)
    return TrainState(**parts.pop("rest"), **{"average": None, "local": None, "base": {}, "working": None, **parts})


def restore_parameters(directory: Path, step: int, like: Tree, average: bool = False, as_stored: bool = False) -> Tree:
    """Return the parameters alone, or their average, laid out as `like` and rounded to its dtypes while reading, or
    each in the dtype that it is stored in."""
    item = "average" if average else "parameters"
    return _restore(directory, step, as_stored, **{item: like})[item]


def save_parameters(directory: Path, parameters: Tree) -> None:
    """Write parameters alone, each in its dtype, as the checkpoint of step 0. Raises Unsaved.

    They may be views of files: however slow the disk, no more than one shard, or a few small ones, waits in memory.
    """
    folder, item, leaves = directory.absolute(), {"parameters": parameters}, jax.tree.leaves(parameters)
    size = sum(leaf.nbytes for leaf in leaves)
    shard = max(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    with Checkpoints(folder, keep=1, size=size, at_once=max(shard + 1, _AT_ONCE_BYTES)) as saved:
        saved.check_room(size)
        saved.save_items(0, item, None)


def items_of(state: TrainState) -> dict[str, Any]:
    """Return the trees that are written separately, so that each can be read alone, and the `rest`: neither base nor
    working copy."""
    parts = state._asdict()
    del parts["base"], parts["working"]
    items = {name: parts.pop(name) for name in ("parameters", "average", "local")}
    return {name: tree for name, tree in items.items() if tree is not None} | {"rest": parts}


def _to_save(item: Any) -> ocp.args.PyTreeSave:
    """Return what Orbax writes of an item: by default an array's whole shard is compressed at once, and up to 2 GB of
    what is compressed wait in memory."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(item))
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), item)
    return ocp.args.PyTreeSave(item, chunks, ocdbt_target_data_file_size=max(_FILE_BYTES, size // _FILES))


def _metadata(folder: Path) -> Any:
    """Return the tree of an item of a checkpoint, with the shape and dtype of each array."""
    with ocp.StandardCheckpointer() as reader:
        return reader.metadata(folder.absolute()).item_metadata.tree


def _with_dtypes(folder: Path, like: Tree) -> Tree:
    """Return `like` in the dtypes of an item of a checkpoint. What is not there stays, for a restore to refuse."""
    stored = paths(_metadata(folder))

    def as_stored(path: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(dtype=stored[path].dtype) if path in stored else leaf

    return jax.tree.unflatten(jax.tree.structure(like), [as_stored(*named) for named in paths(like).items()])


def _restore(directory: Path, step: int, as_stored: bool, **items: Any) -> dict[str, Any]:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        try:
            if as_stored:
                items = {name: _with_dtypes(directory / str(step) / name, like) for name, like in items.items()}
            wanted = {name: ocp.args.StandardRestore(like) for name, like in items.items()}
            restored = reader.restore((directory / str(step)).absolute(), args=ocp.args.Composite(**wanted))
            return {name: restored[name] for name in items}
        except (ValueError, KeyError, OSError) as error:
            if manifests.has_lost_files(directory / str(step)):
                raise Gone(f"checkpoint {step} of {directory} was removed while it was read; try again") from error
            if isinstance(error, OSError):
                raise
            why = textwrap.shorten(_ADVICE.split(str(error))[0], _REASON, placeholder=" …")
            raise InputError(
                f"checkpoint {step} of {directory} does not match [model] ({why}); restore the configuration "
                "that it was trained with"
            ) from error
