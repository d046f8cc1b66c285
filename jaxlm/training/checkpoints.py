"""Checkpoints: Orbax writes them, asynchronously and atomically, and reads them onto any mesh."""

import logging
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
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.files import unwritable
from jaxlm.models.tree import Tree
from jaxlm.parallel.processes import first_process_first, is_first
from jaxlm.training import manifests
from jaxlm.training.manifests import LOSS
from jaxlm.training.step import TrainState

# The folder that Orbax fills before it renames it to the step's.
_IN_PROGRESS = "*.orbax-checkpoint-tmp*"
# Why the system refused, at the end of what TensorStore says.
_OF_SYSTEM = re.compile(r": ([^:]+) \[os_error_code=")
# Reasons that end where something is deleted.
_FULL = re.compile(r"No space|quota| are free", re.IGNORECASE)
# What Orbax says of its own options, behind what does not fit, of which so many characters are shown.
_ADVICE = re.compile(r"\.? *Truncating/padding is|\s*If this mismatch is")
_REASON = 300
# What any disk or network that is fit for training can do.
_BYTES_PER_S = 1e8
# How long processes wait for the slowest beyond that.
_PATIENCE_S = 1200

# Orbax reports each of its phases there, and with tracebacks of its threads what it raises besides.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class Unsaved(RunFailed):
    """A checkpoint that could not be written."""


class Gone(RunFailed):
    """A checkpoint that was removed while it was read, as by a run that trains on."""


class Checkpoints:
    """The checkpoints of one run, for writing. Close it, or use it as a context, so that the last one is whole.

    A folder per step, in it `parameters`, `average` where the state has one, and `rest` (the other fields of
    `TrainState`), keyed by tree path.
    """

    def __init__(self, directory: Path, keep: int, size: int = 0):
        """`size`: the bytes of a state. All are written, and then read again to be sealed, while processes wait for one
        another."""
        self._directory = directory.absolute()
        with first_process_first("cleaning checkpoints"):
            for left in self._directory.glob(_IN_PROGRESS):  # by a process that was killed while saving
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        policies = [
            LatestN(keep),
            BestN(get_metric_fn=lambda metrics: -metrics[LOSS], n=1, keep_checkpoints_without_metrics=False),
        ]
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics[LOSS],  # without it Orbax writes no metrics down
            best_mode="min",
            preservation_policy=AnyPreservationPolicy(policies),
            async_options=ocp.AsyncOptions(
                timeout_secs=int(_PATIENCE_S + 2 * size / _BYTES_PER_S), post_finalization_callback=self._seal
            ),
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._began = self._longest_s = 0.0

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        with self._refusals_named():
            self._manager.close()

    def save(self, state: TrainState, held_out_loss: float | None) -> None:
        """Begin to write a state; returns when its buffers may be reused. Raises Unsaved, also of the one before."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in _items(state).items()})
        metrics = None if held_out_loss is None else {LOSS: held_out_loss}
        self.wait()
        self.check_room(bytes_of(state))
        self._began = time.monotonic()
        with self._refusals_named():
            self._manager.save(step, args=items, metrics=metrics)

    def note(self, step: int, held_out_loss: float | None) -> None:
        """The held-out loss of a checkpoint that was written before it was measured."""
        with first_process_first("noting the loss"):
            folder = self._directory / str(step)
            if is_first() and held_out_loss is not None and folder.is_dir():
                manifests.note(folder, held_out_loss)
        self._manager.reload()

    def check_room(self, size: int) -> None:
        """Raises Unsaved where the disk has no room for `size` bytes, or the folder takes nothing, before anything is
        written: Orbax would wait for its folders for ever."""
        if refusal := unwritable(self._directory):
            raise self._unsaved(refusal)
        free = shutil.disk_usage(self._directory).free
        if free < size:
            raise self._unsaved(f"a checkpoint takes {size / 1e9:.2g} GB, and there {free / 1e9:.2g} GB are free")

    def expected_s(self, size: int) -> float:
        """Seconds that writing `size` bytes takes: as long as the longest time yet; at first, at a careful guess."""
        return self._longest_s or size / _BYTES_PER_S

    def wait(self) -> None:
        """Until all that was saved is whole. Raises Unsaved."""
        with self._refusals_named():
            self._manager.wait_until_finished()

    @contextmanager
    def _refusals_named(self) -> Iterator[None]:
        """A block in which Orbax may find that it could not write; it raises what its storage raised."""
        try:
            yield
        except (ValueError, OSError) as error:
            reason = _OF_SYSTEM.search(str(error))
            raise self._unsaved(reason[1] if reason else str(error).partition("\n")[0][:200]) from error

    def _unsaved(self, reason: str) -> Unsaved:
        newest = max(manifests.steps_in(self._directory), default=None)
        goes_on = "from its start" if newest is None else f"from step {newest}"
        advice = "make room" if _FULL.search(reason) else "mend that"
        return Unsaved(f"{self._directory} takes no checkpoint ({reason}); {advice}, and the run goes on {goes_on}")

    def _seal(self) -> None:
        """Write the checksums into the folder that Orbax is about to rename: what is committed is sealed."""
        for folder in self._directory.glob(_IN_PROGRESS) if is_first() else ():
            manifests.seal(folder)
        self._longest_s = max(self._longest_s, time.monotonic() - self._began)


def bytes_of(state: TrainState) -> int:
    """Of all its arrays, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def restore_state(directory: Path, step: int, like: TrainState) -> TrainState:
    """A whole training state, laid out as `like`: `jax.ShapeDtypeStruct`s with the shardings of any mesh."""
    restored = _restore(directory, step, **_items(like))
    rest = restored.pop("rest")
    return TrainState(**restored, **rest)


def restore_parameters(directory: Path, step: int, like: Tree, average: bool = False) -> Tree:
    """The parameters alone, or their average, laid out as `like`, and rounded to its dtypes as they are read."""
    item = "average" if average else "parameters"
    return _restore(directory, step, **{item: like})[item]


def _items(state: TrainState) -> dict[str, Any]:
    """What is written apart, so that it can be read alone, and the `rest`."""
    parts = state._asdict()
    items = {name: parts.pop(name) for name in ("parameters", "average")}
    return {name: tree for name, tree in items.items() if tree is not None} | {"rest": parts}


def _restore(directory: Path, step: int, **items: Any) -> dict[str, Any]:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        wanted = {name: ocp.args.StandardRestore(like) for name, like in items.items()}
        try:
            restored = reader.restore((directory / str(step)).absolute(), args=ocp.args.Composite(**wanted))
            return {name: restored[name] for name in items}
        except (ValueError, KeyError, OSError) as error:
            if manifests.has_lost_files(directory / str(step)):
                raise Gone(f"checkpoint {step} of {directory} was removed while it was read; try again") from error
            if isinstance(error, OSError):
                raise
            why = textwrap.shorten(_ADVICE.split(str(error))[0], _REASON, placeholder=" …")
            raise InputError(
                f"checkpoint {step} of {directory} does not fit the model ({why}); put [model] back as it was trained"
            ) from error
