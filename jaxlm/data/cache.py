"""Folders that are either whole or not there."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
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
def building(directory: Path) -> Iterator[Path]:
    """A folder to fill that becomes `directory` when the block ends, and vanishes when it fails.

    Where another process was first, its folder stays.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    folder = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
        try:
            os.rename(folder, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
