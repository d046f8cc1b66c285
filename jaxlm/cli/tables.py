"""Tables and sentences for a person to read, which keep every number whole at any width. Rich is imported where one is
used."""

import itertools
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from jaxlm.core.units import memory

_PIPE_WIDTH = 80  # a file or a pipe has no width of its own, unless COLUMNS gives one
_GAP = 2  # cells between columns, and before the second and later lines of a row
_NARROWEST = 24  # cells: a column of text is folded no further


@dataclass(frozen=True)
class Column:
    """A column of numbers (right-aligned), of names, or of text, which alone may be folded.

    Attributes:
      least: cells that text is given at least.
      after: the sign after which text is folded, in place of spaces.
      under: the column under whose cells this one stands where a row is too long for a line.
    """

    name: str
    number: bool = False
    folds: bool = False
    least: int = _NARROWEST
    after: str | None = None
    under: str | None = None


def names(*columns: str, under: str | None = None) -> list[Column]:
    """Return columns of names."""
    return [Column(name, under=under) for name in columns]


def numbers(*columns: str) -> list[Column]:
    """Return columns of numbers."""
    return [Column(name, number=True) for name in columns]


def texts(*columns: str, least: int = _NARROWEST, after: str | None = None, under: str | None = None) -> list[Column]:
    """Return columns of text, which is folded where its line ends."""
    return [Column(name, folds=True, least=least, after=after, under=under) for name in columns]


def facts() -> "TextTable":
    """Return a table of names and descriptions, without a header."""
    return TextTable([*names(""), *texts("")])


@dataclass(frozen=True)
class _Line:
    """The columns that stand in one line of a row, and the cells before them."""

    columns: list[int]
    indent: int = 0


@dataclass(frozen=True)
class _Arrangement:
    """The lines of a row, the cells between columns, and the width of each column."""

    lines: list[_Line]
    gap: int
    widths: list[int]


class TextTable:
    """Rows of cells under a title and a header, each where it is given.

    Where the columns do not fit next to one another, they stand closer, the header is folded, and then each row takes
    several lines. A table that `repeats` its first column is instead printed as several tables, next to that column.
    """

    def __init__(self, columns: Sequence[Column], title: str | None = None, repeats: bool = False):
        self._columns, self._title, self._repeats = columns, title, repeats
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
        width = width_of(file or sys.stdout)
        for i, table in enumerate(self._parts(width)):
            if i:
                console.print()
            head, rows = table.lines(width)
            for line in head:
                console.print(line, style="bold", soft_wrap=True)
            if any(self._header):
                rule = "-" if console.options.ascii_only else "─"
                console.print(rule * max(map(len, head + rows)), soft_wrap=True)
            for line in rows:
                console.print(line, soft_wrap=True)

    def lines(self, width: int) -> tuple[list[str], list[str]]:
        """Return the lines of title and header, and those of the rows, in at most `width` cells."""
        layout = self._layout(width)
        head = fold(self._title, width) if self._title else []
        if any(self._header):
            head += self._row(self._header, layout, of_header=True)
        return head, [line for row in self._rows for line in self._row(row, layout)]

    def _parts(self, width: int) -> "Iterator[TextTable]":
        """Yield the tables to print: this one, or as few as hold the columns next to the first, of about one width."""
        others = list(range(1, len(self._columns)))
        for count in range(1, len(others) + 1) if self._repeats else ():
            size = -(-len(others) // count)
            parts = [self._part([0, *others[i : i + size]]) for i in range(0, len(others), size)]
            if all(part._fits(width) for part in parts):
                yield from parts
                return
        yield self

    def _part(self, kept: list[int]) -> "TextTable":
        part = TextTable([self._columns[i] for i in kept], self._title if kept[1] == 1 else None)
        part._rows = [[row[i] for i in kept] for row in self._rows]
        return part

    def _fits(self, width: int) -> bool:
        least = self._least(heads_fold=False)
        return sum(least) + _GAP * (len(least) - 1) <= width

    def _least(self, heads_fold: bool) -> list[int]:
        """Return the cells that each column needs at least."""
        from rich.cells import cell_len

        sizes = []
        for column, head, *cells in zip(self._columns, self._header, *self._rows, strict=True):
            heads = head.split() if heads_fold else [head]
            if column.after:
                cells = [piece for cell in cells for piece in _pieces(cell, column.after)]
            size = max(map(cell_len, [*heads, *cells]), default=0)
            sizes.append(min(column.least, size) if column.folds and not column.after else size)
        return sizes

    def _layout(self, width: int) -> _Arrangement:
        """Return the first that fits: rows of one line; with columns `under` others; or as many lines as it takes."""
        arrangements = [[_Line(list(range(len(self._columns))))]]
        if (under := self._under()) is not None:
            arrangements.append(under)
        for lines in arrangements:
            for heads_fold, gap in itertools.product((False, True), (_GAP, 1)):
                least = self._least(heads_fold)
                indented = self._indented(lines, least, gap, width)
                if all(_length(line, least, gap) <= width for line in indented):
                    return _Arrangement(indented, gap, self._widths(indented, least, gap, width))
        least = self._least(heads_fold=False)
        lines, room = [_Line([0])], width - least[0]
        for i, size in enumerate(least[1:], 1):
            if room < _GAP + size:
                lines.append(_Line([], _GAP))
                room = width
            lines[-1].columns.append(i)
            room -= _GAP + size
        return _Arrangement(lines, _GAP, self._widths(lines, least, _GAP, width))

    def _under(self) -> list[_Line] | None:
        """Return two lines, the second of the columns that stand under another; None where none does."""
        under = [i for i, column in enumerate(self._columns) if column.under in self._header and column.under]
        return [_Line([i for i in range(len(self._columns)) if i not in under]), _Line(under)] if under else None

    def _indented(self, lines: list[_Line], least: list[int], gap: int, width: int) -> list[_Line]:
        """Return the lines, the second under the column that it belongs to."""
        if len(lines) == 1:
            return lines
        first, second = lines
        parent = self._header.index(self._columns[second.columns[0]].under or "")
        widths = self._widths([first], least, gap, width)
        before = first.columns[: first.columns.index(parent)]
        return [first, replace(second, indent=sum(widths[i] + gap for i in before) + _GAP)]

    def _widths(self, lines: list[_Line], least: list[int], gap: int, width: int) -> list[int]:
        """Return the width of each column; those of text share what the others of their line leave."""
        from rich.cells import cell_len

        widths = list(least)
        whole = [max(map(cell_len, cells)) for cells in zip(self._header, *self._rows, strict=True)]
        for line in lines:
            texts = sorted((i for i in line.columns if self._columns[i].folds), key=whole.__getitem__)
            room = width - line.indent - gap * (len(line.columns) - 1)
            room -= sum(widths[i] for i in line.columns if i not in texts)
            for left, i in zip(range(len(texts), 0, -1), texts, strict=True):
                later = sum(least[j] for j in texts[len(texts) - left + 1 :])
                widths[i] = max(1, min(whole[i], max(room // left, min(least[i], room - later))))
                room -= widths[i]
        return widths

    def _row(self, cells: list[str], layout: _Arrangement, of_header: bool = False) -> list[str]:
        """Return the lines of one row; what is short in a header stands in its last line."""
        lines = []
        for line in layout.lines:
            folded = [self._folded(cells[i], i, layout.widths[i], of_header) for i in line.columns]
            if of_header:
                height = max(map(len, folded))
                folded = [[""] * (height - len(each)) + each for each in folded]
            for parts in itertools.zip_longest(*folded, fillvalue=""):
                aligned = [
                    _aligned(part, layout.widths[i], self._columns[i].number)
                    for part, i in zip(parts, line.columns, strict=True)
                ]
                lines.append((" " * line.indent + (" " * layout.gap).join(aligned)).rstrip())
        return [line for line in lines if line] or [""]

    def _folded(self, cell: str, column: int, width: int, of_header: bool) -> list[str]:
        if of_header:
            return fold(cell, width)
        return fold(cell, width, self._columns[column].after) if self._columns[column].folds else [cell]


def _length(line: _Line, least: list[int], gap: int) -> int:
    return line.indent + sum(least[i] for i in line.columns) + gap * (len(line.columns) - 1)


def width_of(file: TextIO) -> int:
    """Return the width of a stream, in cells: that of its terminal; without one COLUMNS, or what most terminals have"""
    from rich.console import Console

    console = Console(file=file)
    if console.is_terminal:
        return console.width
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else _PIPE_WIDTH


def print_sentence(sentence: str, file: TextIO | None = None) -> None:
    """Print a sentence to a stream, by default standard output, wrapped to its width."""
    print("\n".join(wrapped(sentence, file or sys.stdout)), file=file or sys.stdout)


def wrapped(sentence: str, file: TextIO) -> list[str]:
    """Return the lines of a sentence in the width of a stream; words, such as paths, stay whole."""
    return textwrap.wrap(sentence, width_of(file), break_long_words=False, break_on_hyphens=False)


# Where words that are longer than a line are broken: after the first kind of sign that is in reach.
_BREAKS = ("/:", "_-.,=")


def fold(text: str, width: int, after: str | None = None) -> list[str]:
    """Return the lines of a text of at most `width` cells, folded at spaces, or after the sign `after`."""
    if after:
        lines = [""]
        for piece in _pieces(text, after):
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
        return lines
    lines = [""]
    for word in text.split():
        room = width - len(lines[-1]) - 1 if lines[-1] else width
        if len(word) <= room:
            lines[-1] += " " * bool(lines[-1]) + word
            continue
        if lines[-1]:
            lines.append("")
        while len(word) > width:
            end = _end(word, width)
            lines[-1] = word[:end]
            word = word[end:]
            lines.append("")
        lines[-1] = word
    return lines


def _end(word: str, width: int) -> int:
    """Return how much of a word to put on a line."""
    for signs in _BREAKS:
        if end := max(word.rfind(sign, 0, width) for sign in signs) + 1:
            return end
    return width


def _pieces(text: str, after: str) -> list[str]:
    """Return the pieces of a text, each of which ends after a sign."""
    return re.split(f"(?<={re.escape(after)})", text)


def _aligned(text: str, width: int, right: bool) -> str:
    from rich.cells import cell_len

    blank = " " * (width - cell_len(text))
    return blank + text if right else text + blank


def against_capacity(needed: int, capacity: int) -> str:
    """Format the bytes that a step needs on each device, the capacity, and whether the step fits."""
    verdict = "fits" if needed <= capacity else f"does not fit by {memory(needed - capacity)}"
    return f"{memory(needed)} of {memory(capacity)} per device: {verdict}"
