"""Folders that are either whole or not there."""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxlm.errors import InputError


@contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Raises InputError where the block cannot write to this folder of the cache."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data.cache: {folder} cannot be written ({error.strerror or error}); set it to a folder that can"
        ) from error


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raises InputError where the block cannot load what lies in this folder of the cache."""
    try:
        yield
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise InputError(f"data.cache: {folder} is damaged ({error}); remove it, and it is made anew") from error


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """A folder to fill that becomes `directory` when the block ends, and vanishes when it fails.

    Where another process was first, its folder stays.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    folder = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
        for path in (*folder.rglob("*"), folder):
            to_disk(path)  # or a power failure may leave the new name to empty files
        try:
            os.rename(folder, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


@contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[bool]:
    """One process at a time, where the file system has locks; whether it has. Calls `wait` before it waits for another.
    The lock goes with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
