import errno
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from matrices import sampled
from store_fixtures import write_store
from text_fixtures import RECORDS, write

from jaxlm.core.errors import InputError
from jaxlm.data import formats, parallel, scan, store, tokenizing
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare, tokenize_whole
from jaxlm.data.parallel import in_order
from jaxlm.data.store import TokenStore
from jaxlm.data.tokenizers import bytes_tokenizer

TEXTS = [f"document {i}: " + "some words " * (i % 7 + 1) for i in range(400)]
VOCABULARY = 300


@pytest.fixture
def describe(tmp_path):
    def describe(**changes) -> DataConfig:
        usual = {"text": str(tmp_path / "a.jsonl"), "tokenizer": "bytes", "cache": str(tmp_path / "cache")}
        return DataConfig(**{**usual, **changes})

    write(tmp_path / "a.jsonl", TEXTS)
    return describe


@pytest.fixture
def in_chunks(monkeypatch):
    """Cut files into many chunks, tokenized in this process. Returns the numbers of the tokenized chunks."""
    monkeypatch.setattr(formats, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 1)
    tokenized: list[int] = []
    whole = tokenizing._tokenize_chunk

    def noted(job):
        whole(job)
        tokenized.append(int(job.directory.name))

    monkeypatch.setattr(tokenizing, "_tokenize_chunk", noted)
    return tokenized


def read_all(store: TokenStore) -> list[str]:
    tokenizer = bytes_tokenizer()
    return [tokenizer.decode(store.read(i, 0, n)) for i, n in enumerate(store.lengths)]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("name", RECORDS)
def test_documents_stay_in_their_order(describe, tmp_path, in_chunks, name):
    (source,) = prepare(describe(text=str(write(tmp_path / name, TEXTS))), VOCABULARY).sources.values()
    train, held_out = read_all(source.train), read_all(source.held_out)
    assert sorted(train + held_out) == sorted(TEXTS)
    for side in (train, held_out):
        assert side and side == [text for text in TEXTS if text in set(side)]


def test_the_format_makes_no_difference(describe, tmp_path):
    digests = {prepare(describe(text=str(write(tmp_path / name, TEXTS))), VOCABULARY).digest for name in RECORDS}
    assert len(digests) == 1


@pytest.mark.parametrize("tokenizer", sampled(["bytes", "characters", "bpe"], ["bpe"]))
def test_how_text_is_cut_into_parts_makes_no_difference(describe, tmp_path, monkeypatch, tokenizer):
    def built(cache: str):
        data = prepare(describe(tokenizer=tokenizer, cache=str(tmp_path / cache)), VOCABULARY)
        (source,) = data.sources.values()
        return data.digest, data.tokenizer.to_json(), files(source.train.directory), files(source.held_out.directory)

    whole = built("whole")
    monkeypatch.setattr(formats, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 1)
    assert built("cut") == whole
    monkeypatch.setattr(parallel, "usable_cores", lambda: 2)
    assert built("by two processes") == whole


def test_what_is_whole_is_not_tokenized_again(describe, tmp_path, in_chunks, monkeypatch):
    def breaks_off(doing, done, size):
        if doing.startswith("tokenizing") and done > size / 2:
            raise KeyboardInterrupt

    expected = prepare(describe(cache=str(tmp_path / "other")), VOCABULARY)
    chunks = sorted(in_chunks)
    assert len(chunks) > 10
    in_chunks.clear()
    with pytest.raises(KeyboardInterrupt):
        prepare(describe(), VOCABULARY, progress=breaks_off)
    before = list(in_chunks)
    assert 0 < len(before) < len(chunks)

    in_chunks.clear()
    reported: list[int] = []
    whole = prepare(describe(), VOCABULARY, progress=lambda doing, done, _: reported.append((doing, done)))
    assert sorted(before + in_chunks) == chunks
    assert whole.digest == expected.digest
    tokenized = [done for doing, done in reported if doing == "tokenizing data"]
    assert tokenized == sorted(tokenized) and tokenized[0] > tokenized[-1] / 2  # it resumes
    assert not list((tmp_path / "cache" / "datasets").glob("*.chunks"))


def test_a_part_that_is_not_whole_is_made_anew(describe, tmp_path, in_chunks, monkeypatch):
    expected = prepare(describe(cache=str(tmp_path / "other")), VOCABULARY).digest
    writer = tokenizing.StoreWriter
    count = 0

    class BreaksOff(writer):
        def add(self, text):
            nonlocal count
            count += 1
            if count == 150:
                raise KeyboardInterrupt
            super().add(text)

    in_chunks.clear()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tokenizing, "StoreWriter", BreaksOff)
        prepare(describe(), VOCABULARY)
    assert 0 < len(in_chunks)
    assert prepare(describe(), VOCABULARY).digest == expected


SCRIPT = """
import signal, sys, time
from jaxlm.data import formats, parallel, store, tokenizing
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by default in the background
    formats.CHUNK_BYTES = 3000
    parallel.usable_cores = lambda: int(sys.argv[3])
    def progress(doing, done, size):
        if doing.startswith("tokenizing"):
            print(done, flush=True)
            time.sleep(float(sys.argv[4]))
    data = DataConfig(text=sys.argv[1], tokenizer="bytes", cache=sys.argv[2])
    print(prepare(data, 300, progress=progress).digest)
"""


@pytest.mark.parametrize(
    ("number", "cores"),
    sampled(
        [
            pytest.param(number, cores, id=f"{name}-{cores}")
            for number, name in ((signal.SIGKILL, "killed"), (signal.SIGINT, "interrupted"))
            for cores in (1, 2)
        ],
        ["interrupted-1", "killed-2"],
    ),
)
def test_a_process_that_was_killed_is_gone_on_with(describe, tmp_path, number, cores):
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(formats.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}

    def start(pause: float) -> subprocess.Popen:
        arguments = [tmp_path / "a.jsonl", tmp_path / "cache", cores, pause]
        command = [sys.executable, tmp_path / "script.py", *arguments]
        return subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip

    with start(0.2) as first:
        for _ in range(4):
            assert first.stdout.readline()
        if number == signal.SIGINT:
            os.killpg(first.pid, number)  # as a terminal does
        else:
            first.send_signal(number)
        began = time.monotonic()
        first.wait()
        assert first.stdout.read() is not None  # ends when the last process closes it
        assert time.monotonic() - began < 5
    (work,) = (tmp_path / "cache" / "datasets").glob("*.chunks")
    whole = {path.name: path.stat().st_ino for path in work.glob("0*")}
    assert len(whole) >= 4

    with start(0.0) as second:
        *done, digest = second.stdout.read().split()
    chunks = -(-os.path.getsize(tmp_path / "a.jsonl") // 3000)
    assert len(done) == chunks - len(whole)
    assert digest == prepare(describe(cache=str(tmp_path / "other")), VOCABULARY).digest


def test_few_documents_are_held_at_a_time(tmp_path):
    """The store consumes documents as they come: memory does not grow with their number."""
    alive: set[int] = set()
    most = 0

    class Document(str):
        pass

    def texts():
        nonlocal most
        for i in range(5000):
            document = Document(f"document {i} " + "text " * 100)
            alive.add(i)
            weakref.finalize(document, alive.discard, i)
            most = max(most, len(alive))
            yield document
            del document

    write_store(tmp_path / "store", texts(), bytes_tokenizer())
    assert most < 400


def test_long_documents_are_held_fewer_at_a_time(tmp_path, monkeypatch):
    sizes: list[int] = []
    tokenizer = bytes_tokenizer()
    encode = tokenizer.encode_documents
    monkeypatch.setattr(tokenizer, "encode_documents", lambda texts: sizes.append(len(texts)) or encode(texts))
    monkeypatch.setattr(store, "_CHARACTERS_AT_ONCE", 5000)
    write_store(tmp_path / "store", ("x" * 2000 for _ in range(7)), tokenizer)
    assert sizes == [3, 3, 1]


def test_other_text_is_tokenized_whole(describe, tmp_path):
    whole = tokenize_whole(describe(), str(write(tmp_path / "b.jsonl", TEXTS[:50])), bytes_tokenizer())
    assert read_all(whole) == TEXTS[:50]
    alone = tokenize_whole(describe(), str(write(tmp_path / "c.jsonl", TEXTS[:1])), bytes_tokenizer())
    assert read_all(alone) == TEXTS[:1]
    assert whole.predicted_bytes == len("".join(TEXTS[:50]).encode())
    assert whole.targets == int((whole.lengths - 1).sum())


def test_results_come_in_order_from_other_processes(monkeypatch):
    monkeypatch.setattr(parallel, "usable_cores", lambda: 2)
    assert list(in_order(str.upper, list("abcdefgh" * 5))) == list("ABCDEFGH" * 5)


def test_an_error_in_another_process_is_raised_here(monkeypatch):
    monkeypatch.setattr(parallel, "usable_cores", lambda: 2)
    with pytest.raises(ValueError, match="invalid literal"):
        list(in_order(int, ["1", "2", "three"]))


def test_shards_of_parts_are_joined(describe, tmp_path, in_chunks, monkeypatch):
    whole = prepare(describe(cache=str(tmp_path / "other")), VOCABULARY).sources["data"].train
    monkeypatch.setattr(store, "SHARD_TOKENS", 2000)
    (source,) = prepare(describe(), VOCABULARY).sources.values()
    shards = [np.load(path) for path in sorted(source.train.directory.glob("tokens-*.npy"))]
    assert len(shards) > 5 and max(map(len, shards)) <= 2000
    assert read_all(source.train) == read_all(whole)


@pytest.fixture
def tallied(monkeypatch):
    """The document counts of the chunks that are scanned, in this process."""
    counts: list[int] = []
    whole = scan._tally

    def noted(chunk, split):
        tally = whole(chunk, split)
        counts.append(tally.documents)
        return tally

    monkeypatch.setattr(scan, "_tally", noted)
    return counts


@pytest.mark.parametrize("torn", [b"", b"[12, 34", b"\x00" * 9, b"[1]\n[2]\n"])
def test_a_scan_that_breaks_off_goes_on(describe, tmp_path, in_chunks, tallied, torn):
    """A partly written last line of the log is discarded."""

    def stop(what, done, size):
        if what.startswith("reading") and len(tallied) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(describe(), VOCABULARY, progress=stop)
    (log,) = (tmp_path / "cache/scans").iterdir()
    with log.open("ab") as file:
        file.write(torn)
    before = [*tallied]
    dataset = prepare(describe(), VOCABULARY)
    assert before == tallied[:3] and sum(tallied) == len(TEXTS) and len(tallied) > 5
    assert dataset.digest == prepare(describe(cache=str(tmp_path / "other")), VOCABULARY).digest


def test_a_scan_serves_other_tokenizers(describe, in_chunks, tallied):
    prepare(describe(), VOCABULARY)
    chunks = len(tallied)
    prepare(describe(tokenizer="characters"), VOCABULARY)
    assert len(tallied) == chunks
    prepare(describe(held_out=0.2), VOCABULARY)
    assert len(tallied) == 2 * chunks


def test_what_could_not_be_read_is_read_again(describe, tmp_path, in_chunks, tallied, monkeypatch):
    """A read error may pass without changing the size or time of the file."""
    allowed: list[bool] = []

    def refuse(path):
        if str(path).endswith("b.jsonl") and not allowed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, "rb")

    write(tmp_path / "b.jsonl", TEXTS[:100])
    monkeypatch.setattr(formats.buckets, "open_binary", refuse)
    with pytest.raises(InputError, match="cannot be read"):
        prepare(describe(text=str(tmp_path / "*.jsonl")), VOCABULARY)
    before = len(tallied)
    allowed.append(True)
    assert prepare(describe(text=str(tmp_path / "*.jsonl")), VOCABULARY).sources
    assert 0 < len(tallied) - before < before


def test_a_scan_that_was_refused_serves_who_suffers_it(describe, tmp_path, in_chunks, tallied):
    path = tmp_path / "a.jsonl"
    path.write_bytes(path.read_bytes() + b"broken\n" * 5)
    with pytest.raises(InputError, match="max_broken"):
        prepare(describe(), VOCABULARY)
    chunks = len(tallied)
    assert prepare(describe(max_broken=0.1), VOCABULARY).sources
    assert len(tallied) - chunks < chunks


def test_a_scan_of_what_was_there_before_is_forgotten(describe, tmp_path, in_chunks, tallied):
    """A file may change without a change of its size or time."""

    def stop(what, done, size):
        if what.startswith("tokenizing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(describe(max_broken=0.5), VOCABULARY, progress=stop)
    path = tmp_path / "a.jsonl"
    stamp, content = path.stat().st_mtime_ns, path.read_bytes()
    path.write_bytes(content[:-200] + b" " * 199 + b"\n")
    os.utime(path, ns=(stamp, stamp))
    with pytest.raises(InputError, match="changed while it was read; restart"):
        prepare(describe(max_broken=0.5), VOCABULARY)
    assert prepare(describe(max_broken=0.5), VOCABULARY).sources
