"""Losses of sources and of all of them together."""

import json
import math

import meshes
import numpy as np
import pytest
from store_fixtures import write_store

from jaxlm.core.errors import InputError
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import bytes_tokenizer
from jaxlm.training.evaluation import Evaluation, evaluate, evaluate_sources

SEQUENCE, BATCH = 16, 4
LOSS = {"a": 2.0, "b": 5.0}


@pytest.fixture
def sources(tmp_path):
    return {
        "a": Rows(write_store(tmp_path / "a", ["a" * 15] * 40, bytes_tokenizer()), SEQUENCE),
        "b": Rows(write_store(tmp_path / "b", ["b" * 7] * 6, bytes_tokenizer()), SEQUENCE),
    }


@pytest.fixture
def step():
    """Every target of a source costs its letter's loss."""

    def step(_, batch):
        used = np.asarray(batch["segments"]) > 0
        tokens = np.asarray(batch["tokens"])
        loss = LOSS["b"] if (tokens == ord("b")).any() else LOSS["a"]
        return loss * used.sum(), used.sum()

    return step


def measure(step, sources, limit=None) -> Evaluation:
    return evaluate_sources(step, None, sources, BATCH, meshes.make(1, 1, 1), limit)


def test_every_source_has_its_loss_and_all_text_has_one(step, sources):
    measured = measure(step, sources)
    targets = {"a": 40 * 16, "b": 6 * 8}
    for name, each in measured.sources.items():
        assert (each.loss, each.tokens, each.targets) == (LOSS[name], targets[name], targets[name])
        assert each.size == sources[name].store.predicted_bytes
        assert each.bits_per_byte == pytest.approx(each.loss * each.tokens / math.log(2) / each.size)
    assert measured.tokens == sum(targets.values())
    assert measured.loss == pytest.approx(sum(LOSS[n] * targets[n] for n in targets) / sum(targets.values()))
    assert measured.size == 40 * 15 + 6 * 7


def test_a_limit_changes_what_is_read_and_not_how_sources_count(step, sources):
    whole, some = measure(step, sources), measure(step, sources, limit=1)
    assert some.tokens < whole.tokens
    assert some.loss == pytest.approx(whole.loss)
    assert some.bits_per_byte == pytest.approx(whole.bits_per_byte)


def test_one_source_is_all_text(step, sources):
    measured = measure(step, {"b": sources["b"]})
    assert measured.sources is None and measured.loss == LOSS["b"]
    assert measured == evaluate(step, None, sources["b"], BATCH, meshes.make(1, 1, 1))
    assert set(measured.row()) == {"loss", "tokens", "perplexity", "bits_per_byte"}


def test_the_row_holds_numbers_that_json_has(step, sources):
    row = measure(step, sources).row()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert {name: set(each) for name, each in row["sources"].items()} == {
        name: {"loss", "tokens", "perplexity", "bits_per_byte"} for name in sources
    }
    assert Evaluation(math.nan, 1, 1, 1).row() == {
        "loss": None, "tokens": 1, "perplexity": None, "bits_per_byte": None,
    }  # fmt: skip


def test_text_of_no_bytes_has_no_division_by_zero():
    assert math.isfinite(Evaluation(1.0, 1, 1, 0).bits_per_byte)


def test_a_loss_on_nothing_is_an_error(step, sources):
    with pytest.raises(InputError, match="no token to measure"):
        evaluate(lambda parameters, batch: (0.0, 0), None, sources["a"], BATCH, meshes.make(1, 1, 1))
