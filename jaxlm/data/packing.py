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

_NEVER = int(np.iinfo(np.int64).max)  # as `TokenStore.first_learned` has it


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


class NothingToLearn(InputError):
    """Rows in which no token is learned. The message says what is wrong and which key to set."""


class Rows:
    """The packed rows of a store, by number. The index is built at first use, then memory-mapped.

    A conversation is cut after `sequence` targets; one that has no learned target before is left out, so that every
    row has targets that count.

    Raise NothingToLearn if no document has a target, and InputError if the index cannot be written or read.

    Attributes:
      left_out: the number of conversations that are left out.
    """

    def __init__(self, store: TokenStore, sequence: int):
        self.store, self.sequence, self.left_out = store, sequence, 0
        index = store.directory / (f"answers-{sequence}" if store.of_conversations else f"rows-{sequence}")
        if not index.is_dir():
            lengths = store.lengths
            if store.of_conversations:
                lengths = np.where(store.first_learned() > sequence, 0, np.minimum(lengths, sequence + 1))
            pieces, rows = pack(lengths, sequence)
            with writing(store.directory), building(index) as folder:
                np.save(folder / "pieces.npy", pieces)
                np.save(folder / "rows.npy", rows)
        with reading(index):
            self._pieces = np.load(index / "pieces.npy", mmap_mode="r")
            self._rows = np.load(index / "rows.npy", mmap_mode="r")
        if store.of_conversations:  # each is one piece
            self.left_out = len(store.lengths) - len(self._pieces)
        if not len(self):
            raise _nothing_to_learn(store, sequence, int(store.first_learned().min(initial=_NEVER)))

    def __len__(self) -> int:
        return len(self._rows) - 1

    @property
    def is_one_document(self) -> bool:
        """True if every row holds a piece of one document alone, perhaps with padding behind it."""
        return len(self._pieces) == len(self)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Return int32 [T] arrays of a row.

        `tokens`; `targets`, the next token of each; `segments`, 1, 2, … per piece, negative for targets that are not
        learned, and 0 for padding; `positions`, from 0 in each piece.
        """
        batch = self.empty()
        at = 0
        for segment, piece in enumerate(self._pieces[self._rows[row] : self._rows[row + 1]], start=1):
            document, start, length = (int(x) for x in piece)
            text = self.store.read(document, start, length + 1)
            here = slice(at, at + length)
            batch["tokens"][here], batch["targets"][here] = text[:-1], text[1:]
            batch["segments"][here] = np.where(self.store.learned(document, start + 1, length), segment, -segment)
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

    Where the two are longer than a row both lose their ends, the longer one more. A pair of which one answer keeps no
    token is left out.

    Raise NothingToLearn if all are.

    Attributes:
      left_out: the number of pairs that are left out.
      reference: ln p of both answers of each pair under the model that training began with, float32 [pairs, 2], once
        it is known.
    """

    def __init__(self, store: TokenStore, sequence: int):
        self.store, self.sequence = store, sequence
        targets_P2 = store.lengths.reshape(-1, 2) - 1
        room_P2 = np.maximum(sequence // 2, sequence - targets_P2[:, ::-1])
        self._lengths_P2 = np.minimum(targets_P2, room_P2)
        first_P2 = store.first_learned().reshape(-1, 2)
        self._pairs = np.flatnonzero(np.all(first_P2 <= self._lengths_P2, axis=1))
        self.left_out = len(targets_P2) - len(self._pairs)
        if not len(self):
            least = int(first_P2.max(axis=1).min(initial=_NEVER))
            raise _nothing_to_learn(store, sequence, least if least == _NEVER else 2 * least)
        self.reference = np.zeros((len(self), 2), np.float32)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def is_one_document(self) -> bool:
        """False: a row holds two conversations."""
        return False

    def lengths(self, row: int) -> tuple[int, int]:
        """Return the number of targets of the chosen and the rejected conversation."""
        chosen, rejected = self._lengths_P2[self._pairs[row]].tolist()
        return chosen, rejected

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Return the arrays of a row as `Rows` does, with `CHOSEN` and `REJECTED` as segments, and its `reference`."""
        batch = self.empty()
        at = 0
        documents = enumerate(zip((CHOSEN, REJECTED), self.lengths(row), strict=True), 2 * int(self._pairs[row]))
        for document, (segment, length) in documents:
            tokens = self.store.read(document, 0, length + 1)
            here = slice(at, at + length)
            batch["tokens"][here], batch["targets"][here] = tokens[:-1], tokens[1:]
            batch["segments"][here] = np.where(self.store.learned(document, 1, length), segment, -segment)
            batch["positions"][here] = np.arange(length)
            at += length
        batch["positions"][at:] = np.arange(self.sequence - at)
        return {**batch, "reference": self.reference[row]}

    def empty(self) -> dict[str, np.ndarray]:
        """Return a row of padding."""
        return {**empty_row(self.sequence), "reference": np.zeros(2, np.float32)}


def _nothing_to_learn(store: TokenStore, sequence: int, least: int) -> NothingToLearn:
    """Return the error for a store without a target in rows of `sequence` tokens; in `least` tokens there is one."""
    if not store.of_conversations:
        return NothingToLearn(
            "data.text: every document is shorter than two tokens, so there is nothing to predict; give more text"
        )
    count, of = (len(store.lengths) // 2, "pairs") if store.of_pairs else (len(store.lengths), "conversations")
    if least == _NEVER:
        return NothingToLearn(f"none of the {count:,} {of} has an answer with a token; give answers")
    return NothingToLearn(
        f"none of the {count:,} {of} has a token to learn: what is before their answers is longer than "
        f"training.sequence = {sequence} tokens; raise it to {least} or more, or give shorter prompts"
    )


def cut_remark(rows: Rows | PreferenceRows) -> str | None:
    """Return the remark on conversations or pairs that are longer than a row; None without any."""
    store, sequence = rows.store, rows.sequence
    if not store.of_conversations:
        return None
    lengths, of = store.lengths, "conversations"
    if store.of_pairs:
        lengths, of = lengths[::2] + lengths[1::2] - 1, "pairs"
    remark = None
    if cut := int((lengths > sequence + 1).sum()):
        remark = (
            f"{cut:,} of {len(lengths):,} {of} are longer than training.sequence = {sequence} tokens "
            f"(the longest has {int(lengths.max()) - 1:,}) and are cut there"
        )
    if rows.left_out:
        without = f"{rows.left_out:,} of them keep" if remark else f"{rows.left_out:,} of {len(lengths):,} {of} have"
        left_out = f"{without} no token of an answer and are left out"
        remark = f"{remark}; {left_out}" if remark else left_out
    return remark


def rows_of(store: TokenStore, sequence: int) -> Rows | PreferenceRows:
    """Return the rows of a store."""
    return PreferenceRows(store, sequence) if store.of_pairs else Rows(store, sequence)


def empty_row(sequence: int) -> dict[str, np.ndarray]:
    """Return a row of padding, without targets."""
    row = {name: np.zeros(sequence, np.int32) for name in ("tokens", "targets", "segments")}
    return {**row, "positions": np.arange(sequence, dtype=np.int32)}
