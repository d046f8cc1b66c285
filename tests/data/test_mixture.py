from collections import Counter
from itertools import islice

import numpy as np
import pytest
from matrices import sampled
from store_fixtures import write_store
from text_fixtures import write

from jaxlm.core.errors import InputError
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare
from jaxlm.data.loader import training_batches
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import bytes_tokenizer

SEQUENCE = 16
SIZES = {"a": 24, "b": 10, "c": 3}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Three sources with a row per document, each with its own range of characters."""
    folder = tmp_path_factory.mktemp("mixture")
    made = {}
    for first, (name, count) in zip((0x4E00, 0x5E00, 0x6E00), SIZES.items(), strict=True):
        texts = [chr(first + i) * ((SEQUENCE - 1) // 3) for i in range(count)]
        made[name] = Rows(write_store(folder / name, texts, bytes_tokenizer()), SEQUENCE)
        assert len(made[name]) == count
    return made


def drawn(rows, weights, count, batch=4, seed=0, start=0) -> list[tuple[str, int]]:
    """Return (source, row) of each row of `count` batches."""
    known = {rows[name][i]["tokens"].tobytes(): (name, i) for name in rows for i in range(len(rows[name]))}
    sources = [(rows[name], weight) for name, weight in weights.items()]
    batches = islice(training_batches(sources, batch, seed, start), count)
    return [known[row.tobytes()] for each in batches for row in each["tokens"]]


WEIGHTS = [(0.5, 0.3, 0.2), (0.9, 0.05, 0.05), (1 / 3, 1 / 3, 1 / 3), (0.01, 0.98, 0.01)]


@pytest.mark.parametrize("weights", sampled(WEIGHTS, ["(0.01, 0.98, 0.01)"]), ids=str)
def test_rows_come_by_weight_throughout(rows, weights):
    weights = dict(zip(rows, weights, strict=True))
    names = [name for name, _ in drawn(rows, weights, 250)]
    for end in (100, 400, 1000):
        counts = Counter(names[:end])
        for name, weight in weights.items():
            assert abs(counts[name] - weight * end) <= 2 + 0.01 * weight * end


@pytest.mark.parametrize("start", [1, 7, 100])
def test_starting_at_a_step_is_skipping_to_it(rows, start):
    weights = {"a": 0.6, "b": 0.3, "c": 0.1}
    assert drawn(rows, weights, 9, start=start) == drawn(rows, weights, start + 9)[4 * start :]


def test_two_readings_are_the_same_and_seeds_differ(rows):
    weights = {"a": 0.6, "b": 0.3, "c": 0.1}
    assert drawn(rows, weights, 30) == drawn(rows, weights, 30)
    assert drawn(rows, weights, 30) != drawn(rows, weights, 30, seed=1)


def test_every_source_gives_all_its_rows_before_one_again(rows):
    seen = drawn(rows, {"a": 0.6, "b": 0.3, "c": 0.1}, 120)
    for name, size in SIZES.items():
        numbers = [row for source, row in seen if source == name]
        epochs = [tuple(numbers[i : i + size]) for i in range(0, len(numbers) - size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(epochs)) > 1


def test_what_one_source_gives_does_not_depend_on_the_others(rows):
    two = [row for name, row in drawn(rows, {"a": 0.5, "b": 0.5}, 30) if name == "a"]
    three = [row for name, row in drawn(rows, {"a": 0.5, "b": 0.25, "c": 0.25}, 30) if name == "a"]
    assert two[:50] == three[:50]


def test_sources_of_a_size_are_not_drawn_in_lockstep(rows):
    batches = islice(training_batches([(rows["a"], 0.5), (rows["a"], 0.5)], 2, 0, 0), SIZES["a"])
    one, other = zip(*(map(bytes, batch["tokens"]) for batch in batches), strict=True)
    assert sorted(one) == sorted(other) and one != other


@pytest.fixture
def describe(tmp_path):
    write(tmp_path / "web.jsonl", [f"web page {i} of many" for i in range(200)])
    write(tmp_path / "code.parquet", [f"def f{i}(x): return {i}" for i in range(150)], "code")

    def describe(weights=(3.0, 1.0), **changes) -> DataConfig:
        sources = {
            "web": {"text": str(tmp_path / "web.jsonl"), "weight": weights[0]},
            "code": {"text": str(tmp_path / "code.parquet"), "field": "code", "weight": weights[1]},
        }
        usual = {"sources": sources, "tokenizer": "bpe", "cache": str(tmp_path / "cache")}
        return DataConfig(**{**usual, **changes})

    return describe


def texts(data, store) -> set[str]:
    return {data.tokenizer.decode(store.read(i, 0, n)) for i, n in enumerate(store.lengths)}


def test_each_source_has_its_own_splits_and_one_tokenizer_serves_all(describe):
    data = prepare(describe(), 400)
    assert list(data.sources) == ["web", "code"]
    assert [source.weight for source in data.sources.values()] == [0.75, 0.25]
    for name, beginning in (("web", "web page"), ("code", "def f")):
        source = data.sources[name]
        held_out, train = texts(data, source.held_out), texts(data, source.train)
        assert held_out and train and not held_out & train
        assert all(text.startswith(beginning) for text in held_out | train)
        assert source.held_out_bytes == sum(map(len, held_out))
    assert data.held_out_bytes == sum(source.held_out_bytes for source in data.sources.values())
    assert len(data.tokenizer.encode("def f")) < 5 and len(data.tokenizer.encode("web page")) < 8


def test_weights_are_part_of_the_data_but_need_no_new_tokens(describe):
    said: list[str] = []
    first = prepare(describe(), 400)
    same = prepare(describe(weights=(6.0, 2.0)), 400, said.append)
    other = prepare(describe(weights=(1.0, 1.0)), 400, said.append)
    assert not said
    assert same.digest == first.digest != other.digest


def test_without_one_source_the_tokens_of_the_other_stay(describe):
    said: list[str] = []
    prepare(describe(tokenizer="bytes"), 400)
    data = describe(tokenizer="bytes")
    prepare(data.model_copy(update={"sources": {"web": data.sources["web"]}}), 400, said.append)
    assert not said


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ((1e308, 1e308), "sum of the weights .* overflows"),
        ((1.0, 1e-12), r"code\.weight = 1e-12 is"),
        ((1e-320, 1e308), r"web\.weight"),
    ],
)
def test_weights_that_leave_no_share_are_refused(describe, weights, says):
    with pytest.raises(ValueError, match=says):
        describe(weights=weights)
    assert describe(weights=(1.0, 1e-8)).described()


def test_a_source_is_named_where_it_is_wrong(describe, tmp_path):
    (tmp_path / "code.parquet").unlink()
    with pytest.raises(InputError, match=r"data\.sources\.code\.text: .*code\.parquet"):
        prepare(describe(), 400)


def test_a_batch_of_a_mixture_is_int32(rows):
    (batch,) = islice(training_batches([(rows["a"], 0.5), (rows["b"], 0.5)], 7, 0, 0), 1)
    assert {(x.dtype, x.shape) for x in batch.values()} == {(np.dtype(np.int32), (7, SEQUENCE))}
