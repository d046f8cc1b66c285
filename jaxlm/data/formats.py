"""Files as documents: the formats, and how the files of a source are cut into parts of about equal size."""

import io
import json
import os
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    import pyarrow.parquet

PART_BYTES = 2**24
_WHOLE = (".txt", ".md", ".py")
_COMPRESSED = (".jsonl.gz", ".jsonl.zst")
SUFFIXES = (*_WHOLE, ".jsonl", *_COMPRESSED, ".parquet")
_CHUNK = 2**16
_COMPRESSED_CHUNK = 2**12  # so small that little of a damaged file is lost before the damage


class Slice(NamedTuple):
    """Some of the documents of a file: of JSON lines those that begin in bytes [start, end), of Parquet those in row
    groups [start, end), otherwise all. `size`: what it takes of the file, bytes. `documents`: how many, where that is
    known before they are read."""

    path: str
    start: int
    end: int
    size: int
    documents: int | None = None


class Part(NamedTuple):
    """A piece of work: slices, the field that holds the text, and how many documents to take if not all."""

    slices: tuple[Slice, ...]
    field: str
    documents: int | None = None

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(piece.size for piece in self.slices)


class Broken(NamedTuple):
    """A document, or the rest of a file, that cannot be read: where (FILE or FILE:LINE), and why. `documents`: how many
    are lost with it, at least; where nothing tells more, they are what `size` bytes of the file hold."""

    where: str
    why: str
    documents: int = 1
    size: int = 0


class _Unreadable(Exception):
    """The rest of a file cannot be read; says why. `read`: the share of the file that comes before. How much is gone
    from a file that is cut short nobody knows; it is taken to be as much as is there."""

    def __init__(self, why: str, read: float = 0.5):
        super().__init__(why)
        self.read = read


def cut(files: Iterable[Path], field: str) -> list[Part]:
    """Parts of about PART_BYTES, in the order of the files; the same files are always cut alike.

    Compressed files are not cut, nor are documents or row groups.
    """
    groups: list[list[Slice]] = []
    filled = 0
    for piece in (piece for path in files for piece in _slices(path)):
        if not groups or filled + piece.size > PART_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.size
    return [Part(tuple(group), field) for group in groups]


def _slices(path: Path) -> list[Slice]:
    known, size = 1 if path.name.endswith(_WHOLE) else None, 0
    try:
        size = path.stat().st_size
        if path.suffix == ".jsonl":
            starts = range(0, size, PART_BYTES)
            return [Slice(str(path), at, min(at + PART_BYTES, size), min(PART_BYTES, size - at)) for at in starts]
        if path.suffix == ".parquet":
            return _row_groups(path, size)
    except (OSError, _Unreadable):  # reading it will say so
        return [Slice(str(path), 0, 1, size, known)]
    return [Slice(str(path), 0, size, size, known)]


def _row_groups(path: Path, size: int) -> list[Slice]:
    with _parquet(str(path)) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes, rows = [group.total_byte_size for group in groups], [group.num_rows for group in groups]
    starts, filled = [0], 0
    for i, group in enumerate(sizes):
        if filled and filled + group > PART_BYTES:
            starts.append(i)
            filled = 0
        filled += group
    ends = [*starts[1:], len(sizes)]
    share = size / max(sum(sizes), 1)
    return [
        Slice(str(path), a, b, round(share * sum(sizes[a:b])), sum(rows[a:b]))
        for a, b in zip(starts, ends, strict=True)
    ]


def read(part: Part) -> Iterator[str | Broken]:
    """The documents of a part that are not empty, one at a time, and what is broken, in order."""
    left = part.documents
    for piece in part.slices:
        for item in _read_slice(piece, part.field):
            if left == 0:
                return
            if item:
                yield item
                left = left - 1 if left is not None and isinstance(item, str) else left


def _read_slice(piece: Slice, field: str) -> Iterator[str | Broken]:
    count = 0
    try:
        for item in _items(piece, field):
            count += 1
            yield item
    except _Unreadable as error:
        yield _rest(piece, count, error)
    except OSError as error:
        yield _rest(piece, count, _Unreadable(f"cannot be read ({error.strerror or error})"))


def _items(piece: Slice, field: str) -> Iterator[str | Broken]:
    path = piece.path
    if path.endswith(_WHOLE):
        yield _read_whole(path)
    elif path.endswith(".parquet"):
        yield from _read_parquet(piece, field)
    elif path.endswith(_COMPRESSED):
        yield from _documents(_decompressed(path), field, path)
    else:
        yield from _read_lines(piece, field)


def _rest(piece: Slice, count: int, error: _Unreadable) -> Broken:
    """What is lost of a slice behind its first `count` documents."""
    if piece.documents is not None:
        return Broken(piece.path, str(error), max(piece.documents - count, 1))
    if not count:
        return Broken(piece.path, str(error), size=piece.size)
    lost = max(round(count * (1.0 - error.read) / error.read), 1)
    return Broken(piece.path, f"{error}; about {lost:,} documents are lost with it", lost)


def _read_whole(path: str) -> str:
    """UTF-8, or Python source as it declares itself."""
    try:
        if path.endswith(".py"):
            with tokenize.open(path) as source:
                text = source.read()
        else:
            text = Path(path).read_text(encoding="utf-8-sig")
        text.encode()  # a source may declare an encoding that has what UTF-8 has not
        return text
    except (UnicodeError, SyntaxError, LookupError) as error:
        raise _Unreadable(f"is not UTF-8 text ({error})") from None


def _read_lines(piece: Slice, field: str) -> Iterator[str | Broken]:
    with open(piece.path, "rb") as file:
        if piece.start:  # the line that runs across the start belongs to the slice before
            file.seek(piece.start - 1)
            file.readline(piece.end - piece.start + 1)  # and may be as long as the file
        first = file.tell()

        def lines() -> Iterator[bytes]:
            at = first
            while at < piece.end and (line := file.readline()):
                at += len(line)
                yield line

        yield from _documents(lines(), field, piece.path, cache(lambda: _lines_in(piece.path, first)))


def _lines_in(path: str, size: int) -> int:
    """Lines in the first `size` bytes."""
    count = 0
    with open(path, "rb") as file:
        while size > 0 and (chunk := file.read(min(2**20, size))):
            count, size = count + chunk.count(b"\n"), size - len(chunk)
    return count


def _documents(
    lines: Iterable[bytes], field: str, path: str, lines_before: Callable[[], int] = lambda: 0
) -> Iterator[str | Broken]:
    """The text of each JSON line that is not blank."""
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            yield _text(line, field)
        except _Unreadable as error:
            yield Broken(f"{path}:{lines_before() + number}", str(error))


def _text(line: bytes, field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeError as error:
        raise _Unreadable(f"is not UTF-8 text ({error})") from None
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Unreadable("is no JSON object")
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


def named(fields: Iterable[str]) -> str:
    """The first of the fields there are, in what fits a line of a message."""
    return ", ".join(repr(field)[:40] for field in islice(fields, 8)) or "none"


def _decompressed(path: str) -> Iterator[bytes]:
    """The lines of a compressed file."""
    with open(path, "rb") as file:
        frames = _Frames(file, *(_gzip if path.endswith(".gz") else _zstandard)())
        try:
            yield from io.BufferedReader(frames, _CHUNK)
        except EOFError as error:
            raise _Unreadable(f"is cut short ({error})") from None
        except frames.error as error:
            raise _Unreadable(f"is damaged ({error})", frames.used / os.path.getsize(path)) from None


def _gzip() -> tuple[Callable, type[Exception], bytes]:
    return lambda: zlib.decompressobj(wbits=31), zlib.error, b"\0"


def _zstandard() -> tuple[Callable, type[Exception], bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)  # whatever `zstd --long` makes
    return decompressor.decompressobj, zstandard.ZstdError, b""


class _Frames(io.RawIOBase):
    """The frames of a file, each a stream of its own, as one. The packages' own readers take a file that is cut short
    for a whole one (zstd), or do not tell how far they came (gzip).

    `begin` gives a decompressor of one frame, which raises `error`; `padding` may lie behind a frame. `used`: bytes
    of the file that all that came out so far was made of.
    """

    def __init__(self, file: BinaryIO, begin: Callable, error: type[Exception], padding: bytes):
        self.error, self.used = error, 0
        self._file, self._begin, self._padding = file, begin, padding
        self._frame, self._given, self._fed, self._ready = None, b"", 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            given, self._given = self._given or self._file.read(_COMPRESSED_CHUNK), b""
            if not given:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            if self._frame is None:
                given = given.lstrip(self._padding) if self._fed else given
                if not given:
                    continue
                self._frame = self._begin()
            self._ready = memoryview(self._frame.decompress(given))
            if self._frame.eof:
                self._given, self._frame = self._frame.unused_data, None
            self._fed += len(given) - len(self._given)
            self.used = self._fed if self._ready else self.used
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)], self._ready = taken, self._ready[len(taken) :]
        return len(taken)


@contextmanager
def _parquet(path: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """An open Parquet file, whose errors become _Unreadable."""
    import pyarrow
    import pyarrow.parquet

    with open(path, "rb") as opened:  # pyarrow itself takes no name that is not UTF-8
        try:
            file = pyarrow.parquet.ParquetFile(opened)
        except pyarrow.ArrowException as error:
            raise _Unreadable(f"is no Parquet file ({error})") from None
        try:
            yield file
        except (pyarrow.ArrowException, OSError) as error:
            raise _Unreadable(f"is a damaged Parquet file ({error})") from None


def _read_parquet(piece: Slice, field: str) -> Iterator[str | Broken]:
    with _parquet(piece.path) as file:
        names = file.schema_arrow.names
        if field not in names:
            raise _Unreadable(f'has no column "{field}", but {named(names)}')
        number = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
        groups = list(range(piece.start, piece.end))
        for batch in file.iter_batches(256, row_groups=groups, columns=[field], use_threads=False):
            for value in batch.column(0):
                number += 1
                try:
                    text = value.as_py()
                except UnicodeError as error:
                    yield Broken(f"{piece.path}:{number}", f"is not UTF-8 text ({error})")
                    continue
                broken = Broken(f"{piece.path}:{number}", f'has no text in its column "{field}"')
                yield text if isinstance(text, str) else broken
