from itertools import islice

import numpy as np
import pytest
from store_fixtures import write_store

from jaxlm.data.loader import evaluation_batches, training_batches
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import bytes_tokenizer

SEQUENCE, COUNT = 16, 24


def make_rows(directory, sizes) -> Rows:
    """Make one row per document, identified by its characters."""
    texts = [chr(ord("A") + i) * size for i, size in enumerate(sizes)]
    return Rows(write_store(directory, texts, bytes_tokenizer()), SEQUENCE)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rows = make_rows(tmp_path_factory.mktemp("loader") / "store", [SEQUENCE - 1] * COUNT)
    assert len(rows) == COUNT
    return rows


def take(rows, count, batch=4, seed=0, start=0) -> list[dict[str, np.ndarray]]:
    return list(islice(training_batches([(rows, 1.0)], batch, seed, start), count))


def order(batches) -> list[int]:
    """Return the document of each row."""
    return [int(first) - ord("A") for batch in batches for first in batch["tokens"][:, 1]]


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys() == {"tokens", "targets", "segments", "positions"}
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


@pytest.mark.parametrize("start", [1, 5, 6, 13])
def test_starting_at_a_step_is_skipping_to_it(rows, start):
    assert_same(take(rows, 8, start=start), take(rows, start + 8)[start:])


@pytest.mark.parametrize("batch", [5, 7, 30])
def test_a_batch_that_does_not_divide_the_rows_starts_anywhere_too(rows, batch):
    assert_same(take(rows, 4, batch, start=9), take(rows, 13, batch)[9:])


def test_two_readings_are_the_same(rows):
    assert_same(take(rows, 20, seed=3), take(rows, 20, seed=3))


def test_a_far_step_needs_no_reading_up_to_it(rows):
    assert len(take(rows, 1, start=10**9)) == 1


@pytest.mark.parametrize("batch", [1, 4, 8, 24])
def test_each_epoch_covers_every_row_once(rows, batch):
    steps = COUNT // batch
    batches = take(rows, 3 * steps, batch)
    for epoch in range(3):
        assert sorted(order(batches[epoch * steps : (epoch + 1) * steps])) == list(range(COUNT))


@pytest.mark.parametrize("batch", [5, 9])
def test_epochs_follow_one_another_without_a_gap_where_the_batch_does_not_divide(rows, batch):
    seen = order(take(rows, COUNT, batch))
    assert [sorted(seen[e * COUNT : (e + 1) * COUNT]) for e in range(batch)] == [list(range(COUNT))] * batch


def test_epochs_come_in_different_orders(rows):
    epochs = [tuple(order(take(rows, 6, start=6 * epoch))) for epoch in range(4)]
    assert len({*epochs, tuple(range(COUNT))}) == 5


def test_seeds_give_different_orders(rows):
    assert len({tuple(order(take(rows, 6, seed=seed))) for seed in range(5)}) == 5


def test_no_epoch_of_a_seed_is_one_of_another(rows):
    epochs = [tuple(order(take(rows, 6, seed=seed, start=6 * epoch))) for seed in range(3) for epoch in range(3)]
    assert len(set(epochs)) == 9


def test_batches_are_int32(rows):
    (batch,) = take(rows, 1, batch=7)
    assert {(x.dtype, x.shape) for x in batch.values()} == {(np.dtype(np.int32), (7, SEQUENCE))}


def test_rows_are_passed_on_whole(rows):
    (batch,) = take(rows, 1)
    row_of = {int(rows[i]["tokens"][1]) - ord("A"): rows[i] for i in range(COUNT)}
    for i, document in enumerate(order([batch])):
        for name, expected in row_of[document].items():
            np.testing.assert_array_equal(batch[name][i], expected)


@pytest.mark.parametrize("batch", [1, 4, 5, 24, 100])
def test_evaluation_covers_every_row_once(rows, batch):
    batches = list(evaluation_batches(rows, batch))
    assert {x.shape for each in batches for x in each.values()} == {(batch, SEQUENCE)}
    assert len(batches) == -(-COUNT // batch)
    tokens = np.concatenate([each["tokens"] for each in batches])
    segments = np.concatenate([each["segments"] for each in batches])
    in_order = [rows[i]["tokens"] for i in range(COUNT)]
    assert sorted(map(tuple, tokens[:COUNT])) == sorted(map(tuple, in_order)) != list(map(tuple, tokens[:COUNT]))
    assert not tokens[COUNT:].any() and not segments[COUNT:].any()
    assert segments[:COUNT].any(axis=1).all()


def test_evaluation_holds_every_target_once(tmp_path):
    sizes = np.random.default_rng(0).integers(0, 60, 50)
    rows = make_rows(tmp_path / "store", sizes)
    batches = list(evaluation_batches(rows, 8))
    targets = np.concatenate([each["targets"][each["segments"] > 0] for each in batches])
    expected = np.concatenate([[*(chr(ord("A") + i) * n).encode(), 256] for i, n in enumerate(sizes)])
    np.testing.assert_array_equal(np.sort(targets), np.sort(expected))


def test_a_part_of_the_held_out_text_is_like_all_of_it(tmp_path):
    """The first rows are pieces of one long document; a few batches hold no larger fraction of them than the text."""
    rows = make_rows(tmp_path / "store", [60 * SEQUENCE, *[SEQUENCE // 4] * 600])
    batches = evaluation_batches(rows, 4, limit=10)
    whole = [len(np.unique(row)) == 1 for each in batches for row in each["segments"]]
    share = np.mean([len(np.unique(rows[i]["segments"])) == 1 for i in range(len(rows))])
    assert abs(np.mean(whole) - share) < 0.2


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (3, 3), (5, 5), (50, 5), (None, 5)])
def test_a_limit_is_a_prefix(rows, limit, count):
    assert_same(list(evaluation_batches(rows, 5, limit)), list(evaluation_batches(rows, 5))[:count])
