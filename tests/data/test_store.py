import json

import numpy as np
import pytest
import tokenizer_fixtures
from store_fixtures import write_store

from jaxlm.data import store, tokenizers
from jaxlm.data.store import TokenStore, join_stores, predicted_bytes
from jaxlm.data.tokenizers import bytes_tokenizer, characters_tokenizer

BYTES = bytes_tokenizer()
SHARD = 50


@pytest.fixture
def texts():
    """Documents for several batches, with empty ones, one of exactly a shard and a larger one."""
    draw = np.random.default_rng(0)
    texts = ["".join(map(chr, draw.integers(32, 1000, n))) for n in draw.integers(0, 15, 600)]
    return [*texts[:300], "x" * (SHARD - 2), "y" * 3 * SHARD, "", *texts[300:]]


def read_all(written: TokenStore) -> list[list[int]]:
    return [written.read(i, 0, n).tolist() for i, n in enumerate(written.lengths)]


def shards(written: TokenStore) -> list[np.ndarray]:
    return [np.load(path) for path in sorted(written.directory.glob("tokens-*.npy"))]


def encoded(texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in BYTES.encode_documents(texts)]


@pytest.fixture
def sharded(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_TOKENS", SHARD)
    return write_store(tmp_path / "store", texts, BYTES)


def test_documents_come_back_through_many_shards(sharded, texts):
    assert len(shards(sharded)) > 20
    assert read_all(sharded) == encoded(texts)


def test_a_store_opened_again_is_the_same(sharded, texts):
    assert read_all(TokenStore(sharded.directory)) == encoded(texts)


def test_lengths_include_the_separators(sharded, texts):
    assert sharded.lengths.tolist() == [len(text.encode()) + 2 for text in texts]


def test_a_part_of_a_document_can_be_read(sharded, texts):
    longest = int(sharded.lengths.argmax())
    assert sharded.read(longest, 3, 7).tolist() == encoded(texts)[longest][3:10]


def test_no_document_lies_in_two_shards(sharded, texts):
    """A shard exceeds its size only for a single larger document."""
    separators = [np.count_nonzero(tokens == BYTES.separator) for tokens in shards(sharded)]
    assert all(count % 2 == 0 for count in separators) and sum(separators) == 2 * len(texts)
    sizes = [len(tokens) for tokens in shards(sharded)]
    assert all(size <= SHARD or count == 2 for size, count in zip(sizes, separators, strict=True))


def test_shards_are_filled_before_the_next_begins(sharded):
    sizes = [len(tokens) for tokens in shards(sharded)]
    firsts = [np.flatnonzero(tokens == BYTES.separator)[1] + 1 for tokens in shards(sharded)]
    assert all(size + first > SHARD for size, first in zip(sizes[:-1], firsts[1:], strict=True))


def test_one_shard_holds_what_fits(texts, tmp_path):
    written = write_store(tmp_path / "store", texts, BYTES)
    assert len(shards(written)) == 1
    assert read_all(written) == encoded(texts)


def test_ids_have_the_type_of_the_tokenizer(tmp_path):
    characters = "".join(chr(i) for i in range(0x11000) if not 0xD800 <= i < 0xE000)
    wide = write_store(tmp_path / "wide", [characters], characters_tokenizer([characters]))
    narrow = write_store(tmp_path / "narrow", ["text"], BYTES)
    assert [shard.dtype for shard in shards(wide) + shards(narrow)] == [np.uint32, np.uint16]
    assert wide.read(0, 2**16, 2).tolist() == [2**16, 2**16 + 1]


def test_nothing_can_be_stored(tmp_path):
    assert len(write_store(tmp_path / "store", [], BYTES).lengths) == 0


def test_every_byte_is_predicted_behind_a_separator(texts):
    assert predicted_bytes(texts, BYTES) == len("".join(texts).encode())


def test_the_first_character_is_given_without_a_separator(texts):
    expected = sum(len(text[1:].encode()) for text in texts)
    assert 0 < predicted_bytes(texts, characters_tokenizer(texts)) == expected


def test_part_of_a_character_can_be_given(tmp_path):
    values = json.loads(BYTES.to_json())
    values["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = tokenizers.load(tmp_path / "tokenizer.json")
    assert tokenizer.separator is None
    assert predicted_bytes(["ab", "éb", "😀b", ""], tokenizer) == 1 + 2 + 4 + 0


def test_bytes_that_are_dropped_are_not_predicted(tmp_path):
    store = write_store(tmp_path / "dropped", ["ab你b", "你你", "ab"], tokenizer_fixtures.dropping("ab"))
    assert store.sizes == {"predicted_bytes": 5, "dropped_bytes": 9, "unknown_tokens": 0}
    join_stores(tmp_path / "joined", [tmp_path / "dropped"] * 2)
    assert TokenStore(tmp_path / "joined").sizes == {"predicted_bytes": 10, "dropped_bytes": 18, "unknown_tokens": 0}


def test_unknown_tokens_are_counted(tmp_path):
    store = write_store(tmp_path / "unknown", ["ab 你 b", "x"], tokenizer_fixtures.wordpiece("ab"))
    assert store.sizes["unknown_tokens"] == 2 and store.sizes["dropped_bytes"] == 0
