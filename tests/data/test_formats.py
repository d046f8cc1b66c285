import gzip
import io
import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from text_fixtures import RECORDS, lines, write, write_parquet

from jaxlm.data import formats
from jaxlm.data.formats import Broken, FileChunk, cut, read

TEXTS = [f"document {i}, Grüße 😀\nand a line" + " more" * (i % 11) for i in range(100)]


def read_all(*files, field="text") -> list[str | Broken]:
    return [item for chunk in cut(files, field) for item in read(chunk)]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("field", ["text", "the content"])
def test_every_record_is_a_document(tmp_path, name, field):
    assert read_all(write(tmp_path / name, TEXTS, field), field=field) == TEXTS


@pytest.mark.parametrize("name", RECORDS)
def test_empty_documents_are_none(tmp_path, name):
    assert read_all(write(tmp_path / name, ["", "a", "", "b", ""])) == ["a", "b"]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("size", [1, 50, 333, 1000, 10**9])
def test_however_files_are_cut_they_give_their_documents_in_order(tmp_path, monkeypatch, name, size):
    monkeypatch.setattr(formats, "CHUNK_BYTES", size)
    files = [write(tmp_path / f"{i}{name}", TEXTS[10 * i : 10 * i + 10]) for i in range(10)]
    assert read_all(*files) == TEXTS


def test_large_files_are_cut_and_small_ones_go_together(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1000)
    large = write(tmp_path / "large.jsonl", TEXTS)
    small = [write(tmp_path / f"{i}.jsonl", ["tiny"]) for i in range(90)]
    assert len(cut([large], "text")) == -(-large.stat().st_size // 1000)
    assert 2 <= len(cut(small, "text")) <= 4
    for chunk in cut([large, *small], "text"):
        assert chunk.size <= 1000
    assert sum(chunk.size for chunk in cut([large], "text")) == large.stat().st_size


def test_a_line_longer_than_many_parts_is_not_read_by_each(tmp_path, monkeypatch):
    count = 0

    class CountingFile(io.FileIO):
        def readinto(self, buffer):
            nonlocal count
            count += (size := super().readinto(buffer))
            return size

    monkeypatch.setattr(formats, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(formats, "open", lambda path, _: io.BufferedReader(CountingFile(path)), raising=False)
    texts = ["first", "x" * 2**22, "last"]
    path = write(tmp_path / "a.jsonl", texts)
    assert read_all(path) == texts
    assert count < 4 * path.stat().st_size


def test_row_groups_share_the_bytes_of_a_parquet_file(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 600)
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    chunks = cut([path], "text")
    assert len(chunks) > 3
    assert sum(chunk.size for chunk in chunks) == pytest.approx(path.stat().st_size, abs=len(chunks))


def test_a_limit_takes_the_first_documents(tmp_path):
    chunk = cut([write(tmp_path / "a.jsonl", TEXTS)], "text")[0]
    assert list(read(chunk._replace(documents=7))) == TEXTS[:7]


LINES = {
    "not UTF-8": (b'{"text": "caf\xe9"}', "is not UTF-8"),
    "not JSON": (b'{"text": "a"', "is not JSON"),
    "words": (b"words", "is not JSON"),
    "a list": (b'["text"]', "not a JSON object"),
    "another field": (b'{"content": "a"}', "no field \"text\", but 'content'"),
    "a long field": (b'{"' + b"a\\n" * 1000 + b'": 1}', "but '" + r"a\n" * 13),
    "no field": (b"{}", 'no field "text", but none'),
    "a number": (b'{"text": 5}', 'no text in its field "text"'),
    "null": (b'{"text": null}', 'no text in its field "text"'),
    "half a character": (rb'{"text": "\ud83d"}', "not Unicode"),
    "too deep": (b"[" * 100_000, "is not JSON"),
    "a number too long": (b'{"text": ' + b"1" * 10_000 + b"}", 'no text in its field "text"'),
}


@pytest.mark.parametrize("case", LINES)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("size", [40, 10**6])
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path, monkeypatch, case, suffix, size):
    monkeypatch.setattr(formats, "CHUNK_BYTES", size)
    line, why = LINES[case]
    content = lines(TEXTS[:5]) + b"\n" + line + b"\n" + lines(TEXTS[5:9])
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    *before, broken, fourth, third, second, last = read_all(path)
    assert [*before, fourth, third, second, last] == TEXTS[:9]
    assert broken.where == f"{path}:7" and why in broken.why


DEEP = "[" * 100_000, "]" * 100_000
UNASKED = {
    "a long integer": "9" * 5_000,
    "a long negative integer": "-" + "9" * 10_000,
    "long digits": "0." + "9" * 5_000 + "e" + "9" * 5_000,
    "no number": "NaN",
    "half a character": r'"\ud83d"',
    "a deep array": "".join(DEEP),
    "deep objects": '{"text":' * 50_000 + "0" + "}" * 50_000,
    "brackets in a string": rf'[{DEEP[0]}{DEEP[1]}, "]]}}}}\\\"[{{"]',
}


@pytest.mark.parametrize("case", UNASKED)
@pytest.mark.parametrize("form", ['{"x": %s, "text": "a [\\"b\\"] {"}', '{"text": "a [\\"b\\"] {", "x": [%s, 1]}'])
def test_what_nobody_asked_for_loses_no_record(tmp_path, case, form):
    path = tmp_path / "a.jsonl"
    path.write_text(form % UNASKED[case] + "\n")
    assert read_all(path) == ['a ["b"] {']


def test_a_deep_value_without_its_end_is_no_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "x": ' + DEEP[0] + "}")
    (broken,) = read_all(path)
    assert broken.why == "is not JSON (100,000 brackets are not closed)"


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", *RECORDS])
def test_line_ends_stay_as_they_are(tmp_path, name):
    text = "# one\r\ntwo\rthree\n\r\n"
    path = tmp_path / name
    if name in RECORDS:
        write(path, [text])
    else:
        path.write_bytes(b"\xef\xbb\xbf" * (name == "a.txt") + text.encode())
    assert read_all(path) == [text]


def test_a_byte_order_mark_and_other_line_ends_are_no_matter(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n  \r\n{"text": "b"}')
    assert read_all(path) == ["a", "b"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_comes_before_the_damage_is_read(tmp_path, suffix):
    texts = ["".join(map(chr, np.random.default_rng(i).integers(97, 123, 5000))) for i in range(100)]
    path = write(tmp_path / f"a.jsonl{suffix}", texts)
    path.write_bytes(path.read_bytes()[:-20_000])
    *whole, broken = read_all(path)
    # The last line before the end may be broken too.
    whole = [item for item in whole if isinstance(item, str)]
    assert whole == texts[: len(whole)]
    assert broken.where == str(path) and "truncated" in broken.why


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("content", [b"garbage" * 100, b"\x1f\x8b garbage", b"\x28\xb5\x2f\xfd garbage"])
def test_what_is_not_compressed_is_broken(tmp_path, suffix, content):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(content)
    (broken,) = read_all(path)
    assert broken.where == str(path)


def test_several_frames_are_one_file(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines(["a"])) + zstandard.compress(lines(["b"])))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(["a"])) + gzip.compress(lines(["b"])))
    assert read_all(tmp_path / "a.jsonl.zst", tmp_path / "a.jsonl.gz") == ["a", "b"] * 2


def test_zeros_behind_a_gzip_file_are_no_matter(tmp_path):
    one, other = gzip.compress(lines(["a"])), gzip.compress(lines(["b"]))
    (tmp_path / "a.jsonl.gz").write_bytes(one + b"\0" * 9999 + other + b"\0")
    assert read_all(tmp_path / "a.jsonl.gz") == ["a", "b"]
    (tmp_path / "a.jsonl.gz").write_bytes(b"\0" * 9999)
    assert "corrupt" in read_all(tmp_path / "a.jsonl.gz")[0].why


def test_empty_files_hold_nothing(tmp_path):
    for name in ("a.jsonl", "a.txt", "a.jsonl.zst", "a.jsonl.gz"):
        (tmp_path / name).touch()
    assert read_all(*sorted(tmp_path.iterdir())) == []
    assert read_all(write_parquet(tmp_path / "a.parquet", [])) == []


def test_a_bad_parquet_file_is_broken(tmp_path):
    (tmp_path / "garbage.parquet").write_bytes(b"garbage" * 100)
    other = write_parquet(tmp_path / "other.parquet", ["a"], "content")
    damaged = write_parquet(tmp_path / "damaged.parquet", TEXTS * 10, rows=10**6)
    content = bytearray(damaged.read_bytes())
    column = pyarrow.parquet.read_metadata(damaged).row_group(0).column(1)
    content[column.dictionary_page_offset : column.data_page_offset] = b""
    damaged.write_bytes(content)
    for path, why in ((tmp_path / "garbage.parquet", "Parquet"), (other, "column \"text\", but 'id', 'content'")):
        (broken,) = read_all(path)
        assert broken.where == str(path) and why in broken.why
    assert any(isinstance(item, Broken) for item in read_all(damaged))


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_may_have_a_name_that_is_not_utf8(tmp_path, name):
    path = write(tmp_path / name, TEXTS)
    assert read_all(path.rename(tmp_path / os.fsdecode(b"\xff" + name.encode()))) == TEXTS


def test_a_parquet_column_that_is_no_text_breaks_each_row(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), tmp_path / "null.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "number.parquet")
    first, broken, last = read_all(tmp_path / "null.parquet")
    assert (first, last) == ("a", "c") and broken.where.endswith("null.parquet:2")
    assert [item.where[-2:] for item in read_all(tmp_path / "number.parquet")] == [":1", ":2"]


def test_documents_are_read_one_at_a_time(tmp_path):
    """Later documents are not read ahead, however large the file."""
    path = write(tmp_path / "a.jsonl", TEXTS)
    documents = read(FileChunk(cut([path], "text")[0].slices, "text"))
    assert next(documents) == TEXTS[0]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 10)
        file.truncate()
    assert len([item for item in documents if isinstance(item, str)]) in (98, 99)  # the end may be buffered


def test_json_is_read_as_python_writes_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": TEXTS[0]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_all(path) == TEXTS[:1]
