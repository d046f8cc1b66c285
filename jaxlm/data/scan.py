"""The first pass over a source: counts documents and bytes, broken documents, and the held-out split."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.data import formats
from jaxlm.data.cache import writing
from jaxlm.data.formats import Broken, FileChunk
from jaxlm.data.parallel import in_order
from jaxlm.data.sources import Changed, Source

_EXAMPLES = 3  # broken documents that are named
_GIVE_UP_AFTER = 1000  # errors without a single readable document

Progress = Callable[[str, int, int], None]  # (activity, bytes of files done, bytes in total)


class Split(NamedTuple):
    """The held-out split: a fraction of the documents or, of a single text (`alone`), its end."""

    held_out: float
    alone: bool = False

    def divide(self, text: str) -> tuple[str, str]:
        """Return (training text, held-out text) of a document.

        A hash of its content puts the whole document on one side, so that adding documents moves no other. A single
        document is cut.
        """
        if self.alone:
            at = round(len(text) * (1.0 - self.held_out))
            return text[:at], text[at:]
        return ("", text) if hash_fraction(text) < self.held_out else (text, "")

    def sample(self, text: str, fraction: float) -> bool:
        """Return whether a training document belongs to a sample of this fraction, from 0 to 1."""
        return self.alone or hash_fraction(text) < self.held_out + fraction * (1.0 - self.held_out)


def hash_fraction(text: str) -> float:
    """Return a number from 0 to 1, by a hash of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64


def documents(chunk: FileChunk) -> Iterator[str]:
    """Yield the documents of an indexed chunk. Raise Changed if there are fewer than the scan counted."""
    left = chunk.documents
    for item in formats.read(chunk):
        if isinstance(item, str):
            left -= 1
            yield item
    if left:
        files = dict.fromkeys(piece.path for piece in chunk.slices)
        others = f", or one of {len(files) - 1} files read with it," if len(files) > 1 else ""
        raise Changed(f"{next(iter(files))}{others} changed while it was read; restart")


class SkippedDocuments(NamedTuple):
    """The number of broken documents of a source, out of `documents`. `examples` name the first of them."""

    broken: int = 0
    documents: int = 0
    examples: Sequence[str] = ()

    def check(self, source: Source, max_broken: float) -> None:
        """Raise InputError if a larger fraction is broken."""
        if self.broken > max_broken * self.documents:
            raise InputError(
                f"{source.key}: {self.broken:,} of {self.documents:,} documents cannot be read, more than "
                f"data.max_broken = {max_broken} allows: {self.examples[0]}"
            )

    def summary(self, source: Source) -> str:
        """Return one line on the skipped documents."""
        return f"skipped: {self.broken:,} of {self.documents:,} documents of {source.key} in all"


class SourceIndex(NamedTuple):
    """The result of a scan: chunks with their document counts, split, UTF-8 bytes per side, skipped documents."""

    source: Source
    chunks: tuple[FileChunk, ...]
    split: Split
    train_bytes: int
    held_out_bytes: int
    skipped: SkippedDocuments

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(chunk.size for chunk in self.chunks)


class _Tally(NamedTuple):
    """The content of one chunk.

    `documents` are readable. `broken` counts unreadable ones, found in `errors` places. `uncounted`: bytes of
    files in which nothing could be counted. `examples` name the first broken documents.
    """

    documents: int
    train_bytes: int
    held_out_bytes: int
    broken: int
    errors: int
    uncounted: int
    examples: list[str]


def _other_share(chunks: Sequence[FileChunk], held_out: float) -> str:
    """Return in words a change of `data.held_out` that leaves text on both sides, where one has none."""
    hashes = [hash_fraction(item) for chunk in chunks for item in formats.read(chunk) if isinstance(item, str)]
    least, most = math.floor(100 * min(hashes) + 1) / 100, math.floor(100 * max(hashes)) / 100
    if not least <= most:
        return "change it"
    return f"set data.held_out = {least} or more" if held_out < least else f"set data.held_out = {most} or less"


def scan_source(
    source: Source,
    max_broken: float,
    say: Callable[[str], None],
    progress: Progress,
    log: Path | None = None,
) -> SourceIndex:
    """Read a source to its end, or to its last requested document, and return its index.

    A source whose `held_out` is 1 is held out as a whole. `log`: a file with the results of an earlier scan of the same
    source and split, which are not computed again. Raise InputError if the source or one side of the split has no text,
    or if a larger fraction than `max_broken` of its documents is unreadable.
    """
    held_out = source.held_out
    chunks, split = formats.cut(source.files, source.field), Split(held_out)
    tallies: list[_Tally] = []
    left, done, readable, errors = source.documents, 0, 0, 0
    size = sum(chunk.size for chunk in chunks)
    with _tally_all(chunks, split, log) as counted:
        for chunk, tally in zip(chunks, counted, strict=True):
            if left is not None and tally.documents > left:
                tally = _tally(chunk._replace(documents=left), split)
            chunks[len(tallies)] = chunk._replace(documents=tally.documents)
            tallies.append(tally)
            done += chunk.size
            progress(f"reading {source.name}", done, size)
            left = None if left is None else left - tally.documents
            readable, errors = readable + tally.documents, errors + tally.errors
            if left == 0 or (errors >= _GIVE_UP_AFTER and not readable):
                break
    progress(f"reading {source.name}", size, size)
    chunks = chunks[: len(tallies)]
    broken, uncounted = sum(tally.broken for tally in tallies), sum(tally.uncounted for tally in tallies)
    if done > uncounted:  # assume as many documents per byte as in the rest
        broken += int(uncounted * (readable + broken) / (done - uncounted))
    examples = [example for tally in tallies for example in tally.examples][:_EXAMPLES]
    skipped = SkippedDocuments(broken, readable + broken, examples)
    skipped.check(source, max_broken)
    if not readable:
        raise InputError(
            f"{source.key}: {', '.join(map(str, [*source.files][:_EXAMPLES]))} are empty: there is no text"
        )
    for example in examples:
        say(f"skipped: {example}")
    if broken > len(examples):
        say(skipped.summary(source))
    if readable == 1 and isinstance(source.field, str):
        split = Split(held_out, alone=True)
        tallies = [_tally(chunk, split) for chunk, tally in zip(chunks, tallies, strict=True) if tally.documents]
    train, ends = sum(t.train_bytes for t in tallies), sum(t.held_out_bytes for t in tallies)
    for side, size in (("training", train or held_out == 1.0), ("held-out", ends or held_out == 0.0)):
        if not size:
            raise InputError(
                f"{source.described_share} leaves no {side} text of the {readable:,} "
                f"document{'s' * (readable > 1)} of {source.key}; give more text or "
                f"{_other_share(chunks, held_out)}"
            )
    return SourceIndex(source, tuple(chunks), split, train, ends, skipped)


@contextmanager
def _tally_all(chunks: Sequence[FileChunk], split: Split, log: Path | None) -> Iterator[Iterator[_Tally]]:
    """Yield an iterator of the tally of each chunk, in order.

    The log has one line per chunk: its tally, or null if the chunk has broken documents. Missing lines are appended.
    """
    known = _read_log(log)[: len(chunks)] if log else []
    missing = [chunk for chunk, tally in zip_longest(chunks, known) if tally is None]
    counted = in_order(partial(_tally, split=split), missing)

    def tallies() -> Iterator[_Tally]:
        for i in range(len(chunks)):
            tally = known[i] if i < len(known) and known[i] else next(counted)
            if log and i >= len(known):
                # The cause may pass without changing size or time of the file, so a broken chunk is read again.
                line = json.dumps(None if tally.broken else tally)
                with writing(log), log.open("a") as file:
                    file.write(line + "\n")
            yield tally

    following = tallies()
    try:
        yield following
    finally:
        following.close()
        counted.close()


def _read_log(log: Path) -> list[_Tally | None]:
    """Read the complete lines of a log, and truncate the rest, which a killed process may leave."""
    known, size = [], 0
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a+b") as file:
            file.seek(0)
            for line in file:
                try:
                    tally = json.loads(line)
                except ValueError:
                    break
                complete = isinstance(tally, list) and len(tally) == len(_Tally._fields)
                if not line.endswith(b"\n") or not (complete or tally is None):
                    break
                known.append(_Tally(*tally) if tally else None)
                size += len(line)
            file.truncate(size)
    return known


def _tally(chunk: FileChunk, split: Split) -> _Tally:
    count, sizes = 0, [0, 0]
    broken, errors, uncounted, examples = 0, 0, 0, []
    for item in formats.read(chunk):
        if isinstance(item, Broken):
            broken, errors, uncounted = broken + item.documents, errors + 1, uncounted + item.size
            examples += [f"{item.where} {item.why}"] if len(examples) < _EXAMPLES else []
        else:
            count += 1
            sizes = [size + len(text.encode()) for size, text in zip(sizes, split.divide(item), strict=True)]
    return _Tally(count, *sizes, broken, errors, uncounted, examples)
