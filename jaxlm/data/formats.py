"""File formats, and the division of files into chunks of about equal size."""

import io
import json
import re
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from jaxlm.core import buckets
from jaxlm.core.addresses import with_addresses
from jaxlm.data.conversations import NotAConversation, RecordKind

if TYPE_CHECKING:
    import pyarrow.parquet

CHUNK_BYTES = 2**24
_WHOLE = (".txt", ".md", ".py")
_COMPRESSED = (".jsonl.gz", ".jsonl.zst")
RECORDS = (".jsonl", *_COMPRESSED, ".parquet")
SUFFIXES = (*_WHOLE, *RECORDS)
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]')  # or a string, whose brackets are text
_JSON = json.JSONDecoder(parse_int=float)  # a float may have any number of digits, and no number is text
_SOUGHT = "is the record that is sought"
_READ_BYTES = 2**16
_COMPRESSED_READ_BYTES = 2**12  # small, to lose little of a corrupt file before the corrupt bytes


class Slice(NamedTuple):
    """A range of documents of a file.

    `path`: or an address, of which the file is read as a stream. JSON lines: lines that start in bytes [start, end).
    Parquet: row groups [start, end). Other formats: the whole file.
    `size`: bytes of the file. `documents`: their number, if known before reading.
    """

    path: str
    start: int
    end: int
    size: int
    documents: int | None = None


class FileChunk(NamedTuple):
    """A unit of work: file slices, the field that holds the text or, of another kind than text, the kind of its records
    (`conversations.RECORDS`), and the number of documents to take (None: all)."""

    slices: tuple[Slice, ...]
    field: str | RecordKind
    documents: int | None = None

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(piece.size for piece in self.slices)


class Broken(NamedTuple):
    """An unreadable document, or the unreadable rest of a file: where (FILE or FILE:LINE), and why.

    `documents`: a lower bound on the documents lost. `size`: bytes of the file whose documents cannot be counted.
    """

    where: str
    why: str
    documents: int = 1
    size: int = 0


class _Unreadable(Exception):
    """The rest of a file cannot be read; the message says why.

    `read`: the fraction of the file before it. For a truncated file the lost part is unknown, and assumed to be as
    large as the present part (0.5).
    """

    def __init__(self, why: str, read: float = 0.5):
        super().__init__(why)
        self.read = read


def cut(files: Iterable[Path], field: str | RecordKind) -> list[FileChunk]:
    """Divide files into chunks of about CHUNK_BYTES, in file order. The result depends on the files alone.

    Compressed files, documents and row groups are never divided.
    """
    groups: list[list[Slice]] = []
    filled, files = 0, list(files)
    for piece in (piece for path, size in buckets.sizes(files).items() for piece in _slices(path, size)):
        if not groups or filled + piece.size > CHUNK_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.size
    return [FileChunk(tuple(group), field) for group in groups]


def _slices(file: Path, size: int | None) -> list[Slice]:
    known, path = 1 if file.name.endswith(_WHOLE) else None, with_addresses(file)
    if size is None:  # read() reports it
        return [Slice(path, 0, 1, 0, known)]
    if file.suffix == ".jsonl":
        starts = range(0, size, CHUNK_BYTES)
        return [Slice(path, at, min(at + CHUNK_BYTES, size), min(CHUNK_BYTES, size - at)) for at in starts]
    try:
        return _row_groups(path, size) if file.suffix == ".parquet" else [Slice(path, 0, size, size, known)]
    except (OSError, _Unreadable):
        return [Slice(path, 0, 1, size, known)]


def _row_groups(path: str, size: int) -> list[Slice]:
    with _parquet(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes, rows = [group.total_byte_size for group in groups], [group.num_rows for group in groups]
    starts, filled = [0], 0
    for i, group in enumerate(sizes):
        if filled and filled + group > CHUNK_BYTES:
            starts.append(i)
            filled = 0
        filled += group
    ends = [*starts[1:], len(sizes)]
    share = size / max(sum(sizes), 1)
    return [
        Slice(path, a, b, round(share * sum(sizes[a:b])), sum(rows[a:b])) for a, b in zip(starts, ends, strict=True)
    ]


def read(chunk: FileChunk) -> Iterator[str | Broken]:
    """Yield the non-empty documents of a chunk one at a time, and what is broken, in order."""
    left = chunk.documents
    for piece in chunk.slices:
        for item in _read_slice(piece, chunk.field):
            if left == 0:
                return
            if item:
                yield item
                left = left - 1 if left is not None and isinstance(item, str) else left


def place_of(chunk: FileChunk, record: str) -> str:
    """Return where a record of a chunk stands: FILE:LINE."""
    items = (item for piece in chunk.slices for item in _read_slice(piece, chunk.field, record))
    return next(
        (item.where for item in items if isinstance(item, Broken) and item.why == _SOUGHT), chunk.slices[0].path
    )


def _read_slice(piece: Slice, field: str | RecordKind, sought: str | None = None) -> Iterator[str | Broken]:
    """Yield the documents of a slice, and what is broken; the place of the record `sought` too, as if it were."""
    count = 0
    try:
        for item in _items(piece, field, sought):
            count += 1
            yield item
    except _Unreadable as error:
        yield _rest(piece, count, error)
    except OSError as error:
        yield _rest(piece, count, _Unreadable(f"cannot be read ({error.strerror or error})"))


def _items(piece: Slice, field: str | RecordKind, sought: str | None) -> Iterator[str | Broken]:
    path = piece.path
    if path.endswith(_WHOLE):
        yield _read_whole(path)
    elif path.endswith(".parquet"):
        yield from _read_parquet(piece, field, sought)
    elif path.endswith(_COMPRESSED):
        yield from _documents(_decompressed(piece), field, path, sought)
    else:
        yield from _read_lines(piece, field, sought)


def _rest(piece: Slice, count: int, error: _Unreadable) -> Broken:
    """Return the loss of a slice after its first `count` documents."""
    if piece.documents is not None:
        return Broken(piece.path, str(error), max(piece.documents - count, 1))
    if not count:
        return Broken(piece.path, str(error), size=piece.size)
    lost = max(round(count * (1.0 - error.read) / error.read), 1)
    return Broken(piece.path, f"{error}; about {lost:,} documents are lost with it", lost)


def _read_whole(path: str) -> str:
    """Read a UTF-8 text file, or Python source in its declared encoding. Line ends stay, a byte order mark does not."""
    with buckets.open_binary(path) as file:
        content, encoding = file.read(), "utf-8-sig"
    try:
        if path.endswith(".py"):
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
        text.encode()  # a declared encoding may decode to what UTF-8 cannot hold
        return text
    except (UnicodeError, SyntaxError, LookupError) as error:
        raise _Unreadable(f"is not UTF-8 text ({error})") from None


def _read_lines(piece: Slice, field: str | RecordKind, sought: str | None) -> Iterator[str | Broken]:
    with buckets.open_binary(piece.path) as file:
        if piece.start:  # a line across the start belongs to the previous slice
            file.seek(piece.start - 1)
            file.readline(piece.end - piece.start + 1)  # which may be as long as the file
        first = file.tell()

        def lines() -> Iterator[bytes]:
            at = first
            while at < piece.end and (line := file.readline()):
                at += len(line)
                yield line

        yield from _documents(lines(), field, piece.path, sought, cache(lambda: _lines_in(piece.path, first)))


def _lines_in(path: str, size: int) -> int:
    """Count the lines in the first `size` bytes."""
    count = 0
    with buckets.open_binary(path) as file:
        while size > 0 and (chunk := file.read(min(2**20, size))):
            count, size = count + chunk.count(b"\n"), size - len(chunk)
    return count


def _documents(
    lines: Iterable[bytes],
    field: str | RecordKind,
    path: str,
    sought: str | None,
    lines_before: Callable[[], int] = lambda: 0,
) -> Iterator[str | Broken]:
    """Yield the text of each JSON line that is not blank."""
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            text = _text(line, field)
            if text == sought:
                raise _Unreadable(_SOUGHT)
            yield text
        except _Unreadable as error:
            yield Broken(f"{path}:{lines_before() + number}", str(error))


def _text(line: bytes, field: str | RecordKind) -> str:
    try:
        text = line.decode("utf-8-sig")
        record = json.loads(text) if isinstance(field, RecordKind) else _record(text)
    except UnicodeError as error:
        raise _Unreadable(f"is not UTF-8 text ({error})") from None
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"is not JSON ({_without_line(error)})") from None
    if not isinstance(record, dict):
        raise _Unreadable("is not a JSON object")
    if isinstance(field, RecordKind):
        return _record_of(field, record)
    if field not in record:
        raise _Unreadable(f'has no field "{field}", but {named(record)}')
    text = record[field]
    if not isinstance(text, str):
        raise _Unreadable(f'has no text in its field "{field}"')
    try:
        text.encode()
    except UnicodeError:
        raise _Unreadable("is not Unicode text (half of a surrogate pair)") from None
    return text


def _without_line(error: Exception) -> str:
    """Return what is wrong with a line of JSON, and in which column of it."""
    return f"{error.msg}: column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)


def _record_of(kind: RecordKind, record: dict[str, Any]) -> str:
    try:
        text = kind.reader.of_record(record).to_json()
        text.encode()
        return text
    except NotAConversation as error:
        raise _Unreadable(str(error)) from None
    except UnicodeError:
        raise _Unreadable("is not Unicode text (half of a surrogate pair)") from None


def _record(line: str) -> Any:
    """Parse a line of JSON, whatever stands in fields that nobody asks for."""
    try:
        return _JSON.decode(line)
    except RecursionError:
        return _JSON.decode(_without_nested(line))


def _without_nested(line: str) -> str:
    """Return a line of JSON with null for every array and object in its outermost one. Raise ValueError if one of them
    has no end.
    """
    kept, depth, end = [], 0, 0
    for bracket in _BRACKET.finditer(line):
        if bracket[0] in ("[", "{"):
            depth += 1
            if depth == 2:
                kept.append(f"{line[end : bracket.start()]}null")
        elif bracket[0] in ("]", "}"):
            depth -= 1
            if depth == 1:
                end = bracket.end()
    if depth:
        raise ValueError(f"{depth:,} brackets are not closed")
    return "".join([*kept, line[end:]])


def named(fields: Iterable[str]) -> str:
    """List the first few field names, cut to fit in one line of a message."""
    return ", ".join(repr(field)[:40] for field in islice(fields, 8)) or "none"


def _decompressed(piece: Slice) -> Iterator[bytes]:
    """Yield the lines of a compressed file."""
    with buckets.open_binary(piece.path) as file:
        frames = _Frames(file, *(_gzip if piece.path.endswith(".gz") else _zstandard)())
        try:
            yield from io.BufferedReader(frames, _READ_BYTES)
        except EOFError as error:
            raise _Unreadable(f"is truncated ({error})") from None
        except frames.error as error:
            raise _Unreadable(f"is corrupt ({error})", frames.used / max(piece.size, 1)) from None


def _gzip() -> tuple[Callable, type[Exception], bytes]:
    return lambda: zlib.decompressobj(wbits=31), zlib.error, b"\0"


def _zstandard() -> tuple[Callable, type[Exception], bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)  # the largest window of `zstd --long`
    return decompressor.decompressobj, zstandard.ZstdError, b""


class _Frames(io.RawIOBase):
    """The concatenated frames of a compressed file as one stream.

    The packages' own readers accept a truncated file as complete (zstd), or do not report their position (gzip).

    `begin` returns a decompressor of one frame, which raises `error`; `padding` may follow a frame. `used`: bytes of
    the file that the output so far was decompressed from.
    """

    def __init__(self, file: BinaryIO, begin: Callable, error: type[Exception], padding: bytes):
        self.error, self.used = error, 0
        self._file, self._begin, self._padding = file, begin, padding
        self._frame, self._given, self._fed, self._ready = None, b"", 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            chunk, self._given = self._given or self._file.read(_COMPRESSED_READ_BYTES), b""
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            if self._frame is None:
                chunk = chunk.lstrip(self._padding) if self._fed else chunk
                if not chunk:
                    continue
                self._frame = self._begin()
            self._ready = memoryview(self._frame.decompress(chunk))
            if self._frame.eof:
                self._given, self._frame = self._frame.unused_data, None
            self._fed += len(chunk) - len(self._given)
            self.used = self._fed if self._ready else self.used
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)], self._ready = taken, self._ready[len(taken) :]
        return len(taken)


@contextmanager
def _parquet(path: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Open a Parquet file; its errors become _Unreadable."""
    import pyarrow
    import pyarrow.parquet

    with buckets.open_binary(path) as opened:  # pyarrow refuses file names that are not UTF-8
        try:
            file = pyarrow.parquet.ParquetFile(opened)
        except pyarrow.ArrowException as error:
            raise _Unreadable(f"is not a Parquet file ({error})") from None
        try:
            yield file
        except (pyarrow.ArrowException, OSError) as error:
            raise _Unreadable(f"is a corrupt Parquet file ({error})") from None


def _read_parquet(piece: Slice, field: str | RecordKind, sought: str | None) -> Iterator[str | Broken]:
    with _parquet(piece.path) as file:
        names = file.schema_arrow.names
        of_records = isinstance(field, RecordKind)
        if not of_records and field not in names:
            raise _Unreadable(f'has no column "{field}", but {named(names)}')
        columns = None if of_records else [field]
        number = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
        groups = list(range(piece.start, piece.end))
        for batch in file.iter_batches(256, row_groups=groups, columns=columns, use_threads=False):
            for value in batch.to_struct_array() if of_records else batch.column(0):
                number += 1
                try:
                    text = _record_of(field, value.as_py()) if of_records else value.as_py()
                    if sought is not None and text == sought:
                        raise _Unreadable(_SOUGHT)
                except UnicodeError as error:
                    yield Broken(f"{piece.path}:{number}", f"is not UTF-8 text ({error})")
                    continue
                except _Unreadable as error:
                    yield Broken(f"{piece.path}:{number}", str(error))
                    continue
                broken = Broken(f"{piece.path}:{number}", f'has no text in its column "{field}"')
                yield text if isinstance(text, str) else broken
