"""Checkpoint manifests: checksums of every file, written before the commit and verified before a restore."""

import errno
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxlm.core import copies
from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.files import replace
from jaxlm.parallel.processes import broadcast_from_first, is_first
from jaxlm.training.paths import CHECKSUMS as _CHECKSUMS

# The metric that ranks checkpoints, under its key in Orbax's metrics file.
LOSS = "held_out_loss"
# Orbax writes the time of the commit into this file, after the manifest is written.
_COMMIT_METADATA = "_CHECKPOINT_METADATA"
# Errors that mean that a file does not exist, also because another host removed it.
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR)


def steps_in(directory: Path) -> list[int]:
    """Return the steps of all committed checkpoints, verified or corrupt, in no particular order."""
    names = [path.name for path in directory.glob("*") if path.is_dir()]
    return [int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)]


def write_manifest(folder: Path) -> None:
    """Write the checksums of all files of a checkpoint into its folder."""
    (folder / _CHECKSUMS).write_text(json.dumps(dict(_checksums(folder))))


def record_held_out_loss(folder: Path, held_out_loss: float) -> None:
    """Add the held-out loss to a checkpoint whose manifest was written before the loss was measured."""
    # The other files keep their recorded checksums: they may have been corrupted since.
    recorded, metrics = json.loads((folder / _CHECKSUMS).read_text()), _metrics(folder)
    name = metrics.relative_to(folder).as_posix()
    others = {file: digest for file, digest in recorded.items() if file != name}
    _replace(folder / _CHECKSUMS, others)
    metrics.parent.mkdir(exist_ok=True)
    _replace(metrics, {LOSS: held_out_loss})
    _replace(folder / _CHECKSUMS, {**recorded, name: _checksum(metrics)})


def _replace(file: Path, content: dict[str, Any]) -> None:
    replace(file, json.dumps(content))
    copies.push(file)


def has_lost_files(folder: Path) -> bool:
    """Return whether files that the manifest lists are missing, or the manifest itself is."""
    try:
        return not all((folder / name).is_file() for name in json.loads((folder / _CHECKSUMS).read_text()))
    except (OSError, ValueError):
        return True


def resume_from(directory: Path, say: Callable[[str], None]) -> int | None:
    """Return the newest verified step, or None without checkpoints; move newer, corrupt ones to `corrupt/`.

    The first process of a job searches, and the others take its answer. Raises InputError if every checkpoint is
    corrupt: a run that may still be rescued is not restarted from step 0.
    """
    nothing, all_corrupt = -1, -2
    answer = nothing
    if is_first():
        if (newest := newest_verified(directory, say)) is not None:
            answer = newest
            _set_aside_corrupt(directory, newest, say)
        elif steps_in(directory):
            answer = all_corrupt
    step = broadcast_from_first(answer)
    if step == all_corrupt:
        raise InputError(
            f"every checkpoint in {directory} is corrupt; restore one from a copy, or choose another --out"
        )
    return None if step == nothing else step


def newest_verified(directory: Path, say: Callable[[str], None]) -> int | None:
    """Return the newest step whose files all match their checksums, or None; report corrupt ones through `say`."""
    for step in sorted(steps_in(directory), reverse=True):
        corruption = corruption_of(directory / str(step))
        if corruption is None:
            return step
        say(f"checkpoint {step} is corrupt ({corruption}); trying the one before it")
    return None


def best_verified(directory: Path, say: Callable[[str], None]) -> int | None:
    """Return the verified step with the lowest held-out loss, or the newest verified one if none was evaluated."""
    known = {step: held_out_loss(directory, step) for step in steps_in(directory)}
    losses = {step: loss for step, loss in known.items() if loss is not None and not math.isnan(loss)}
    for step in sorted(losses, key=losses.__getitem__):
        corruption = corruption_of(directory / str(step))
        if corruption is None:
            return step
        say(f"checkpoint {step} is corrupt ({corruption}); trying the next best")
    return newest_verified(directory, say)


def digest_of(directory: Path, step: int) -> str:
    """Return a digest of the parameters of a checkpoint that was verified, from the checksums of their files."""
    listed = json.loads((directory / str(step) / _CHECKSUMS).read_text())
    of_parameters = {name: digest for name, digest in listed.items() if name.startswith("parameters/")}
    return hashlib.blake2b(json.dumps(of_parameters, sort_keys=True).encode(), digest_size=32).hexdigest()


def held_out_loss(directory: Path, step: int) -> float | None:
    """Return the held-out loss of a checkpoint, in nats per token; None if it was not measured."""
    return _loss(directory / str(step))


def _loss(folder: Path) -> float | None:
    try:
        loss = json.loads(_metrics(folder).read_text())[LOSS]
    except OSError as error:
        _require_gone(error)
        return None
    except (ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, int | float) else None


def _loss_is_unreadable(folder: Path) -> bool:
    return _metrics(folder).exists() and _loss(folder) is None


def _metrics(folder: Path) -> Path:
    """Return the path of Orbax's metrics file."""
    return folder / "metrics" / "metrics"


def _set_aside_corrupt(directory: Path, newest: int, say: Callable[[str], None]) -> None:
    """Move corrupt checkpoints to `corrupt/`.

    Checkpoints newer than the newest verified one move so that their steps can be written again. Checkpoints with an
    unreadable loss move because Orbax compares the losses of all of them.
    """
    for step in steps_in(directory):
        if step > newest or _loss_is_unreadable(directory / str(step)):
            if step < newest:
                say(f"checkpoint {step} is corrupt (its loss cannot be read); it is moved to corrupt/")
            aside = directory / "corrupt" / str(step)
            while aside.exists():
                aside = aside.with_name(aside.name + "+")
            aside.parent.mkdir(exist_ok=True)
            copies.pull_missing(directory / str(step))
            (directory / str(step)).rename(aside)
            copies.push(aside)
            copies.delete(directory / str(step))


def corruption_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every file matches its checksum. It is copied from its bucket
    first."""
    try:
        copies.pull_missing(folder)
    except FileNotFoundError:
        return "it is being removed"
    try:
        expected = json.loads((folder / _CHECKSUMS).read_text())
    except OSError as error:
        _require_gone(error)
        return "it has no checksums"
    except ValueError:
        return "it has no checksums"
    if not expected or not isinstance(expected, dict):
        return "its list of checksums is empty"
    if _loss_is_unreadable(folder):
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
    """Raise RunFailed if a file exists and cannot be read: that does not make its checkpoint corrupt."""
    if error.errno not in _GONE:
        raise RunFailed(
            f"{error.filename} cannot be read ({error.strerror}); fix that, or move its checkpoint away"
        ) from error


def _checksums(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (_CHECKSUMS, _COMMIT_METADATA):
            yield path.relative_to(folder).as_posix(), _checksum(path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
