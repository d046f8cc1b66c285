"""A first reading of a source: how much text there is, what of it is broken, which documents are held out."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.data import formats
from jaxlm.data.cache import writing
from jaxlm.data.formats import Broken, Part
from jaxlm.data.parallel import in_order
from jaxlm.data.sources import Changed, Source

_NAMED = 3  # broken documents that are named
_HOPELESS = 1000  # places that are broken without a whole document

Progress = Callable[[str, int, int], None]  # what is done, and how many of how many bytes of files


class Split(NamedTuple):
    """Which documents are held out: a share of them, or the end of the one that is alone."""

    held_out: float
    alone: bool = False

    def divide(self, text: str) -> tuple[str, str]:
        """(training text, held-out text) of a document: all of it is one or the other, by a hash of its content, so
        that adding documents moves none. A document alone is cut."""
        if self.alone:
            at = round(len(text) * (1.0 - self.held_out))
            return text[:at], text[at:]
        return ("", text) if share(text) < self.held_out else (text, "")

    def sample(self, text: str, part: float) -> bool:
        """Whether the document is in that part of all training documents, from 0 to 1."""
        return self.alone or share(text) < self.held_out + part * (1.0 - self.held_out)


def share(text: str) -> float:
    """A number from 0 to 1 that its content gives to a document."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64


def documents(part: Part) -> Iterator[str]:
    """The documents of a part of a survey. Raises Changed where they are fewer than the survey found."""
    left = part.documents
    for item in formats.read(part):
        if isinstance(item, str):
            left -= 1
            yield item
    if left:
        files = dict.fromkeys(piece.path for piece in part.slices)
        others = f", or one of {len(files) - 1} files read with it," if len(files) > 1 else ""
        raise Changed(f"{next(iter(files))}{others} changed while it was read; start again")


class Losses(NamedTuple):
    """How many of a source's documents cannot be read, of how many; `examples` are the first."""

    broken: int = 0
    documents: int = 0
    examples: Sequence[str] = ()

    def check(self, source: Source, max_broken: float) -> None:
        """Raises InputError where more than that share is broken."""
        if self.broken > max_broken * self.documents:
            raise InputError(
                f"{source.key}: {self.broken:,} of {self.documents:,} documents cannot be read, more than "
                f"data.max_broken = {max_broken} allows: {self.examples[0]}"
            )

    def summary(self, source: Source) -> str:
        """One line of what is left out."""
        return f"left out: {self.broken:,} of {self.documents:,} documents of {source.key} in all"


class Survey(NamedTuple):
    """A source that was read once: its parts, each with how many documents it gives, their split, the bytes of UTF-8 on
    both sides, and what is left out."""

    source: Source
    parts: tuple[Part, ...]
    split: Split
    train_bytes: int
    held_out_bytes: int
    losses: Losses

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.size for part in self.parts)


class _Tally(NamedTuple):
    """What one part holds: whole documents, broken ones at so many places, bytes of files in which nothing could be
    counted; `examples` are the first broken documents."""

    documents: int
    train_bytes: int
    held_out_bytes: int
    broken: int
    places: int
    uncounted: int
    examples: list[str]


def survey(
    source: Source,
    held_out: float,
    max_broken: float,
    say: Callable[[str], None],
    progress: Progress,
    notes: Path | None = None,
) -> Survey:
    """Read a source from beginning to end, or to the last document it is to give.

    Everything is held out where `held_out` is 1. What was read before stands in the file `notes`, if there is one, of
    this very source and share, and is not read again. Raises InputError where it has no text, a side would have none,
    or a larger share than `max_broken` of its documents cannot be read.
    """
    parts, split = formats.cut(source.files, source.field), Split(held_out)
    tallies: list[_Tally] = []
    left, done, whole, places = source.documents, 0, 0, 0
    size = sum(part.size for part in parts)
    with _tallied(parts, split, notes) as counted:
        for part, tally in zip(parts, counted, strict=True):
            if left is not None and tally.documents > left:
                tally = _tally(part._replace(documents=left), split)
            parts[len(tallies)] = part._replace(documents=tally.documents)
            tallies.append(tally)
            done += part.size
            progress(f"reading {source.name}", done, size)
            left = None if left is None else left - tally.documents
            whole, places = whole + tally.documents, places + tally.places
            if left == 0 or (places >= _HOPELESS and not whole):
                break
    progress(f"reading {source.name}", size, size)
    parts = parts[: len(tallies)]
    broken, uncounted = sum(tally.broken for tally in tallies), sum(tally.uncounted for tally in tallies)
    if done > uncounted:  # as many in a byte as elsewhere
        broken += int(uncounted * (whole + broken) / (done - uncounted))
    examples = [example for tally in tallies for example in tally.examples][:_NAMED]
    losses = Losses(broken, whole + broken, examples)
    losses.check(source, max_broken)
    if not whole:
        raise InputError(f"{source.key}: {', '.join(map(str, [*source.files][:_NAMED]))} are empty: there is no text")
    for example in examples:
        say(f"left out: {example}")
    if broken > len(examples):
        say(losses.summary(source))
    if whole == 1:
        split = Split(held_out, alone=True)
        tallies = [_tally(part, split) for part, tally in zip(parts, tallies, strict=True) if tally.documents]
    train, ends = sum(t.train_bytes for t in tallies), sum(t.held_out_bytes for t in tallies)
    for side, size in (("training", train or held_out == 1.0), ("held-out", ends)):
        if not size:
            raise InputError(
                f"data.held_out = {held_out} leaves no {side} text of the {whole:,} documents of {source.key}; "
                "give more text or change it"
            )
    return Survey(source, tuple(parts), split, train, ends, losses)


@contextmanager
def _tallied(parts: Sequence[Part], split: Split, notes: Path | None) -> Iterator[Iterator[_Tally]]:
    """Of each part its tally, in their order. The notes have a line for each, of what is whole its tally; they grow by
    those that are not there yet."""
    known = _noted(notes)[: len(parts)] if notes else []
    missing = [part for part, tally in zip_longest(parts, known) if tally is None]
    counted = in_order(partial(_tally, split=split), missing)

    def tallies() -> Iterator[_Tally]:
        for i in range(len(parts)):
            tally = known[i] if i < len(known) and known[i] else next(counted)
            if notes and i >= len(known):
                # Why it is broken may end, and leave the file as old and as long as it was.
                line = json.dumps(None if tally.broken else tally)
                with writing(notes), notes.open("a") as file:
                    file.write(line + "\n")
            yield tally

    following = tallies()
    try:
        yield following
    finally:
        following.close()
        counted.close()


def _noted(notes: Path) -> list[_Tally | None]:
    """The lines of a file that are whole; what follows is cut off, as of a process that was killed while it wrote."""
    known, size = [], 0
    with writing(notes):
        notes.parent.mkdir(parents=True, exist_ok=True)
        with notes.open("a+b") as file:
            file.seek(0)
            for line in file:
                try:
                    tally = json.loads(line)
                except ValueError:
                    break
                whole = isinstance(tally, list) and len(tally) == len(_Tally._fields)
                if not line.endswith(b"\n") or not (whole or tally is None):
                    break
                known.append(_Tally(*tally) if tally else None)
                size += len(line)
            file.truncate(size)
    return known


def _tally(part: Part, split: Split) -> _Tally:
    count, sizes = 0, [0, 0]
    broken, places, uncounted, examples = 0, 0, 0, []
    for item in formats.read(part):
        if isinstance(item, Broken):
            broken, places, uncounted = broken + item.documents, places + 1, uncounted + item.size
            examples += [f"{item.where} {item.why}"] if len(examples) < _NAMED else []
        else:
            count += 1
            sizes = [size + len(text.encode()) for size, text in zip(sizes, split.divide(item), strict=True)]
    return _Tally(count, *sizes, broken, places, uncounted, examples)
