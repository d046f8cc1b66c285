"""Checkpoints: Orbax writes them, asynchronously and atomically; checksums tell whether they are still whole."""

import errno
import hashlib
import json
import logging
import math
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxlm.distributed import broadcast_from_first, first_process_first, is_first
from jaxlm.errors import InputError, RunFailed
from jaxlm.files import replace, unwritable
from jaxlm.models.tree import Tree
from jaxlm.training.step import TrainState

_CHECKSUMS = "checksums.json"
# Orbax stamps this file with the time of the commit, after everything else is sealed.
_STAMPED = "_CHECKPOINT_METADATA"
# The folder that Orbax fills before it renames it to the step's.
_IN_PROGRESS = "*.orbax-checkpoint-tmp*"
_LOSS = "held_out_loss"
# Why the system refused, at the end of what TensorStore says.
_OF_SYSTEM = re.compile(r": ([^:]+) \[os_error_code=")
# What the system says of a file that is not there, also where another host removed it.
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR)
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
            BestN(get_metric_fn=lambda metrics: -metrics[_LOSS], n=1, keep_checkpoints_without_metrics=False),
        ]
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics[_LOSS],  # without it Orbax writes no metrics down
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
        metrics = None if held_out_loss is None else {_LOSS: held_out_loss}
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
                # Of the other files what was sealed: they may have been damaged since.
                sealed, metrics = json.loads((folder / _CHECKSUMS).read_text()), _metrics(folder)
                name = metrics.relative_to(folder).as_posix()
                others = {file: digest for file, digest in sealed.items() if file != name}
                replace(folder / _CHECKSUMS, json.dumps(others))
                metrics.parent.mkdir(exist_ok=True)
                replace(metrics, json.dumps({_LOSS: held_out_loss}))
                replace(folder / _CHECKSUMS, json.dumps({**sealed, name: _checksum(metrics)}))
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
        newest = max(_steps(self._directory), default=None)
        goes_on = "from its start" if newest is None else f"from step {newest}"
        advice = "make room" if _FULL.search(reason) else "mend that"
        return Unsaved(f"{self._directory} takes no checkpoint ({reason}); {advice}, and the run goes on {goes_on}")

    def _seal(self) -> None:
        """Write the checksums into the folder that Orbax is about to rename: what is committed is sealed."""
        for folder in self._directory.glob(_IN_PROGRESS) if is_first() else ():
            (folder / _CHECKSUMS).write_text(json.dumps(dict(_checksums(folder))))
        self._longest_s = max(self._longest_s, time.monotonic() - self._began)


def bytes_of(state: TrainState) -> int:
    """Of all its arrays, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def resume_from(directory: Path, say: Callable[[str], None]) -> int | None:
    """The newest whole step, with newer, damaged ones set aside; every process of a job takes what the first finds.

    Raises InputError where there are some and none is whole: a run is not begun anew where it may still be rescued.
    """
    nothing, none_whole = -1, -2
    found = nothing
    if is_first():
        if (newest := newest_whole(directory, say)) is not None:
            found = newest
            _set_aside_damaged(directory, newest, say)
        elif _steps(directory):
            found = none_whole
    step = broadcast_from_first(found)
    if step == none_whole:
        raise InputError(f"no checkpoint in {directory} is whole; put back one that is, or choose another --out")
    return None if step == nothing else step


def newest_whole(directory: Path, say: Callable[[str], None]) -> int | None:
    """The newest step whose files all match their checksums, or None. Damaged ones are reported through `say`."""
    for step in sorted(_steps(directory), reverse=True):
        damage = _damage(directory / str(step))
        if damage is None:
            return step
        say(f"checkpoint {step} is damaged ({damage}); looking for one before it")
    return None


def best_whole(directory: Path, say: Callable[[str], None]) -> int | None:
    """The whole step with the lowest held-out loss, or the newest where none was evaluated."""
    known = {step: held_out_loss(directory, step) for step in _steps(directory)}
    losses = {step: loss for step, loss in known.items() if loss is not None and not math.isnan(loss)}
    for step in sorted(losses, key=losses.__getitem__):
        damage = _damage(directory / str(step))
        if damage is None:
            return step
        say(f"checkpoint {step} is damaged ({damage}); trying the next best")
    return newest_whole(directory, say)


def held_out_loss(directory: Path, step: int) -> float | None:
    """The held-out loss of a checkpoint, in nats per token; None where it was not measured."""
    return _loss(directory / str(step))


def _loss(folder: Path) -> float | None:
    try:
        loss = json.loads(_metrics(folder).read_text())[_LOSS]
    except OSError as error:
        _require_gone(error)
        return None
    except (ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, int | float) else None


def _loss_is_lost(folder: Path) -> bool:
    return _metrics(folder).exists() and _loss(folder) is None


def _metrics(folder: Path) -> Path:
    """Where Orbax keeps what a checkpoint is compared by."""
    return folder / "metrics" / "metrics"


def _set_aside_damaged(directory: Path, newest: int, say: Callable[[str], None]) -> None:
    """Move checkpoints newer than the newest whole one to `damaged/`, so that their steps can be written again, and
    those whose loss Orbax, which compares all of them, could not read."""
    for step in _steps(directory):
        if step > newest or _loss_is_lost(directory / str(step)):
            if step < newest:
                say(f"checkpoint {step} is damaged (its loss cannot be read); it is set aside")
            aside = directory / "damaged" / str(step)
            while aside.exists():
                aside = aside.with_name(aside.name + "+")
            aside.parent.mkdir(exist_ok=True)
            (directory / str(step)).rename(aside)


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
            if _files_are_gone(directory / str(step)):
                raise Gone(f"checkpoint {step} of {directory} was removed while it was read; try again") from error
            if isinstance(error, OSError):
                raise
            why = textwrap.shorten(_ADVICE.split(str(error))[0], _REASON, placeholder=" …")
            raise InputError(
                f"checkpoint {step} of {directory} does not fit the model ({why}); put [model] back as it was trained"
            ) from error


def _steps(directory: Path) -> list[int]:
    names = [path.name for path in directory.glob("*") if path.is_dir()]
    return [int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)]


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        expected = json.loads((folder / _CHECKSUMS).read_text())
    except OSError as error:
        _require_gone(error)
        return "it has no checksums"
    except ValueError:
        return "it has no checksums"
    if not expected or not isinstance(expected, dict):
        return "its checksums are none"
    if _loss_is_lost(folder):
        return "its loss cannot be read"
    try:
        actual = dict(_checksums(folder))
    except OSError as error:
        _require_gone(error)
        return "it is being removed"
    for name, digest in expected.items():
        if name not in actual:
            return f"{name} is missing"
        if actual[name] != digest:
            return f"{name} does not match its checksum"
    return None


def _require_gone(error: OSError) -> None:
    """Raises RunFailed where a file is there and cannot be read: its checkpoint is no worse for it."""
    if error.errno not in _GONE:
        raise RunFailed(
            f"{error.filename} cannot be read ({error.strerror}); mend that, or move its checkpoint away"
        ) from error


def _files_are_gone(folder: Path) -> bool:
    """Whether a checkpoint that was whole has lost files."""
    try:
        return not all((folder / name).is_file() for name in json.loads((folder / _CHECKSUMS).read_text()))
    except (OSError, ValueError):
        return True


def _checksums(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (_CHECKSUMS, _STAMPED):
            yield path.relative_to(folder).as_posix(), _checksum(path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
