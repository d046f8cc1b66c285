"""Datasets by name, from a folder that replaces the network."""

import sys
import types

import pytest
from text_fixtures import write

from jaxlm.core.errors import InputError
from jaxlm.data import huggingface
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare
from jaxlm.data.formats import cut, read
from jaxlm.data.huggingface import fetch

TEXTS = [f"document {i} of the dataset" for i in range(95)]


@pytest.fixture
def asked(monkeypatch):
    """A fake package `datasets` with one dataset that records the rows read. Returns the list of requests."""
    asked = []

    class Stream(list):
        def skip(self, count):
            return Stream(self[count:])

        def take(self, count):
            return Stream(self[:count])

        def __iter__(self):
            for row in super().__iter__():
                asked.append(row["text"])
                yield row

    def load_dataset(path, name, *, split, streaming):
        asked.append((path, name, split, streaming))
        return Stream({"id": i, "text": text} for i, text in enumerate(TEXTS))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(huggingface, "_ROWS_PER_FILE", 10)
    return asked


def get(entry, cache, documents=95, field="text", said=None) -> list:
    files = fetch(entry, field, documents, cache, "data.text", (said if said is not None else []).append)
    return [item for part in cut(files, field) for item in read(part)]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("hf:owner/name", ("owner/name", None, "train", True)),
        ("hf:owner/name:en", ("owner/name", "en", "train", True)),
        ("hf:owner/name@validation", ("owner/name", None, "validation", True)),
        ("hf:owner/name:en@validation", ("owner/name", "en", "validation", True)),
    ],
)
def test_a_name_says_configuration_and_split(asked, tmp_path, entry, expected):
    assert get(entry, tmp_path, 5) == TEXTS[:5]
    assert asked == [expected, *TEXTS[:5]]


@pytest.mark.parametrize("documents", [1, 9, 10, 11, 94, 95, 1000])
def test_as_many_rows_are_fetched_as_are_asked_for(asked, tmp_path, documents):
    said: list[str] = []
    assert get("hf:owner/name", tmp_path, documents, said=said) == TEXTS[:documents]
    assert f"{min(documents, 95)} of {documents:,} documents" in said[-1]


def test_what_was_fetched_is_not_fetched_again(asked, tmp_path):
    get("hf:owner/name", tmp_path)
    asked.clear()
    assert get("hf:owner/name", tmp_path) == TEXTS
    assert asked == []


def test_fetching_goes_on_where_it_broke_off(asked, tmp_path):
    def breaks_off(line):
        if "30 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("hf:owner/name", "text", 95, tmp_path, "data.text", breaks_off)
    asked.clear()
    assert get("hf:owner/name", tmp_path) == TEXTS
    assert asked[1:] == TEXTS[30:]


def test_a_number_of_documents_is_needed(tmp_path):
    with pytest.raises(InputError, match="data.text: hf:owner/name may be endless; set data.documents"):
        prepare(DataConfig(text="hf:owner/name", cache=str(tmp_path)), 300)
    sources = {"web": {"text": "hf:owner/name"}}
    with pytest.raises(InputError, match="set data.sources.web.documents"):
        prepare(DataConfig(sources=sources, cache=str(tmp_path)), 300)


def test_the_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[hf\]'"):
        get("hf:owner/name", tmp_path)


@pytest.mark.parametrize("entry", ["hf:", "hf:a:b:c", "hf:a@b@c", "hf:owner/name@"])
def test_what_names_no_dataset_is_refused(tmp_path, entry):
    with pytest.raises(InputError, match="hf:OWNER/NAME"):
        get(entry, tmp_path)


def test_a_wrong_field_is_refused_with_those_there_are(asked, tmp_path):
    with pytest.raises(InputError, match="no field \"content\", but 'id', 'text'"):
        get("hf:owner/name", tmp_path, field="content")


def test_a_dataset_is_a_source(asked, tmp_path):
    data = DataConfig(text="hf:owner/name", documents=50, tokenizer="bytes", cache=str(tmp_path))
    (source,) = prepare(data, 300).sources.values()
    assert len(source.train.lengths) + len(source.held_out.lengths) == 50


def test_the_package_itself_reads_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface, "_ROWS_PER_FILE", 30)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", TEXTS)
    entry = f"hf:{tmp_path / 'folder'}"
    assert get(entry, tmp_path / "cache", 80) == TEXTS[:80]
    for wrong in (f"{entry}@nothing", f"{entry}:nothing", f"hf:{tmp_path / 'nowhere'}"):
        with pytest.raises(InputError, match="data.text: hf:.* cannot be read"):
            get(wrong, tmp_path / "cache")
