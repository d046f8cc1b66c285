"""Atomic writes of files and folders, locks that end with their process, and checks for writable folders."""

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def default_cache() -> str:
    """Return the folder of rebuildable files, `~` not expanded: `$XDG_CACHE_HOME/jaxlm`, or `~/.cache/jaxlm`."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxlm")


def unwritable(folder: Path) -> str | None:
    """Return why a folder (or its nearest existing parent) is not writable; None if it is."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        tempfile.TemporaryFile(dir=there).close()  # permission bits do not bind root
    except OSError as error:
        return error.strerror
    return None


def digest(files: Iterable[Path]) -> str:
    """Return a digest of the content of files, in this order; several are read at once."""

    def one(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()

    with ThreadPoolExecutor() as pool:
        return hashlib.blake2b("".join(pool.map(one, files)).encode(), digest_size=32).hexdigest()


def replace(path: Path, text: str) -> None:
    """Replace the content of a file by a text in UTF-8, atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write. It replaces `path` when the block succeeds, and is removed when it fails."""
    partial = _temporary(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """Yield a folder to write. It is renamed to `directory` when the block succeeds, and removed when it fails.

    If another process created `directory` first, its folder is kept.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = _temporary(directory)
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            fsync(path)  # or a power failure may leave empty files under the new name
        try:
            os.rename(partial, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _temporary(path: Path) -> Path:
    """Return a unique temporary name in the same folder, since several processes may write the same path."""
    return path.with_name(f".{path.name}-{uuid.uuid4().hex}")


def leftovers(folder: Path, name: str = "*") -> Iterator[Path]:
    """Return the temporary files that `replacing` or `building` have for this name in a folder.

    Their process was killed, or is still running.
    """
    return folder.glob(f".{name}-{'[0-9a-f]' * 32}")


def fsync(path: Path) -> None:
    """Flush a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without fsync
            raise
    finally:
        os.close(descriptor)


def lock(file: TextIO, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends. Return whether the file system supports locks.

    Raise BlockingIOError if another process holds the lock, unless `wait`.
    """
    # Not filelock's: FileLock is exclusive only, so that processes of one job that ask together refuse each other;
    # ReadWriteLock is an SQLite database, which is unsafe on NFS; SoftReadWriteLock outlasts a process that is killed.
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[bool]:
    """Run a block in one process at a time. Yield whether the file system supports locks; without, nothing is locked.

    Call `wait` before waiting for another process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            alone = lock(file)
        except BlockingIOError:
            wait()
            alone = lock(file, wait=True)
        yield alone
