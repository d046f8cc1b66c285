"""Tables for a person to read, which keep every number whole at any width. Rich is imported where one is used."""

import itertools
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from jaxlm.core.units import memory

_PIPE_WIDTH = 200  # a file or a pipe has no width of its own
_GAP = 2  # cells between columns, and before the second and later lines of a row
_NARROWEST = 24  # cells: a column of text is folded no further


@dataclass(frozen=True)
class Column:
    """A column of numbers (right-aligned), of names, or of text, which alone may be folded."""

    name: str
    number: bool = False
    folds: bool = False


def names(*columns: str) -> list[Column]:
    """Return columns of names."""
    return [Column(name) for name in columns]


def numbers(*columns: str) -> list[Column]:
    """Return columns of numbers."""
    return [Column(name, number=True) for name in columns]


def texts(*columns: str) -> list[Column]:
    """Return columns of text, which is folded where its line ends."""
    return [Column(name, folds=True) for name in columns]


def facts() -> "TextTable":
    """Return a table of names and descriptions, without a header."""
    return TextTable([*names(""), *texts("")])


class TextTable:
    """Rows of cells under a title and a header, each where it is given.

    Where the columns do not fit next to one another, each row takes several lines.
    """

    def __init__(self, columns: Sequence[Column], title: str | None = None):
        self._columns, self._title = columns, title
        self._header = [column.name for column in columns]
        self._rows: list[list[str]] = []

    def add(self, *cells: str) -> None:
        """Add a row, a cell for each column."""
        self._rows.append([cell for cell, _ in zip(cells, self._columns, strict=True)])

    @property
    def filled(self) -> bool:
        """True if the table has rows."""
        return bool(self._rows)

    def print(self, file: TextIO | None = None) -> None:
        """Print to a stream, by default standard output, in the width of its terminal."""
        from rich.console import Console

        console = Console(file=file or sys.stdout, highlight=False, markup=False, emoji=False)
        head, rows = self.lines(console.width if console.is_terminal else _PIPE_WIDTH)
        for line in head:
            console.print(line, style="bold", soft_wrap=True)
        if any(self._header):
            rule = "-" if console.options.ascii_only else "─"
            console.print(rule * max(map(len, head + rows)), soft_wrap=True)
        for line in rows:
            console.print(line, soft_wrap=True)

    def lines(self, width: int) -> tuple[list[str], list[str]]:
        """Return the lines of title and header, and those of the rows, in at most `width` cells."""
        from rich.cells import cell_len

        whole = [max(map(cell_len, cells)) for cells in zip(self._header, *self._rows, strict=True)]
        gap, bands = self._bands(whole, width)
        widths = self._widths(whole, bands, gap, width)
        head = _fold(self._title, width) if self._title else []
        if any(self._header):
            head += self._row(self._header, bands, widths, gap)
        return head, [line for row in self._rows for line in self._row(row, bands, widths, gap)]

    def _bands(self, whole: list[int], width: int) -> tuple[int, list[list[int]]]:
        """Return the gap between columns, and the columns in each line of a row: in one line, if they fit."""
        least = [min(_NARROWEST, size) if c.folds else size for size, c in zip(whole, self._columns, strict=True)]
        for gap in (_GAP, 1):
            if sum(least) + gap * (len(least) - 1) <= width:
                return gap, [list(range(len(least)))]
        bands, room = [[0]], width - least[0]
        for i, size in enumerate(least[1:], 1):
            if room < _GAP + size:
                bands.append([])
                room = width
            bands[-1].append(i)
            room -= _GAP + size
        return _GAP, bands

    def _widths(self, whole: list[int], bands: list[list[int]], gap: int, width: int) -> list[int]:
        """Return the width of each column; those of text share what the others of their line leave."""
        widths = list(whole)
        for band in bands:
            texts = sorted((i for i in band if self._columns[i].folds), key=whole.__getitem__)
            room = width - gap * len(band) - sum(whole[i] for i in band if i not in texts)
            for left, i in zip(range(len(texts), 0, -1), texts, strict=True):
                widths[i] = max(1, min(whole[i], room // left))
                room -= widths[i]
        return widths

    def _row(self, cells: list[str], bands: list[list[int]], widths: list[int], gap: int) -> list[str]:
        """Return the lines of one row."""
        lines = []
        for band in bands:
            folded = [_fold(cells[i], widths[i]) if self._columns[i].folds else [cells[i]] for i in band]
            for parts in itertools.zip_longest(*folded, fillvalue=""):
                aligned = [
                    _aligned(part, widths[i], self._columns[i].number) for part, i in zip(parts, band, strict=True)
                ]
                lines.append((" " * _GAP * (band is not bands[0]) + (" " * gap).join(aligned)).rstrip())
        return [line for line in lines if line] or [""]


def _fold(text: str, width: int) -> list[str]:
    """Return the lines of a text; a word that is longer than a line, such as an address, is broken after a slash."""
    words = [part for word in text.split() for part in _parts(word, width)]
    return textwrap.wrap(" ".join(words), width, break_on_hyphens=False) or [""]


def _parts(word: str, width: int) -> list[str]:
    """Return a word, in parts that end with a slash where it is longer than a line."""
    if len(word) <= width or "/" not in word[:width]:
        return [word]
    end = word.rindex("/", 0, width) + 1
    return [word[:end], *_parts(word[end:], width)]


def _aligned(text: str, width: int, right: bool) -> str:
    from rich.cells import cell_len

    blank = " " * (width - cell_len(text))
    return blank + text if right else text + blank


def against_capacity(needed: int, capacity: int) -> str:
    """Format the bytes that a step needs on each device, the capacity, and whether the step fits."""
    verdict = "fits" if needed <= capacity else f"does not fit by {memory(needed - capacity)}"
    return f"{memory(needed)} of {memory(capacity)} per device: {verdict}"
