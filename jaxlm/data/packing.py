"""Packing of documents into rows, as an index on disk.

A row of T tokens is a pure function of (data, T, row number). A long document is cut into pieces of T targets. Its
remainder goes, with other remainders, into the fullest row that has room (best-fit decreasing; Ding et al. 2024,
arXiv:2404.10830), so that no document is cut needlessly. Pieces do not attend to one another.
"""

import bisect
from collections import defaultdict

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.core.files import building
from jaxlm.data.cache import reading, writing
from jaxlm.data.store import TokenStore


def pack(lengths: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents to rows.

    Args:
      lengths: int [documents], tokens per document; n tokens have n − 1 targets.
      sequence: targets per row, T.

    Returns:
      pieces, int64 [pieces, 3]: document, first token, number of targets, in the order of their rows;
      rows, int64 [rows + 1]: row i holds pieces[rows[i]:rows[i + 1]].
    """
    targets = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
    whole, rest = np.divmod(targets, sequence)

    document = np.repeat(np.arange(len(targets)), whole)
    number = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole, whole)
    full = np.stack([document, number * sequence, np.full_like(document, sequence)], axis=1)

    remainders = np.flatnonzero(rest)
    row_of = np.zeros(len(targets), np.int64)
    room: dict[int, list[int]] = defaultdict(list)  # rows by their free targets
    rooms: list[int] = []  # the keys of `room`, ascending
    count = len(full)
    for i in remainders[np.argsort(-rest[remainders], kind="stable")]:
        need = int(rest[i])
        at = bisect.bisect_left(rooms, need)
        if at == len(rooms):
            row, left, count = count, sequence - need, count + 1
        else:
            size = rooms[at]
            row, left = room[size].pop(), size - need
            if not room[size]:
                del rooms[at]
        row_of[i] = row
        if left:
            if not room[left]:
                bisect.insort(rooms, left)
            room[left].append(row)

    packed = np.stack([remainders, whole[remainders] * sequence, rest[remainders]], axis=1)
    in_rows = np.concatenate([np.arange(len(full)), row_of[remainders]])
    order = np.argsort(in_rows, kind="stable")
    pieces = np.concatenate([full, packed])[order]
    rows = np.searchsorted(in_rows[order], np.arange(count + 1))
    return pieces.astype(np.int64), rows.astype(np.int64)


class Rows:
    """The packed rows of a store, by number. The index is built at first use, then memory-mapped.

    Raise InputError if no document has a target, or if the index cannot be written or read.
    """

    def __init__(self, store: TokenStore, sequence: int):
        self.store, self.sequence = store, sequence
        index = store.directory / f"rows-{sequence}"
        if not index.is_dir():
            # A conversation is learned from its beginning or not at all.
            lengths = np.minimum(store.lengths, sequence + 1) if store.of_conversations else store.lengths
            pieces, rows = pack(lengths, sequence)
            with writing(store.directory), building(index) as folder:
                np.save(folder / "pieces.npy", pieces)
                np.save(folder / "rows.npy", rows)
        with reading(index):
            self._pieces = np.load(index / "pieces.npy", mmap_mode="r")
            self._rows = np.load(index / "rows.npy", mmap_mode="r")
        if not len(self):
            raise InputError(
                "data.text: every document is shorter than two tokens, so there is nothing to predict; give more text"
            )

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Return int32 [T] arrays of a row.

        `tokens`; `targets`, the next token of each; `segments`, 1, 2, … per piece and 0 for targets that do not count,
        of padding and of conversations; `positions`, from 0 in each piece.
        """
        batch = self.empty()
        at = 0
        for segment, piece in enumerate(self._pieces[self._rows[row] : self._rows[row + 1]], start=1):
            document, start, length = (int(x) for x in piece)
            text = self.store.read(document, start, length + 1)
            here = slice(at, at + length)
            batch["tokens"][here], batch["targets"][here] = text[:-1], text[1:]
            batch["segments"][here] = segment * self.store.learned(document, start + 1, length)
            batch["positions"][here] = np.arange(length)
            at += length
        batch["positions"][at:] = np.arange(self.sequence - at)
        return batch

    def empty(self) -> dict[str, np.ndarray]:
        """Return a row of padding, without targets."""
        return empty_row(self.sequence)


CHOSEN, REJECTED = 1, 2  # segments of the two answers of a pair


class PreferenceRows:
    """The rows of a store of preferences, one pair each: the chosen conversation, then the rejected one.

    `reference`: ln p of both answers of each pair under the model that training began with, float32 [pairs, 2], once
    it is known. Where the two are longer than a row both lose their ends, the longer one more.
    """

    def __init__(self, store: TokenStore, sequence: int):
        self.store, self.sequence = store, sequence
        self.reference = np.zeros((len(store.lengths) // 2, 2), np.float32)

    def __len__(self) -> int:
        return len(self.reference)

    def lengths(self, row: int) -> tuple[int, int]:
        """Return the number of targets of the chosen and the rejected conversation."""
        chosen, rejected = (int(length) - 1 for length in self.store.lengths[2 * row : 2 * row + 2])
        half = self.sequence // 2
        return min(chosen, max(half, self.sequence - rejected)), min(rejected, max(half, self.sequence - chosen))

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Return the arrays of a row as `Rows` does, with `CHOSEN` and `REJECTED` as segments, and its `reference`."""
        batch = self.empty()
        at = 0
        for document, (segment, length) in enumerate(zip((CHOSEN, REJECTED), self.lengths(row), strict=True), 2 * row):
            tokens = self.store.read(document, 0, length + 1)
            here = slice(at, at + length)
            batch["tokens"][here], batch["targets"][here] = tokens[:-1], tokens[1:]
            batch["segments"][here] = segment * self.store.learned(document, 1, length)
            batch["positions"][here] = np.arange(length)
            at += length
        batch["positions"][at:] = np.arange(self.sequence - at)
        return {**batch, "reference": self.reference[row]}

    def empty(self) -> dict[str, np.ndarray]:
        """Return a row of padding."""
        return {**empty_row(self.sequence), "reference": np.zeros(2, np.float32)}


def rows_of(store: TokenStore, sequence: int) -> Rows | PreferenceRows:
    """Return the rows of a store."""
    return PreferenceRows(store, sequence) if store.of_pairs else Rows(store, sequence)


def empty_row(sequence: int) -> dict[str, np.ndarray]:
    """Return a row of padding, without targets."""
    row = {name: np.zeros(sequence, np.int32) for name in ("tokens", "targets", "segments")}
    return {**row, "positions": np.arange(sequence, dtype=np.int32)}
