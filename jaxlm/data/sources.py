"""Which files a configuration means."""

import glob
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.data import huggingface
from jaxlm.data.config import HUGGING_FACE, STANDARD_LIBRARY, DataConfig, expanded
from jaxlm.data.formats import SUFFIXES

_KINDS = ", ".join(SUFFIXES)
# In the standard library's folder, but not its sources: installed packages, build outputs, and the tests,
# which are larger than everything else together.
_NOT_STANDARD_LIBRARY = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload", "ensurepip",
}  # fmt: skip


class Changed(InputError):
    """Text that is no longer what it was."""


class Source(NamedTuple):
    """One text: its name, the key that configures it, its files, each with its size and time (ns) when it was found,
    the field of their records that holds the text, how many documents to take if not all, and its share of the rows of
    a batch."""

    name: str
    key: str
    files: dict[Path, tuple[int, int]]
    field: str
    documents: int | None
    weight: float

    def described(self) -> dict[str, Any]:
        """What changes whenever its documents may have; JSON."""
        files = [(str(path), *stamp) for path, stamp in self.files.items()]
        return {"field": self.field, "documents": self.documents, "files": files}

    def check(self) -> None:
        """Raises Changed where a file is no longer the one that was found: what was read of it must not be kept
        under its name."""
        changed = next((path for path, stamp in self.files.items() if _stamp(path) != stamp), None)
        if changed is not None:
            raise Changed(f"{self.key}: {changed} changed while it was read; start again")


def find_sources(data: DataConfig, say: Callable[[str], None]) -> list[Source]:
    """The sources of a configuration. What lies at Hugging Face is fetched into the cache first.

    Raises InputError for an entry that names nothing, or nothing that is text.
    """
    cache = expanded(data.cache, "data.cache")
    found = []
    for key, source in data.described().items():
        files: dict[Path, None] = {}
        passed_over: dict[Path, str] = {}
        for entry in source.text:
            if entry.startswith(HUGGING_FACE):
                fetched = huggingface.fetch(entry, source.field, source.documents, cache, key, say)
                files.update(dict.fromkeys(fetched))
            else:
                found_here, folders = _find(entry, key)
                files.update(dict.fromkeys(found_here))
                passed_over.update(dict.fromkeys(folders, entry))
        for folder, entry in passed_over.items():
            if not any(folder in file.parents for file in files):
                say(f"{key}: {entry} also matches the folder {folder}, which is not read; give it too to read it")
                break
        name = key.split(".")[-2]
        stamped = {path: _stamp(path) for path in _without_doubles(files)}
        found.append(Source(name, key, stamped, source.field, source.documents, source.weight))
    return found


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of a file, or -1 of one that cannot be looked at: reading it will say so."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _without_doubles(files: Iterable[Path]) -> Iterable[Path]:
    """Files by the first name they have here: a link may lack the suffix of what it leads to, or the other way."""
    seen: dict[str, Path] = {}
    for path in files:
        seen.setdefault(os.path.realpath(path), Path(os.path.abspath(path)))
    return seen.values()


def _find(entry: str, key: str) -> tuple[list[Path], list[Path]]:
    """The files that an entry means, in an order that does not depend on the file system, and the folders that a glob
    matches beside them."""
    if entry == STANDARD_LIBRARY:
        return _standard_library(), []
    try:
        path = Path(entry).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a user who is not, a null byte
        raise InputError(f"{key}: {entry} is no name of {_KINDS} files ({error})") from None
    if is_file:
        if not _is_text(path, key):
            raise InputError(f"{key}: {entry} is not text; give {_KINDS} files")
        return [path], []
    if is_dir:
        files = sorted(p for p in _under(path, key) if _is_text(p, key))
        if not files:
            raise InputError(f"{key}: no {_KINDS} files under {entry}")
        return files, []
    matched = sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = [p for p in matched if _is_text(p, key)]
    if not files:
        raise InputError(f"{key}: {entry} is no file, directory or glob of {_KINDS} files here")
    return files, [] if "**" in entry else [p for p in matched if os.path.isdir(p)]


def _under(directory: Path, key: str) -> Iterator[Path]:
    """The files of a folder and of all below it, behind links too; each folder once, by the first name that leads
    there, so that links to a folder above end."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"{key}: the folder {error.filename} cannot be read ({error.strerror}); give what lies beside it"
        ) from None

    entered: set[str] = set()
    for folder, below, names in os.walk(directory, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(folder)) in entered:
            below.clear()
            continue
        entered.add(real)
        below.sort()
        yield from (Path(folder, name) for name in names)


def _is_text(path: Path, key: str) -> bool:
    """Whether it is such a file, or a link that leads to none: reading that will say so."""
    if not path.name.endswith(SUFFIXES):
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except PermissionError as error:
        raise InputError(f"{key}: {path} cannot be looked at ({error.strerror})") from None
    except OSError:
        return path.is_symlink()


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    files = (p for p in root.rglob("*.py") if not _NOT_STANDARD_LIBRARY.intersection(p.relative_to(root).parts))
    return sorted(files)
