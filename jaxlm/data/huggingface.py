"""Hugging Face datasets, streamed once into files of JSON lines."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.core.extras import install
from jaxlm.core.files import fsync, replacing
from jaxlm.data.cache import writing
from jaxlm.data.config import HUGGING_FACE
from jaxlm.data.formats import named

_ROWS_PER_FILE = 10_000
_NAME = re.compile(re.escape(HUGGING_FACE) + r"(?P<path>[^:@]+)(:(?P<name>[^:@]+))?(@(?P<split>[^:@]+))?")


def fetch(
    entry: str, field: str, documents: int | None, cache: Path, key: str, say: Callable[[str], None]
) -> list[Path]:
    """Return files with `field` of the first `documents` rows of a dataset, "hf:OWNER/NAME:CONFIG@SPLIT".

    Files that are complete, also those of an interrupted earlier call, are not fetched again. Raise InputError, naming
    `key`, if the dataset cannot be read.
    """
    address = _NAME.fullmatch(entry)
    if address is None:
        raise InputError(
            f"{key}: {entry} is not a dataset; write hf:OWNER/NAME, followed by :CONFIG and @SPLIT as needed"
        )
    if documents is None:
        raise InputError(
            f"{key}: {entry} may be endless; set {key.removesuffix('text')}documents to the number to take"
        )
    described = json.dumps([entry, field, documents, _ROWS_PER_FILE])
    directory = cache / "huggingface" / hashlib.sha256(described.encode()).hexdigest()[:20]
    files = sorted(directory.glob("*.jsonl.zst"))
    if (directory / "complete").exists():
        return files
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        rows = _rows(address, field, len(files) * _ROWS_PER_FILE, documents, key, entry)
        for number in count(len(files)):
            written = _write(directory / f"{number:06d}.jsonl.zst", islice(rows, _ROWS_PER_FILE))
            say(f"{entry}: {number * _ROWS_PER_FILE + written:,} of {documents:,} documents fetched")
            if written < _ROWS_PER_FILE:
                break
        (directory / "complete").touch()
    return sorted(directory.glob("*.jsonl.zst"))


def _rows(address: re.Match, field: str, first: int, end: int, key: str, entry: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise InputError(f"{key}: {entry} needs the package datasets: {install('hf')}") from None
    try:
        stream = datasets.load_dataset(
            address["path"], address["name"], split=address["split"] or "train", streaming=True
        )
        for row in stream.skip(first).take(max(end - first, 0)):
            if field not in row:
                raise InputError(f'{key}: {entry} has no field "{field}", but {named(row)}')
            yield {field: row[field] if isinstance(row[field], str) else None}  # null is counted as broken when read
    except InputError:
        raise
    except Exception as error:  # the library raises all kinds, for network, dataset and configuration
        raise InputError(f"{key}: {entry} cannot be read ({error}); files fetched so far are kept") from error


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Write rows as JSON lines to a file, atomically. Return their number."""
    import zstandard

    written = 0
    with replacing(path) as partial:
        with partial.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
            for row in rows:
                packed.write(json.dumps(row).encode() + b"\n")
                written += 1
        fsync(partial)
    return written
