import json
import random
import re
from pathlib import Path

import pyarrow.parquet
import pytest
from text_fixtures import lines, write, write_jsonl, write_parquet

from jaxlm.core.errors import InputError
from jaxlm.data import formats, parallel, tokenizer_training
from jaxlm.data.config import DataConfig
from jaxlm.data.scan import documents, scan_source
from jaxlm.data.sources import find_sources
from jaxlm.data.tokenizer_training import train_bpe, train_characters

TEXTS = [f"document {i} " + "word " * (i % 13) for i in range(3000)]


def look(path: Path, max_broken=0.001, said=None, held_out=0.1, **data):
    (source,) = find_sources(DataConfig(text=str(path), **data), print)
    say = (said if said is not None else []).append
    return scan_source(source._replace(held_out=held_out), max_broken, say, lambda *_: None)


def taken(found) -> list[str]:
    return [text for chunk in found.chunks for text in documents(chunk)]


def random_text(seed: int) -> str:
    """Make text that hardly compresses."""
    return random.Random(seed).randbytes(600).hex()


def refused(path: Path) -> tuple[int, int]:
    """Return (unreadable documents, all documents) of a refused file."""
    with pytest.raises(InputError, match="cannot be read") as error:
        look(path, max_broken=0.0)
    return tuple(int(n.replace(",", "")) for n in re.search(r"(\S+) of (\S+) documents", str(error.value)).groups())


def break_lines(path: Path, numbers: list[int]) -> Path:
    content = path.read_bytes().splitlines(keepends=True)
    for number in numbers:
        content[number - 1] = b"broken\n"
    path.write_bytes(b"".join(content))
    return path


@pytest.mark.parametrize("size", [500, 10**9])
def test_few_broken_lines_are_left_out_and_named(tmp_path, monkeypatch, size):
    monkeypatch.setattr(formats, "CHUNK_BYTES", size)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 1)
    path = break_lines(write(tmp_path / "a.jsonl", TEXTS), [5, 800, 2000, 2001, 3000])
    said: list[str] = []
    found = look(path, max_broken=0.002, said=said)
    assert len(taken(found)) == 2995
    assert [f"a.jsonl:{number} is not JSON" in line for number, line in zip((5, 800, 2000), said, strict=False)]
    assert len(said) == 4 and "5 of 3,000" in said[-1]


def test_too_many_broken_lines_stop_with_the_first(tmp_path):
    path = break_lines(write(tmp_path / "a.jsonl", TEXTS), [7, 8, 9, 10])
    with pytest.raises(InputError, match=r"data\.text: 4 of 3,000 documents.*data\.max_broken = 0\.001.*a\.jsonl:7 is"):
        look(path)
    assert len(taken(look(path, max_broken=0.0014))) == 2996


def test_no_broken_line_need_be_suffered(tmp_path):
    path = break_lines(write(tmp_path / "a.jsonl", TEXTS), [7])
    with pytest.raises(InputError, match="1 of 3,000"):
        look(path, max_broken=0.0)


def test_one_broken_file_of_few_stops(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text(f"text {i}")
    (tmp_path / "17.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="1 of 40 documents.*17.txt is not UTF-8"):
        look(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.gz"])
def test_a_wrong_field_stops_with_the_fields_there_are(tmp_path, name):
    with pytest.raises(InputError, match="\"content\", but 'id', 'text'"):
        look(write(tmp_path / name, TEXTS), field="content")


def test_a_wrong_field_is_found_without_reading_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 1)
    with pytest.raises(InputError, match=r"1,\d\d\d of 1,\d\d\d documents"):
        look(write(tmp_path / "a.jsonl", TEXTS), field="content")


def test_a_parquet_file_without_the_column_is_lost_with_all_its_rows(tmp_path):
    write(tmp_path / "a.parquet", TEXTS[:200])
    write(tmp_path / "b.parquet", TEXTS[:2000], "content")
    with pytest.raises(InputError, match=r'2,000 of 2,200 documents.*b\.parquet has no column "text"'):
        look(tmp_path)
    said: list[str] = []
    assert len(taken(look(tmp_path, max_broken=0.95, said=said))) == 200
    assert "2,000 of 2,200" in said[-1]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_cut_short_is_taken_to_have_lost_as_much_as_it_has(tmp_path, suffix):
    texts = [random_text(i) for i in range(1000)]
    path = write(tmp_path / f"a.jsonl{suffix}", texts)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    there = len(taken(look(path, max_broken=0.9)))
    assert 300 < there < 700
    broken, total = refused(path)
    assert broken + there == total and broken == pytest.approx(there, abs=2)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_lies_behind_damage_counts_by_its_bytes(tmp_path, suffix):
    path = write(tmp_path / f"a.jsonl{suffix}", [random_text(i) for i in range(500)])
    path.write_bytes(path.read_bytes() + b"garbage " * (path.stat().st_size * 3 // 8))
    broken, total = refused(path)
    assert broken + 500 == total == pytest.approx(2000, rel=0.2)


@pytest.mark.parametrize(("suffix", "count"), [(".gz", 50), (".gz", 800), (".zst", 800)])
def test_what_damage_loses_is_counted_by_what_comes_before_it(tmp_path, suffix, count):
    path = write(tmp_path / f"a.jsonl{suffix}", [random_text(i) for i in range(4 * count)])
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) // 2)
    path.write_bytes(content)
    there = len(taken(look(path, max_broken=0.99)))
    broken, total = refused(path)
    assert there and broken + there == total == pytest.approx(4 * count, rel=0.2)


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl.gz", "b.jsonl.zst"])
def test_a_file_that_tells_nothing_counts_by_its_bytes(tmp_path, name):
    size = write(tmp_path / "a.jsonl", TEXTS).stat().st_size
    (tmp_path / name).write_bytes(b"garbage " * (size // 8))
    with pytest.raises(InputError, match=r"3,00[01] of 6,00[01] documents"):
        look(tmp_path)


def test_a_file_that_is_alone_and_tells_nothing_is_one_document(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"garbage" * 100)
    with pytest.raises(InputError, match=r"1 of 1 documents.*a\.parquet is not a Parquet file"):
        look(tmp_path)


def test_rows_behind_damage_count_where_the_file_has_them(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [random_text(i) for i in range(1000)], rows=100)
    column = pyarrow.parquet.read_metadata(path).row_group(4).column(1)
    content = bytearray(path.read_bytes())
    at = column.dictionary_page_offset or column.data_page_offset
    content[at : at + 1000] = b"\xff" * 1000
    path.write_bytes(content)
    with pytest.raises(InputError, match="744 of 1,000 documents.*corrupt"):
        look(path)


def test_a_file_of_many_rows_without_the_column_does_not_end_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 1)
    write_parquet(tmp_path / "a.parquet", TEXTS[:2000], "content", rows=2000)
    write_parquet(tmp_path / "b.parquet", TEXTS, rows=3000)
    assert len(taken(look(tmp_path, max_broken=0.5))) == 3000


@pytest.mark.parametrize("count", [2, 100, 2999, 3000, 5000])
@pytest.mark.parametrize("size", [2000, 10**9])
def test_a_source_can_be_cut_short(tmp_path, monkeypatch, count, size):
    monkeypatch.setattr(formats, "CHUNK_BYTES", size)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 1)
    found = look(write(tmp_path / "a.jsonl", TEXTS), documents=count, held_out=1.0)
    assert taken(found) == TEXTS[:count]
    assert found.held_out_bytes == len("".join(TEXTS[:count]))


def test_one_document_among_empty_ones_is_alone(tmp_path):
    found = look(write(tmp_path / "a.jsonl", ["", "0123456789", ""]), held_out=0.3)
    assert found.split.alone and (found.train_bytes, found.held_out_bytes) == (7, 3)


def test_sizes_are_those_of_the_two_sides(tmp_path):
    found = look(write(tmp_path / "a.jsonl", TEXTS))
    sides = [found.split.divide(text) for text in TEXTS]
    assert found.train_bytes == sum(len(train) for train, _ in sides)
    assert found.held_out_bytes == sum(len(end) for _, end in sides)


def test_a_tokenizer_is_trained_on_an_even_sample_where_there_is_more_than_enough(tmp_path, monkeypatch):
    found = look(write(tmp_path / "a.jsonl", TEXTS))
    given: list[str] = []
    monkeypatch.setattr(
        tokenizer_training.tokenizers, "train_bpe", lambda texts, _: given.extend(t for ts in texts for t in ts)
    )
    for limit in (10**9, found.train_bytes // 4):
        monkeypatch.setattr(tokenizer_training, "TRAINING_BYTES", limit)
        given.clear()
        train_bpe([found], 300, lambda *_: None)
        training = [text for text in TEXTS if found.split.divide(text)[0]]
        assert set(given) <= set(training)
        assert len("".join(given)) == pytest.approx(min(limit, found.train_bytes), rel=0.15)
        assert given == [text for text in TEXTS if text in set(given)]
    half = TEXTS[: len(TEXTS) // 2]  # the sample covers the whole text, not its beginning
    assert len(set(given) & set(half)) == pytest.approx(len(given) / 2, rel=0.2)


@pytest.mark.parametrize("alphabet", ["ACGT", " \n"], ids=["letters", "blanks"])
def test_a_tokenizer_is_trained_on_long_text_without_words_in_little_time(tmp_path, alphabet):
    """Without cuts, training time is quadratic in the number of letters."""
    path = tmp_path / "a.txt"
    path.write_text("".join(random.Random(0).choices(alphabet, k=200_000)))
    assert train_bpe([look(path)], 300, lambda *_: None).vocab_size == 300


def test_runs_are_cut_and_words_are_not(tmp_path):
    texts = ["words " * 5000, "x" * 2048, f"a {'x' * 3000}\n{' ' * 2000}b"]
    found = [list(tokenizer_training._cut_runs(text)) for text in texts]
    assert [len(pieces) for pieces in found] == [1, 2, 3]
    assert ["".join(pieces) for pieces in found] == texts


def test_every_character_is_a_token(tmp_path):
    held_out = look(write(tmp_path / "a.jsonl", [*TEXTS, "ünique"]))
    other = look(write_jsonl(tmp_path / "b.jsonl", ["Σ", "σ", "ς", *"abc"]), held_out=0.5)
    tokenizer = train_characters([held_out, other], lambda *_: None)
    assert tokenizer.vocab_size == len(set("".join(TEXTS) + "ünique" + "Σσςabc"))


def test_fields_may_differ_between_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS[:5]) + json.dumps({"text": "and", "more": [1, {"a": 2}]}).encode())
    assert taken(look(path, held_out=1.0)) == [*TEXTS[:5], "and"]
