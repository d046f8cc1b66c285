import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tokenizer_fixtures

from jaxlm.core.errors import InputError
from jaxlm.core.files import building
from jaxlm.data import dataset, tokenizer_training, tokenizing
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare
from jaxlm.data.packing import Rows
from jaxlm.data.scan import scan_source
from jaxlm.data.store import join_stores
from jaxlm.data.tokenizers import characters_tokenizer

VOCABULARY = 300


def texts(count: int = 40) -> list[str]:
    return [f"document {i}: " + "some words " * (i % 7 + 1) for i in range(count)]


@pytest.fixture
def text(tmp_path):
    """A folder of forty documents."""
    (tmp_path / "text").mkdir()
    for i, content in enumerate(texts()):
        (tmp_path / "text" / f"{i:02d}.txt").write_text(content)
    return tmp_path / "text"


@pytest.fixture
def describe(text, tmp_path):
    """Make a data configuration of that text, with its cache in the test's folder."""

    def describe(**changes) -> DataConfig:
        usual = {"text": str(text), "tokenizer": "bytes", "cache": str(tmp_path / "cache")}
        return DataConfig(**{**usual, **changes})

    return describe


def in_cache(tmp_path) -> list[str]:
    return sorted(os.listdir(tmp_path / "cache" / "datasets"))


def decoded(data: dataset.Dataset, split: str) -> set[str]:
    """Decode the documents of one side of all sources."""
    stores = [getattr(source, split) for source in data.sources.values()]
    return {data.tokenizer.decode(store.read(i, 0, n)) for store in stores for i, n in enumerate(store.lengths)}


def manifests(tmp_path) -> dict:
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("manifest.json")}


@pytest.mark.parametrize("tokenizer", ["bytes", "characters", "bpe"])
def test_both_splits_together_are_the_text(describe, tokenizer):
    data = prepare(describe(tokenizer=tokenizer, held_out=0.3), VOCABULARY)
    assert decoded(data, "train") | decoded(data, "held_out") == set(texts())
    assert not decoded(data, "train") & decoded(data, "held_out")


def test_held_out_bytes_are_those_of_the_held_out_documents(describe):
    data = prepare(describe(), VOCABULARY)
    assert data.held_out_bytes == sum(map(len, decoded(data, "held_out"))) > 0


def test_the_tokenizer_is_trained_on_the_training_text_alone(describe, text):
    before = prepare(describe(tokenizer="bpe"), VOCABULARY)
    unseen = [path for path in text.iterdir() if path.read_text() in decoded(before, "held_out")]
    for path in unseen[1:]:
        path.unlink()
    after = prepare(describe(tokenizer="bpe"), VOCABULARY)
    assert decoded(after, "held_out") < decoded(before, "held_out")
    assert after.tokenizer.to_json() == before.tokenizer.to_json()


def test_what_was_built_is_used_again(describe, tmp_path):
    said: list[str] = []
    first = prepare(describe(), VOCABULARY, said.append)
    assert said and (built := manifests(tmp_path))
    said.clear()
    again = prepare(describe(), VOCABULARY, said.append)
    assert not said and manifests(tmp_path) == built
    assert again.digest == first.digest and again.held_out_bytes == first.held_out_bytes


@pytest.fixture
def broken(tmp_path):
    """A file of a hundred valid lines and ten broken ones."""
    good = [json.dumps({"text": content}) for content in texts(100)]
    (tmp_path / "broken.jsonl").write_text("\n".join([*good, *["broken"] * 10]))
    return str(tmp_path / "broken.jsonl")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_what_was_built_is_refused_where_too_much_of_the_text_is_broken(describe, broken, tokenizer):
    prepare(describe(text=broken, tokenizer=tokenizer, max_broken=0.5), VOCABULARY)
    with pytest.raises(InputError, match=r"10 of 110 documents.*data\.max_broken = 0\.001.*jsonl:101 is not JSON"):
        prepare(describe(text=broken, tokenizer=tokenizer), VOCABULARY)


def test_what_is_left_out_is_said_each_time(describe, broken):
    said: list[str] = []
    first = prepare(describe(text=broken, max_broken=0.5), VOCABULARY, said.append)
    summary = [line for line in said if "10 of 110" in line]
    said.clear()
    again = prepare(describe(text=broken, max_broken=0.2), VOCABULARY, said.append)
    assert said == summary and len(summary) == 1 and again.digest == first.digest


def test_tokens_from_before_skipped_documents_were_counted_are_used(describe, tmp_path):
    first = prepare(describe(), VOCABULARY)
    for manifest in manifests(tmp_path):
        manifest.write_text(json.dumps({"digest": json.loads(manifest.read_text())["digest"]}))
    assert prepare(describe(), VOCABULARY).digest == first.digest


def test_skipped_documents_of_earlier_manifests_count(describe, broken, tmp_path):
    prepare(describe(text=broken, max_broken=0.5), VOCABULARY)
    for manifest in manifests(tmp_path):
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({"digest": content["digest"], "losses": content["skipped"]}))
    with pytest.raises(InputError, match="10 of 110 documents"):
        prepare(describe(text=broken), VOCABULARY)


def test_a_changed_file_is_read_again(describe, text, tmp_path):
    first = prepare(describe(), VOCABULARY)
    (text / "00.txt").write_text("something else entirely")
    second = prepare(describe(), VOCABULARY)
    assert second.digest != first.digest and len(in_cache(tmp_path)) == 2
    assert "something else entirely" in decoded(second, "train") | decoded(second, "held_out")


def test_a_touched_file_is_read_again_into_the_same_data(describe, text):
    first = prepare(describe(), VOCABULARY)
    os.utime(text / "00.txt", (1, 1))
    said: list[str] = []
    assert prepare(describe(), VOCABULARY, said.append).digest == first.digest
    assert said


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("other words")], ids=["gone", "other"])
@pytest.mark.parametrize("tokenizer", ["bytes", "characters", "bpe"])
def test_text_that_changes_while_it_is_read_is_refused_and_not_kept(describe, text, monkeypatch, change, tokenizer):
    def interrupted(*arguments):
        found = scan_source(*arguments)
        change(text / "00.txt")
        return found

    with monkeypatch.context() as patched, pytest.raises(InputError, match=r"00\.txt.* changed while it was read"):
        patched.setattr(dataset, "scan_source", interrupted)
        prepare(describe(tokenizer=tokenizer), VOCABULARY)
    kept = [path for path in Path(describe().cache).rglob("*") if path.is_file() and path.parent.name != "locks"]
    assert not kept and prepare(describe(tokenizer=tokenizer), VOCABULARY)


def test_a_file_that_vanishes_when_its_tokenizer_is_trained_is_named(describe, text, monkeypatch):
    def trained(*arguments):
        (text / "00.txt").unlink()
        return tokenizer_training.train_bpe(*arguments)

    bpe = tokenizer_training.KINDS["bpe"]._replace(make=trained)
    monkeypatch.setitem(tokenizer_training.KINDS, "bpe", bpe)
    with pytest.raises(InputError, match=r"00\.txt.* changed while it was read"):
        prepare(describe(tokenizer="bpe"), VOCABULARY)


@pytest.mark.parametrize("change", [("held_out", 0.4), ("tokenizer", "characters"), ("tokenizer", "bpe")], ids=str)
def test_another_choice_is_other_data(describe, change):
    assert prepare(describe(**dict([change])), VOCABULARY).digest != prepare(describe(), VOCABULARY).digest


def test_another_bpe_vocabulary_is_another_tokenizer(describe):
    sizes = [prepare(describe(tokenizer="bpe"), size).tokenizer.vocab_size for size in (270, 280)]
    assert sizes == [270, 280]


def test_a_tokenizer_file_counts_by_its_content(describe, tmp_path):
    def built(name: str, characters: list[str]) -> tuple[bool, str]:
        said: list[str] = []
        characters_tokenizer(characters).save(tmp_path / name)
        digest = prepare(describe(tokenizer=str(tmp_path / name)), VOCABULARY, said.append).digest
        return bool(said), digest

    _, first = built("mine.json", texts())
    assert built("moved.json", texts()) == (False, first)
    anew, second = built("mine.json", [*texts(), "!"])
    assert anew and second != first


def test_the_digest_does_not_depend_on_where_the_files_lie(describe, text, tmp_path):
    first = prepare(describe(), VOCABULARY)
    text.rename(tmp_path / "elsewhere")
    moved = describe(text=str(tmp_path / "elsewhere"), cache=str(tmp_path / "other cache"))
    assert prepare(moved, VOCABULARY).digest == first.digest


@pytest.mark.parametrize("tokenizer", ["characters", "bytes", "bpe"])
def test_a_vocabulary_that_is_too_small_is_refused_with_the_one_to_set(describe, tmp_path, tokenizer):
    needed = {"characters": len(set().union(*texts())), "bytes": 257, "bpe": 257}[tokenizer]
    with pytest.raises(InputError, match=f"model.vocab_size = {needed - 1} .*{needed}"):
        prepare(describe(tokenizer=tokenizer), needed - 1)
    assert not (tmp_path / "cache" / "datasets").exists() or in_cache(tmp_path) == []
    assert prepare(describe(tokenizer=tokenizer), needed).tokenizer.vocab_size == needed


def test_a_vocabulary_that_is_too_small_is_refused_for_data_in_the_cache_too(describe):
    prepare(describe(), VOCABULARY)
    with pytest.raises(InputError, match="set model.vocab_size=257"):
        prepare(describe(), 200)


def test_text_the_tokenizer_has_no_tokens_for_leaves_nothing_behind(describe, tmp_path):
    characters_tokenizer(["document"]).save(tmp_path / "few.json")
    with pytest.raises(InputError, match="the character"):
        prepare(describe(tokenizer=str(tmp_path / "few.json")), VOCABULARY)
    assert in_cache(tmp_path) == []


def test_a_build_that_breaks_off_leaves_nothing_behind_and_can_be_repeated(describe, tmp_path, monkeypatch):
    """Completed chunks stay, in a folder that is not taken for a dataset."""

    def breaks_off(directory, chunks):
        if directory.name == "held_out":
            raise KeyboardInterrupt
        return join_stores(directory, chunks)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tokenizing, "join_stores", breaks_off)
        prepare(describe(), VOCABULARY)
    (left,) = in_cache(tmp_path)
    assert left.endswith(".chunks")
    assert decoded(prepare(describe(), VOCABULARY), "held_out")
    assert in_cache(tmp_path) == [left.removesuffix(".chunks")]


def test_files_that_are_all_empty_are_refused(describe, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="data.text.*empty.txt.*empty"):
        prepare(describe(text=str(tmp_path / "empty.txt")), VOCABULARY)


def test_a_held_out_side_without_a_target_is_refused(describe, tmp_path):
    """A single held-out character leaves nothing to predict, and a loss over nothing would look perfect."""
    (tmp_path / "one.txt").write_text("ab" * 50)
    with pytest.raises(InputError, match="data.held_out"):
        prepare(describe(text=str(tmp_path / "one.txt"), tokenizer="characters", held_out=0.01), VOCABULARY)


def test_a_cache_that_cannot_be_written_is_refused(describe, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="data.cache"):
        prepare(describe(cache=str(tmp_path / "file")), VOCABULARY)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_cache_that_is_full_is_refused(describe, monkeypatch):
    @contextmanager
    def full(directory):
        with building(directory) as folder:
            (folder / "tokenizer.json").symlink_to("/dev/full")
            yield folder

    monkeypatch.setattr(dataset, "building", full)
    with pytest.raises(InputError, match=r"data\.cache: .* cannot be written \(No space left on device\)"):
        prepare(describe(tokenizer="bpe"), VOCABULARY)


def test_a_damaged_cache_is_refused_with_what_to_remove(describe, tmp_path):
    def load() -> str:
        data = prepare(describe(tokenizer="bpe"), VOCABULARY)
        Rows(data.sources["data"].train, 16)
        return data.digest

    whole = load()
    kept = [folder for name in ("tokenizers", "datasets") for folder in (tmp_path / "cache" / name).iterdir()]
    files = [path for folder in kept for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 9
    for path in files:
        for damage in (Path.unlink, lambda path: os.truncate(path, path.stat().st_size // 2)):
            damage(path)
            with pytest.raises(InputError, match=r"data\.cache: \S+ is corrupt .* remove it to rebuild it") as error:
                load()
            shutil.rmtree(str(error.value).split()[1])
            assert load() == whole and path.exists()


@pytest.mark.parametrize("sizes", ["[]", '{"predicted_bytes": "x"}'])
def test_sizes_that_are_none_are_refused(describe, tmp_path, sizes):
    (source,) = prepare(describe(), VOCABULARY).sources.values()
    (source.train.directory / "sizes.json").write_text(sizes)
    with pytest.raises(InputError, match="is corrupt"):
        prepare(describe(), VOCABULARY)


def test_a_list_of_no_documents_is_refused(describe, tmp_path):
    (source,) = prepare(describe(), VOCABULARY).sources.values()
    np.save(source.train.directory / "documents.npy", np.zeros(7, np.int64))
    with pytest.raises(InputError, match="is corrupt"):
        prepare(describe(), VOCABULARY)


def test_what_a_killed_process_leaves_is_removed(describe, tmp_path):
    prepare(describe(), VOCABULARY)
    (name,) = in_cache(tmp_path)
    (tmp_path / "cache" / "datasets" / f"{name}.chunks").mkdir()
    prepare(describe(), VOCABULARY)
    assert in_cache(tmp_path) == [name]
    (tmp_path / "cache" / "datasets" / name).rename(tmp_path / "cache" / "datasets" / f".{name}-{'0123' * 8}")
    prepare(describe(), VOCABULARY)
    assert in_cache(tmp_path) == [name]


def test_a_file_system_without_locks_will_do(describe, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    assert prepare(describe(), VOCABULARY)


def test_preparing_data_needs_no_jax():
    code = "import sys, jaxlm.data.dataset, jaxlm.data.packing; raise SystemExit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_the_tokenizer_does_not_know_is_said_at_every_start(describe, text, tmp_path):
    (text / "99.txt").write_text("你好 and more")
    letters = "".join(sorted(set("".join(texts()) + " and more")))
    for tokenizer, says in {
        tokenizer_fixtures.dropping(letters): "6 of .* bytes of data are characters without a token",
        tokenizer_fixtures.wordpiece(letters): "1 of .* tokens of data stand for text that the tokenizer does not know",
    }.items():
        tokenizer.save(tmp_path / "tokenizer.json")
        for _ in range(2):
            said: list[str] = []
            prepare(describe(tokenizer=str(tmp_path / "tokenizer.json")), VOCABULARY, said.append)
            assert re.search(says, said[-1])
