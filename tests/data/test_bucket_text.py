"""Text in buckets: found, streamed over connections that break, and known again when it changes."""

import gzip
import io
import json

import bucket_servers
import pyarrow
import pyarrow.parquet
import pytest
from bucket_servers import BUCKET

from jaxlm.core import buckets
from jaxlm.core.errors import InputError
from jaxlm.data import formats
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare
from jaxlm.data.sources import Changed, find_sources

TEXTS = [f"text {number} " + "word " * 2_000 for number in range(12)]


def _parquet(texts):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=2)
    return file.getvalue()


def _lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


FILES = {
    "a.txt": TEXTS[0].encode(),
    "b.jsonl": _lines(TEXTS[1:5]),
    "more/c.parquet": _parquet(TEXTS[5:9]),
    "more/d.jsonl.gz": gzip.compress(_lines(TEXTS[9:])),
    "more/picture.png": b"no text",
}


@pytest.fixture(scope="module", params=bucket_servers.SCHEMES)
def bucket(request):
    with bucket_servers.serving(request.param) as (proxy, _):
        url = f"{request.param}://{BUCKET}/text"
        for name, content in FILES.items():
            buckets.write(f"{url}/{name}", content)
        yield url, proxy


def documents(files):
    return [item for chunk in formats.cut(files, "text") for item in formats.read(chunk)]


def found(*entries, **more):
    (source,) = find_sources(DataConfig(text=entries, **more), print)
    return source


def test_files_folders_and_globs_of_a_bucket_are_read_as_streams(bucket, monkeypatch):
    url, proxy = bucket
    monkeypatch.setattr(formats, "CHUNK_BYTES", 20_000)
    proxy.cuts, proxy.after = 3, 9_000
    assert documents(found(url).files) == TEXTS
    assert proxy.cuts == 0
    assert documents(found(f"{url}/b.jsonl").files) == TEXTS[1:5]
    assert documents(found(f"{url}/*/*.parquet", f"{url}/a.txt").files) == [*TEXTS[5:9], TEXTS[0]]
    for entry in ("nothing", "more/*.txt", "more/picture.png"):
        with pytest.raises(InputError, match=f"data.text: {url}/.* is not a file, folder or glob of .txt, "):
            found(f"{url}/{entry}")


def test_text_of_a_bucket_is_tokenized_once_until_it_changes(bucket, tmp_path):
    url, said = f"{bucket[0]}/b.jsonl", []
    data = DataConfig(text=bucket[0], tokenizer="bytes", held_out=0.5, cache=str(tmp_path))
    first = prepare(data, 257, said.append)
    assert said and prepare(data, 257, lambda line: pytest.fail(line)).digest == first.digest
    source = found(bucket[0])
    source.check()
    buckets.write(url, _lines(TEXTS[4:0:-1]))  # of the same size
    with pytest.raises(Changed, match=f"data.text: {url} changed while it was read"):
        source.check()
    said.clear()
    assert prepare(data, 257, said.append).digest != first.digest and said
    buckets.write(url, FILES["b.jsonl"])


def test_text_of_a_bucket_that_cannot_be_reached_is_no_broken_document(bucket, monkeypatch):
    files = found(bucket[0]).files
    monkeypatch.setattr(buckets, "_TRIES", 1)
    chunks = formats.cut(files, "text")

    monkeypatch.setattr(buckets, "filesystem", lambda scheme: bucket_servers.Away())
    with pytest.raises(buckets.Unreachable, match="cannot be reached"):
        list(formats.read(chunks[0]))


def test_a_broken_document_of_a_bucket_is_named_by_its_address(bucket):
    url = f"{bucket[0]}/broken.jsonl"
    buckets.write(url, b'{"text": "whole"}\nbroken\n')
    whole, broken = documents(found(url).files)
    assert whole == "whole" and broken.where == f"{url}:2"
    buckets.remove(url)


def test_the_cache_of_tokens_is_a_folder_of_this_machine():
    with pytest.raises(ValueError, match="s3://b/cache is in a bucket.*give a folder here"):
        DataConfig(text="a", cache="s3://b/cache")
