"""The files of the configured text sources."""

import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core import buckets
from jaxlm.core.addresses import address, is_address, place, with_addresses
from jaxlm.core.errors import InputError
from jaxlm.data import huggingface
from jaxlm.data.config import HUGGING_FACE, STANDARD_LIBRARY, DataConfig, SourceConfig, expanded
from jaxlm.data.conversations import RecordKind
from jaxlm.data.formats import RECORDS, SUFFIXES

# Excluded from the standard library's folder: installed packages, build outputs, and the tests, which are larger than
# all the rest.
_NOT_STANDARD_LIBRARY = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload", "ensurepip",
}  # fmt: skip


_NAMED = 5  # files that are not read, in a message
# The share that is held out by default, between the least and the most bytes, and its largest value.
_SHARE, _LEAST_BYTES, _MOST_BYTES, _LARGEST_SHARE = 0.01, 1_000_000, 50_000_000, 0.1
_DOCUMENT_BYTES = 4_000  # of an average document, where only some are taken


class Changed(InputError):
    """Text changed after it was found."""


class Source(NamedTuple):
    """A text source.

    `key`: its configuration key. `files`: each with its size (bytes) and modification time (ns) when found; in
    a bucket, a number of its content for the time. `field`:
    the record field that holds the text, or the kind of records that are read whole. `documents`: the number to
    take (None: all). `weight`: its fraction of the rows of a batch. `held_out`: the fraction of its documents that is
    held out, and `held_out_is_given` where the configuration gives it. `validation`: a source that is held out in its
    place. `remarks`: lines about what is beside the files and is not read.
    """

    name: str
    key: str
    files: dict[Path, tuple[int, int]]
    field: str | RecordKind
    documents: int | None
    weight: float
    held_out: float
    validation: "Source | None" = None
    held_out_is_given: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def described_share(self) -> str:
        """The key and the value of what is held out, for a message."""
        if self.held_out_is_given:
            return f"data.held_out = {self.held_out}"
        return f"the default of data.held_out, {self.held_out:.2g},"

    def described(self) -> dict[str, Any]:
        """Return a JSON value that changes whenever the documents may have changed."""
        files = [(with_addresses(path), *stamp) for path, stamp in self.files.items()]
        field = {"kind": self.field.value} if isinstance(self.field, RecordKind) else {"field": self.field}
        return {**field, "documents": self.documents, "files": files}

    def check(self) -> None:
        """Raise Changed if a file is no longer the one that was found. Results from it must not be cached."""
        stamps = _stamps(self.files)
        changed = next((path for path, stamp in self.files.items() if stamps[path] != stamp), None)
        if changed is not None:
            raise Changed(f"{self.key}: {changed} changed while it was read; restart")


def find_sources(data: DataConfig, say: Callable[[str], None]) -> list[Source]:
    """Return the sources of a configuration. Hugging Face datasets are fetched into the cache first.

    Raise InputError for an entry that matches nothing, or no text.
    """
    sources = []
    for key, source in data.described().items():
        name, records = key.split(".")[-2], None if source.kind == "text" else RecordKind(source.kind)
        field, suffixes = (source.field, SUFFIXES) if records is None else (records, RECORDS)

        remarks: list[str] = []

        def files(
            entries: Iterable[str], key: str, source=source, suffixes=suffixes, remarks=remarks
        ) -> dict[Path, tuple[int, int]]:
            return _files(entries, key, source, suffixes, data, say, remarks.append)

        validation = None
        if source.validation is not None:
            key_of_validation = f"{key.rpartition('.')[0]}.validation"
            held_out = files(source.validation, key_of_validation)
            validation = Source(name, key_of_validation, held_out, field, None, source.weight, 1.0)
        stamped = files(source.entries, key)
        of_its_own = 0.0 if validation else _held_out(data, source, stamped)
        sources.append(
            Source(
                *(name, key, stamped, field, source.documents, source.weight, of_its_own, validation),
                held_out_is_given=data.held_out is not None,
                remarks=tuple(remarks),
            )
        )
    return sources


def _held_out(data: DataConfig, source: SourceConfig, files: Mapping[Path, tuple[int, int]]) -> float:
    """Return the fraction of a source's documents that is held out: as configured, or by the size of its files."""
    if data.held_out is not None:
        return data.held_out
    size = sum(max(size, 0) for size, _ in files.values())
    if source.documents is not None:
        size = min(size, source.documents * _DOCUMENT_BYTES)
    return min(_LARGEST_SHARE, min(max(_SHARE * size, _LEAST_BYTES), _MOST_BYTES) / max(size, 1))


def _files(
    entries: Iterable[str],
    key: str,
    source: SourceConfig,
    suffixes: tuple[str, ...],
    data: DataConfig,
    say: Callable[[str], None],
    remark: Callable[[str], None],
) -> dict[Path, tuple[int, int]]:
    """Return the files of entries, with their stamps. `remark` takes a line about what is not read."""
    files: dict[Path, None] = {}
    passed_over: dict[Path, str] = {}
    unread: dict[Path, None] = {}
    for entry in entries:
        if entry.startswith(HUGGING_FACE) and not is_address(entry):
            if source.kind != "text":
                raise InputError(f"{key}: {entry}: conversations are read from files; give {', '.join(suffixes)}")
            cache = expanded(data.cache, "data.cache")
            fetched = huggingface.fetch(entry, source.field, source.documents, cache, key, say)
            files.update(dict.fromkeys(fetched))
        else:
            found_here, others = _find(entry, key, source.if_missing, suffixes)
            files.update(dict.fromkeys(found_here))
            for path in others:
                if os.path.isdir(path):
                    passed_over[path] = entry
                else:
                    unread[path] = None
    if unread:
        remark(
            f"{key}: {_counted_files(unread)} not read: {_some_names(unread)}; what is read is {', '.join(suffixes)}"
        )
    for folder, entry in passed_over.items():
        if not any(folder in file.parents for file in files):
            remark(f"{key}: {entry} also matches the folder {folder}, which is not read; add it to read it")
            break
    return _stamps(_distinct(files))


def _counted_files(files: Collection[Path]) -> str:
    return "1 file is" if len(files) == 1 else f"{len(files):,} files are"


def _some_names(files: Collection[Path]) -> str:
    """Return the names of the first files, one of each suffix before others."""
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(file.suffix, file)
    named = list(dict.fromkeys([*first.values(), *files]))[:_NAMED]
    more = f" and {len(files) - len(named):,} more" if len(files) > len(named) else ""
    return ", ".join(file.name for file in named) + more


def _stamps(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return size and modification time of files, or of those in a bucket size and a number of their content; -1, -1 if
    unavailable (reading reports why)."""
    files = list(files)
    there = buckets.statuses(url for path in files if (url := address(path)) is not None)

    def stamp(path: Path) -> tuple[int, int]:
        try:
            if (url := address(path)) is None:
                status = path.stat()
                return status.st_size, status.st_mtime_ns
        except OSError:
            return -1, -1
        found = there[url]
        return (-1, -1) if found is None else (found.size, int(hashlib.sha256(found.tag.encode()).hexdigest()[:15], 16))

    return {path: stamp(path) for path in files}


def _distinct(files: Iterable[Path]) -> Iterable[Path]:
    """Return each file once, under its first name. A link and its target may differ in suffix."""
    seen: dict[str, Path] = {}
    for path in files:
        seen.setdefault(os.path.realpath(path), Path(os.path.abspath(path)))
    return seen.values()


def _find(entry: str, key: str, if_missing: str | None, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """Return the files of an entry, in an order independent of the file system, and what it has besides: files that are
    not read, and the folders that a glob matches."""
    kinds = ", ".join(suffixes)
    if entry == STANDARD_LIBRARY:
        return _standard_library(), []
    if is_address(entry):
        return _in_bucket(entry, key, suffixes), []
    try:
        path = Path(entry).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
        folder = next((parent for parent in path.parents if parent.is_dir()), path)
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown user, or a null byte
        raise InputError(f"{key}: {entry} does not name {kinds} files ({error})") from None
    if is_file:
        if not _is_text(path, key, suffixes):
            raise InputError(f"{key}: {entry} is not one of {kinds}; give such files")
        return [path], []
    if is_dir:
        under = sorted(_under(path, key))
        files = [p for p in under if _is_text(p, key, suffixes)]
        others = [p for p in under if _is_other_file(p, suffixes) and not _is_hidden(p.relative_to(path))]
        if not files:
            there = f"; {_counted_files(others)} there: {_some_names(others)}" if others else ""
            raise InputError(f"{key}: no {kinds} files under {entry}{there}")
        return files, others
    # A folder that is there is no pattern, whatever its name.
    pattern = os.path.join(glob.escape(str(folder)), path.relative_to(folder))
    matched = sorted(map(Path, glob.glob(pattern, recursive=True)))
    files = [p for p in matched if _is_text(p, key, suffixes)]
    if not files:
        remedy = f"; {if_missing}" if if_missing else ""
        raise InputError(f"{key}: {entry} is not a file, directory or glob of {kinds} files here{remedy}")
    others = [p for p in matched if _is_other_file(p, suffixes)]
    return files, others if "**" in entry else [*others, *(p for p in matched if os.path.isdir(p))]


def _in_bucket(entry: str, key: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the places of the files at an address, below it, or that match it as a glob."""
    if glob.has_magic(entry):
        files = buckets.matching(entry)
    else:
        files = list(buckets.find(entry.rstrip("/")))
    texts = [place(file) for file in files if file.endswith(suffixes)]
    if not texts:
        kinds = ", ".join(suffixes)
        raise InputError(f"{key}: {entry} is not a file, folder or glob of {kinds} files in a bucket; give one")
    return texts


def _under(directory: Path, key: str) -> Iterator[Path]:
    """Yield the files of a folder, recursively and through links.

    Each folder is visited once, under its first name, so that links to a parent folder end.
    """

    def refuse(error: OSError) -> None:
        raise InputError(
            f"{key}: the folder {error.filename} cannot be read ({error.strerror}); give the readable ones instead"
        ) from None

    entered: set[str] = set()
    for folder, below, names in os.walk(directory, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(folder)) in entered:
            below.clear()
            continue
        entered.add(real)
        below.sort()
        yield from (Path(folder, name) for name in names)


def _is_text(path: Path, key: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether a path is a text file, or a broken link to one (reading reports that)."""
    if not path.name.endswith(suffixes):
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except PermissionError as error:
        raise InputError(f"{key}: {path} cannot be accessed ({error.strerror})") from None
    except OSError:
        return path.is_symlink()


def _is_other_file(path: Path, suffixes: tuple[str, ...]) -> bool:
    return not path.name.endswith(suffixes) and os.path.isfile(path)


def _is_hidden(path: Path) -> bool:
    """Return whether a name in a path begins with a dot, as of tools' own files and folders."""
    return any(part.startswith(".") for part in path.parts)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    files = (p for p in root.rglob("*.py") if not _NOT_STANDARD_LIBRARY.intersection(p.relative_to(root).parts))
    return sorted(files)
