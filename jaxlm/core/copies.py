"""Copies of what is in buckets, and of what is to be there.

`pull` makes the copy of an address, at its place (`jaxlm.core.addresses`), equal to what its bucket holds, and `push`
the other way round; for any other path both do nothing. An object appears in a bucket when all of its bytes are there,
so a file is replaced atomically. A folder is not: what completes it is written last, and readers go by that.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from jaxlm.core import buckets
from jaxlm.core.addresses import address, root
from jaxlm.core.buckets import Object, Unreachable
from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.files import locked, replace, replacing

LOCK = "lock"  # the file that a process locks while it works in a folder: what is there is newer than the bucket
_COMPLETES = ("config.json", "config.toml", "checksums.json")  # the files that complete a folder, and come last
_TEMPORARY = re.compile(r"\..*-[0-9a-f]{32}")  # files of `files.replacing`
_WEIGHTS = re.compile(r"(?:.*/)?(?!adapter_model\.)[^/]*\.(safetensors|gguf|bin|pt|pth|msgpack|h5|onnx)")
_LEASE = "lease.json"
_LEASE_S = 180.0  # after its last sign of life a job is taken for dead
_SIGN_OF_LIFE_S = 20.0
_COPYING_S = 3600.0  # a part of a file that nobody wrote to for so long is left over
_AT_ONCE = 8  # files that are moved
_BLOCK_BYTES = 2**23


_uploading: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by address


class _Tag(NamedTuple):
    """The state of a copy when it was moved: the tag of the object, and its own size (bytes) and time (ns)."""

    tag: str
    size: int
    time: int

    @staticmethod
    def file(path: Path) -> Path:
        return root() / "tags" / path.relative_to(root())

    @staticmethod
    def read(path: Path) -> "_Tag | None":
        try:
            return _Tag(*json.loads(_Tag.file(path).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def write(path: Path, tag: str, status: os.stat_result) -> None:
        file = _Tag.file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, json.dumps(_Tag(tag, status.st_size, status.st_mtime_ns)))

    def is_of(self, path: Path) -> bool:
        """Return whether a copy is as it was then."""
        try:
            status = path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.time)


def is_weights(name: str) -> bool:
    """Return whether a file has a name of a format of weights, which are large, other than those of adapters."""
    return _WEIGHTS.fullmatch(name) is not None


def without_weights(names: Collection[str]) -> dict[str, bool]:
    """Return the names of files, each with whether it holds no weights, for `pull`."""
    return {name: not is_weights(name) for name in names}


def _all(names: Collection[str]) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def pull(path: Path, contents: Callable[[Collection[str]], Mapping[str, bool]] = _all) -> None:
    """Make the copy of a file or folder equal to what its bucket holds; do nothing for another path, and where a
    process of this machine works in the folder: what it has is newer.

    Args:
      contents: of the names of files in the folder, returns those that count, and whether each is copied now; one that
        does not is left for another call.

    Raises InputError where the bucket refuses, and Unreachable.
    """
    if (url := address(path)) is None or _is_at_work(path):
        return
    with locked(root() / "locks" / f"{_name(path)}.pull", lambda: None):
        _pull(path, url, contents)


def _pull(path: Path, url: str, contents: Callable[[Collection[str]], Mapping[str, bool]]) -> None:
    objects = buckets.find(url)
    if url in objects:
        fetch(path, objects[url])
        return
    at_work = [lock.parent for lock in path.rglob(LOCK) if _is_at_work(lock.parent)]
    names = {name.removeprefix(f"{url}/") for name in objects}
    counted = contents({name for name in names if name.rpartition("/")[2] != _LEASE})
    counted = {name: now for name, now in counted.items() if not _is_below(path / name, at_work)}
    for file in _files(path):
        name = file.relative_to(path).as_posix()
        if name not in counted and not _is_needed(file) and not _is_below(file, at_work):
            file.unlink(missing_ok=True)
    for folder in sorted((folder for folder in (path, *path.rglob("*")) if folder.is_dir()), reverse=True):
        with suppress(OSError):  # it is not empty
            folder.rmdir()

    def fetch_unless_gone(name: str) -> None:
        with suppress(FileNotFoundError):  # removed since it was listed
            fetch(path / name, objects[f"{url}/{name}"])

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(fetch_unless_gone, filter(counted.get, counted)))


def pull_missing(folder: Path) -> None:
    """Copy the files of a folder whose copies are not there or older, and leave those that were changed here. Raises
    InputError and Unreachable."""
    if (url := address(folder)) is None:
        return
    objects = {folder / name.removeprefix(f"{url}/"): each for name, each in buckets.find(url).items()}
    missing = [file for file in objects if not file.exists() or ((tag := _Tag.read(file)) and tag.is_of(file))]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda file: fetch(file, objects[file]), missing))


def fetch(file: Path, there: Object) -> None:
    """Copy one file from its bucket unless its copy is of this content. Raises InputError and Unreachable."""
    tag, url = _Tag.read(file), address(file)
    if url is None or (tag is not None and tag.tag == there.tag and tag.is_of(file)):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial:
        with buckets.open_binary(url) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, _BLOCK_BYTES)
        if there.changed:
            os.utime(partial, (there.changed, there.changed))
        status = partial.stat()
    _Tag.write(file, there.tag, status)


def push(path: Path, to: Path | None = None, leave_out: Callable[[str], bool] = lambda name: False) -> None:
    """Upload what changed in the copy of a file or folder, the files that complete a folder last.

    Do nothing for another path.

    Args:
      to: the place that the files are for, where they do not lie there yet.
      leave_out: of the name of a file in the folder, returns whether it stays as it is, here and there.

    Raises InputError where the bucket refuses, and Unreachable.
    """
    to = to or path
    if address(to) is None:
        return
    if path.is_file():
        _upload(path, to)
        return
    files = {file.relative_to(path).as_posix(): file for file in _files(path) if not _TEMPORARY.fullmatch(file.name)}
    kept = {name: file for name, file in files.items() if not leave_out(name)}
    completing = [name for name in kept if name.rpartition("/")[2] in _COMPLETES]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda name: _upload(kept[name], to / name), (name for name in kept if name not in completing)))
    for name in sorted(completing, key=lambda name: _COMPLETES.index(name.rpartition("/")[2])):
        _upload(kept[name], to / name)


def _upload(file: Path, to: Path) -> None:
    """Upload a file unless its object has this content."""
    url = address(to)
    assert url is not None
    with _uploading[url]:  # or older content may come after newer
        tag = _Tag.read(to)
        try:
            before = file.stat()
            if tag is not None and tag.is_of(file):
                return
            there = buckets.upload(file, url)
            after = file.stat()
        except FileNotFoundError:
            if not file.exists():  # removed since it was listed
                return
            raise InputError(f"{url} cannot be written: there is no such bucket") from None
        if (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
            if there.size != after.st_size:
                raise Unreachable(f"{url} has {there.size:,} of {after.st_size:,} bytes; try again")
            _Tag.write(to, there.tag, after)


def delete(path: Path) -> None:
    """Remove a file or folder from its bucket, the files that complete it first; the copy stays. Do nothing for another
    path. Raises InputError and Unreachable."""
    if (url := address(path)) is None:
        return
    for name in sorted(buckets.find(url), key=lambda name: name.rpartition("/")[2] not in _COMPLETES):
        buckets.remove(name)
    tags = _Tag.file(path)
    shutil.rmtree(tags) if tags.is_dir() else tags.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder, and no links."""
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink()]


def _name(path: Path) -> str:
    return path.relative_to(root()).as_posix().replace("/", "%")[-200:]


def _is_needed(file: Path) -> bool:
    """Return whether a file that is in no bucket may belong to a process of this machine: a lock, or a part of a file
    that another process copies."""
    try:
        is_new = time.time() - file.stat().st_ctime < _COPYING_S
    except OSError:
        return False
    return file.name == LOCK or (is_new and _TEMPORARY.fullmatch(file.name) is not None)


def _is_below(file: Path, folders: Collection[Path]) -> bool:
    return any(folder in file.parents for folder in folders)


def _is_at_work(path: Path) -> bool:
    """Return whether a process of this machine, maybe this one, works in a folder that holds the path."""
    for folder in (path, *path.parents):
        if folder == root():
            break
        try:
            with (folder / LOCK).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            continue
    return False


class Taken(RunFailed):
    """A folder that a job on another machine has."""


def check_free(folder: Path) -> None:
    """Raise Taken where a job on another machine has a folder of a bucket."""
    if (url := address(folder)) is None or (there := buckets.status(f"{url}/{_LEASE}")) is None:
        return
    age = time.time() - there.changed
    try:
        with buckets.open_binary(f"{url}/{_LEASE}") as file:
            owner = json.loads(file.read())["owner"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if owner != _owner() and age < _LEASE_S:
        host = owner.partition(":")[0]
        raise Taken(
            f"another jaxlm train is at work in {url}, on {host}: its last sign of life is {age:.0f} s old; wait for "
            f"its end ({_LEASE_S:.0f} s after that sign it is taken for dead), or choose another --out"
        )


def _owner() -> str:
    """Return the name of this machine and of its copies, in which a lock tells jobs of one machine apart."""
    return f"{socket.gethostname()}:{root()}"


@contextmanager
def kept_up(folder: Path, leave_out: Callable[[str], bool], say: Callable[[str], None]) -> Iterator[None]:
    """Upload what changes in a folder every 20 seconds of a block, and at its end, with a lease that says that a job is
    at work there. Do nothing for a folder of no bucket.

    Raises Taken where another machine has the folder; at the end InputError and Unreachable.
    """
    if (url := address(folder)) is None:
        yield
        return
    check_free(folder)
    ended, lease = threading.Event(), f"{url}/{_LEASE}"
    content = json.dumps({"owner": _owner(), "process": os.getpid()}).encode()

    def sign() -> None:
        buckets.write(lease, content)

    def keep_up() -> None:
        while not ended.wait(_SIGN_OF_LIFE_S):
            try:
                sign()
                push(folder, leave_out=leave_out)
            except (InputError, Unreachable, OSError) as error:  # the next checkpoint, or the end, fails if this lasts
                say(str(error))

    try:
        sign()
    except FileNotFoundError:
        raise InputError(f"{url} cannot be written: there is no such bucket") from None
    thread = threading.Thread(target=keep_up, daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()
        push(folder, leave_out=leave_out)
        buckets.remove(lease)

    try:
        yield
    except BaseException:
        with suppress(InputError, Unreachable, OSError):  # the error that ends the block says more
            end()
        raise
    end()
