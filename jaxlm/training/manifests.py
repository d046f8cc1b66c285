"""Which checkpoints are whole: checksums seal their files before they are committed, and tell of damage later."""

import errno
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.files import replace
from jaxlm.parallel.processes import broadcast_from_first, is_first

# What checkpoints are compared by, in the file where Orbax keeps it.
LOSS = "held_out_loss"
_CHECKSUMS = "checksums.json"
# Orbax stamps this file with the time of the commit, after everything else is sealed.
_STAMPED = "_CHECKPOINT_METADATA"
# What the system says of a file that is not there, also where another host removed it.
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR)


def steps_in(directory: Path) -> list[int]:
    """The steps of all checkpoints that were committed, whole or not, in no order."""
    names = [path.name for path in directory.glob("*") if path.is_dir()]
    return [int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)]


def seal(folder: Path) -> None:
    """Write down the checksums of all files of a checkpoint, beside them."""
    (folder / _CHECKSUMS).write_text(json.dumps(dict(_checksums(folder))))


def note(folder: Path, held_out_loss: float) -> None:
    """The held-out loss of a checkpoint that was sealed before it was measured."""
    # Of the other files what was sealed: they may have been damaged since.
    sealed, metrics = json.loads((folder / _CHECKSUMS).read_text()), _metrics(folder)
    name = metrics.relative_to(folder).as_posix()
    others = {file: digest for file, digest in sealed.items() if file != name}
    replace(folder / _CHECKSUMS, json.dumps(others))
    metrics.parent.mkdir(exist_ok=True)
    replace(metrics, json.dumps({LOSS: held_out_loss}))
    replace(folder / _CHECKSUMS, json.dumps({**sealed, name: _checksum(metrics)}))


def has_lost_files(folder: Path) -> bool:
    """Whether a checkpoint that was whole has lost files."""
    try:
        return not all((folder / name).is_file() for name in json.loads((folder / _CHECKSUMS).read_text()))
    except (OSError, ValueError):
        return True


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
        elif steps_in(directory):
            found = none_whole
    step = broadcast_from_first(found)
    if step == none_whole:
        raise InputError(f"no checkpoint in {directory} is whole; put back one that is, or choose another --out")
    return None if step == nothing else step


def newest_whole(directory: Path, say: Callable[[str], None]) -> int | None:
    """The newest step whose files all match their checksums, or None. Damaged ones are reported through `say`."""
    for step in sorted(steps_in(directory), reverse=True):
        damage = damage_of(directory / str(step))
        if damage is None:
            return step
        say(f"checkpoint {step} is damaged ({damage}); looking for one before it")
    return None


def best_whole(directory: Path, say: Callable[[str], None]) -> int | None:
    """The whole step with the lowest held-out loss, or the newest where none was evaluated."""
    known = {step: held_out_loss(directory, step) for step in steps_in(directory)}
    losses = {step: loss for step, loss in known.items() if loss is not None and not math.isnan(loss)}
    for step in sorted(losses, key=losses.__getitem__):
        damage = damage_of(directory / str(step))
        if damage is None:
            return step
        say(f"checkpoint {step} is damaged ({damage}); trying the next best")
    return newest_whole(directory, say)


def held_out_loss(directory: Path, step: int) -> float | None:
    """The held-out loss of a checkpoint, in nats per token; None where it was not measured."""
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


def _loss_is_lost(folder: Path) -> bool:
    return _metrics(folder).exists() and _loss(folder) is None


def _metrics(folder: Path) -> Path:
    """Where Orbax keeps what a checkpoint is compared by."""
    return folder / "metrics" / "metrics"


def _set_aside_damaged(directory: Path, newest: int, say: Callable[[str], None]) -> None:
    """Move checkpoints newer than the newest whole one to `damaged/`, so that their steps can be written again, and
    those whose loss Orbax, which compares all of them, could not read."""
    for step in steps_in(directory):
        if step > newest or _loss_is_lost(directory / str(step)):
            if step < newest:
                say(f"checkpoint {step} is damaged (its loss cannot be read); it is set aside")
            aside = directory / "damaged" / str(step)
            while aside.exists():
                aside = aside.with_name(aside.name + "+")
            aside.parent.mkdir(exist_ok=True)
            (directory / str(step)).rename(aside)


def damage_of(folder: Path) -> str | None:
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


def _checksums(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (_CHECKSUMS, _STAMPED):
            yield path.relative_to(folder).as_posix(), _checksum(path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
