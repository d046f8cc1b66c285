from typing import NamedTuple

import numpy as np
import pytest
from store_fixtures import write_store

from jaxlm.core.errors import InputError
from jaxlm.data import packing
from jaxlm.data.packing import Rows, empty_row, pack
from jaxlm.data.store import TokenStore
from jaxlm.data.tokenizers import characters_tokenizer


class Packed(NamedTuple):
    """Documents, and the rows they were packed into. All tokens of the corpus have distinct ids: 0, 1, 2, …"""

    lengths: np.ndarray
    sequence: int
    rows: dict[str, np.ndarray]  # [rows, T] each

    @property
    def document(self) -> np.ndarray:
        """Return the document of each id."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def filled(self) -> np.ndarray:
        return self.rows["segments"] > 0


def make_store(directory, lengths) -> TokenStore:
    ends = np.cumsum(lengths)
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + sum(lengths))))
    texts = [characters[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    return write_store(directory, texts, characters_tokenizer(texts))


def stack(rows: Rows) -> dict[str, np.ndarray]:
    read = [rows[i] for i in range(len(rows))]
    return {name: np.stack([row[name] for row in read]) for name in read[0]}


@pytest.fixture(scope="module", params=[(0, 1), (1, 7), (2, 16), (3, 16), (4, 64), (5, 512)], ids=str)
def packed(request, tmp_path_factory):
    """Random documents, some of them empty, of one token, of exactly one row and of several rows."""
    seed, sequence = request.param
    draw = np.random.default_rng(seed)
    lengths = np.concatenate([
        draw.integers(0, 4, 20),
        draw.integers(2, sequence + 2, 60),
        draw.integers(1, 5 * sequence + 2, 10),
        [0, 1, sequence, sequence + 1, sequence + 2, 3 * sequence + 1],
    ])  # fmt: skip
    draw.shuffle(lengths)
    store = make_store(tmp_path_factory.mktemp("packed") / "store", lengths)
    return Packed(lengths, sequence, stack(Rows(store, sequence)))


def test_every_target_of_every_document_appears_exactly_once(packed):
    firsts = np.cumsum(packed.lengths) - packed.lengths
    expected = np.setdiff1d(np.arange(packed.lengths.sum()), firsts[packed.lengths > 0])
    np.testing.assert_array_equal(np.sort(packed.rows["targets"][packed.filled]), expected)


def test_a_target_is_the_token_that_follows_in_the_same_document(packed):
    tokens, targets = (packed.rows[name][packed.filled] for name in ("tokens", "targets"))
    np.testing.assert_array_equal(targets, tokens + 1)
    np.testing.assert_array_equal(packed.document[targets], packed.document[tokens])


def test_rows_are_as_long_as_the_sequence_and_none_is_empty(packed):
    assert {x.shape[1] for x in packed.rows.values()} == {packed.sequence}
    assert {x.dtype for x in packed.rows.values()} == {np.dtype(np.int32)}
    assert packed.filled.any(axis=1).all()


def test_segments_count_from_one_and_end_in_zeros(packed):
    for segments in packed.rows["segments"]:
        used = segments[segments > 0]
        assert used[0] == 1 and set(np.diff(used)) <= {0, 1}
        assert not segments[len(used) :].any()


def test_a_segment_is_one_unbroken_piece_of_one_document(packed):
    for tokens, segments in zip(packed.rows["tokens"], packed.rows["segments"], strict=True):
        for segment in range(1, segments.max() + 1):
            piece = tokens[segments == segment]
            np.testing.assert_array_equal(piece, np.arange(piece[0], piece[0] + len(piece)))
            assert len(set(packed.document[piece])) == 1


def test_positions_restart_in_every_piece_and_in_what_is_empty(packed):
    for positions, segments in zip(packed.rows["positions"], packed.rows["segments"], strict=True):
        for segment in set(segments):
            here = positions[segments == segment]
            np.testing.assert_array_equal(here, np.arange(len(here)))


def test_what_is_empty_is_zero(packed):
    for name in ("tokens", "targets", "segments"):
        assert not packed.rows[name][~packed.filled].any()


def test_a_document_is_cut_only_at_multiples_of_the_sequence(packed):
    firsts = np.cumsum(packed.lengths) - packed.lengths
    starts = packed.rows["tokens"][packed.filled & (packed.rows["positions"] == 0)]
    assert not ((starts - firsts[packed.document[starts]]) % packed.sequence).any()
    pieces = np.bincount(packed.document[starts], minlength=len(packed.lengths))
    np.testing.assert_array_equal(pieces, -(-np.maximum(packed.lengths - 1, 0) // packed.sequence))


@pytest.mark.parametrize("seed", range(5))
def test_no_row_of_the_index_is_overfull(seed):
    draw = np.random.default_rng(seed)
    sequence = int(draw.integers(1, 300))
    pieces, rows = pack(draw.integers(0, 3 * sequence, 2000), sequence)
    filled = np.add.reduceat(pieces[:, 2], rows[:-1])
    assert rows[0] == 0 and rows[-1] == len(pieces) and (np.diff(rows) > 0).all()
    assert (pieces[:, 2] > 0).all() and filled.max() <= sequence


@pytest.mark.parametrize("seed", range(5))
def test_many_short_documents_leave_little_empty(seed):
    sequence = 256
    lengths = np.random.default_rng(seed).integers(2, sequence // 2, 3000)
    pieces, rows = pack(lengths, sequence)
    assert pieces[:, 2].sum() == (lengths - 1).sum()
    assert (lengths - 1).sum() / ((len(rows) - 1) * sequence) >= 0.99


@pytest.mark.parametrize(
    ("targets", "packed"),
    [
        ([3, 3, 6, 7], [[3, 6], [3, 7]]),  # longest first; the given order would take three rows
        ([2, 3, 5, 7], [[2, 5], [3, 7]]),  # 3 fits exactly with 7, and leaves room with 5
    ],
)
def test_a_document_goes_where_it_fits_best(targets, packed):
    pieces, rows = pack(np.array(targets) + 1, 10)
    together = [sorted(pieces[a:b, 2].tolist()) for a, b in zip(rows[:-1], rows[1:], strict=True)]
    assert sorted(together) == packed


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 1, 1, 0]])
def test_documents_without_two_tokens_have_no_rows_and_are_refused(lengths, tmp_path):
    pieces, rows = pack(np.array(lengths, np.int64), 8)
    assert pieces.shape == (0, 3) and rows.tolist() == [0]
    with pytest.raises(InputError, match="data.text"):
        Rows(make_store(tmp_path / "store", lengths), 8)


def test_the_index_is_built_once_per_sequence(tmp_path, monkeypatch):
    store = make_store(tmp_path / "store", [5, 9, 30])
    first = stack(Rows(store, 8))
    built = {path: path.stat().st_mtime_ns for path in store.directory.rglob("*.npy")}

    def refuse(*_):
        raise AssertionError("packed again")

    monkeypatch.setattr(packing, "pack", refuse)
    again = stack(Rows(TokenStore(store.directory), 8))
    assert {path: path.stat().st_mtime_ns for path in store.directory.rglob("*.npy")} == built
    for name in first:
        np.testing.assert_array_equal(again[name], first[name])
    with pytest.raises(AssertionError, match="packed again"):
        Rows(store, 9)


def test_an_index_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    store = make_store(tmp_path / "store", [5, 9, 30])
    before = sorted(store.directory.iterdir())
    monkeypatch.setattr(packing, "pack", lambda *_: (np.zeros((0, 3)), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        Rows(store, 8)
    assert sorted(store.directory.iterdir()) == before


def test_an_index_that_cannot_be_written_is_refused(tmp_path):
    store = make_store(tmp_path / "store", [5, 9, 30])
    (store.directory / "rows-8").touch()  # a file, which no folder can replace
    with pytest.raises(InputError, match=r"data\.cache: .*store cannot be written \(.*\); set it to a folder that can"):
        Rows(store, 8)


def test_an_empty_row_has_no_targets():
    row = empty_row(5)
    assert not row["segments"].any() and row["positions"].tolist() == [0, 1, 2, 3, 4]
    assert {x.dtype for x in row.values()} == {np.dtype(np.int32)}
