"""Files and folders that are whole or not there, locks that end with their process, folders that take no files."""

import errno
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def unwritable(folder: Path) -> str | None:
    """Why a folder, or the nearest above it where it is not there yet, takes no files; None where it does."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        tempfile.TemporaryFile(dir=there).close()  # permissions alone do not tell for root
    except OSError as error:
        return error.strerror
    return None


def replace(path: Path, text: str) -> None:
    """Put a text, in UTF-8, in the place of a file, at once."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` when the block ends, and vanishes when it fails."""
    partial = _beside(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """A folder to fill that becomes `directory` when the block ends, and vanishes when it fails.

    Where another process was first, its folder stays.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(directory)
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            to_disk(path)  # or a power failure may leave the new name to empty files
        try:
            os.rename(partial, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _beside(path: Path) -> Path:
    """Of no other process: several may write the same."""
    return path.with_name(f".{path.name}-{uuid.uuid4().hex}")


def leftovers(folder: Path, name: str = "*") -> Iterator[Path]:
    """What `replacing` or `building` left in a folder, of what is to have this name, where their process was killed, or
    is still at work."""
    return folder.glob(f".{name}-{'[0-9a-f]' * 32}")


def to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def lock(file: TextIO, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed, at the latest by the end of the process; whether the file system has locks.

    Raises BlockingIOError where another process has it, unless this one is to `wait`.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[bool]:
    """A block of one process at a time, where the file system has locks; whether it has. Calls `wait` before it waits
    for another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            alone = lock(file)
        except BlockingIOError:
            wait()
            alone = lock(file, wait=True)
        yield alone
