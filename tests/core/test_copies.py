"""Copies of what is in buckets: brought here once, brought back when they change, and never half of them."""

import os
import time

import bucket_servers
import pytest
from bucket_servers import BUCKET, content

from jaxlm.core import addresses, buckets, copies
from jaxlm.core.addresses import place
from jaxlm.core.errors import InputError
from jaxlm.core.files import lock
from jaxlm.training.paths import small_files, written_apart


@pytest.fixture(scope="module", params=bucket_servers.SCHEMES)
def bucket(request):
    with bucket_servers.serving(request.param):
        yield f"{request.param}://{BUCKET}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(url, **files):
    for name, text in files.items():
        buckets.write(f"{url}/{name.replace('__', '/')}", text.encode())
    return place(url)


def names(folder):
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_an_address_is_a_path_of_this_machine_and_back(cache):
    folder = place("gs://bucket//a/./b/")
    assert folder == cache / "jaxlm" / "buckets" / "gs" / "bucket" / "a" / "b"
    assert addresses.address(folder) == "gs://bucket/a/b"
    assert addresses.with_addresses(f"no {folder}/c.txt") == "no gs://bucket/a/b/c.txt"
    assert str(InputError(f"there is no {folder}")) == "there is no gs://bucket/a/b"
    assert place("runs/a").as_posix() == "runs/a" and addresses.address(place("/gs/a")) is None
    for wrong in ("gs://", "s3:///", "hf://bucket/../other"):
        with pytest.raises(ValueError, match="is no address in a bucket"):
            place(wrong)


def test_a_folder_is_copied_once_and_what_changed_again(bucket, monkeypatch):
    folder = written(f"{bucket}/once", a="1", b__c="2")
    copies.pull(folder)
    assert names(folder) == ["a", "b/c"] and (folder / "b/c").read_text() == "2"
    opened = []
    reader = buckets.open_binary
    monkeypatch.setattr(buckets, "open_binary", lambda file: opened.append(str(file)) or reader(file))
    copies.pull(folder)
    assert opened == []
    buckets.write(f"{bucket}/once/a", b"3")
    buckets.remove(f"{bucket}/once/b/c")
    copies.pull(folder)
    assert opened == [f"{bucket}/once/a"] and names(folder) == ["a"] and (folder / "a").read_text() == "3"
    (folder / "a").write_text("changed here")
    copies.pull(folder)
    assert (folder / "a").read_text() == "3"
    buckets.remove(f"{bucket}/once/a")
    copies.pull(folder)
    assert not folder.exists()


def test_what_changed_here_is_uploaded_and_what_completes_a_folder_comes_last(bucket, monkeypatch):
    folder = place(f"{bucket}/up")
    folder.mkdir(parents=True)
    for name in ("config.toml", "data.json", "metrics.jsonl", "lock"):
        (folder / name).write_text(name)
    order = []
    upload = buckets.upload
    monkeypatch.setattr(buckets, "upload", lambda file, url: order.append(url) or upload(file, url))
    copies.push(folder, leave_out=written_apart)
    assert sorted(order[:2]) == [f"{bucket}/up/data.json", f"{bucket}/up/metrics.jsonl"]
    assert order[2:] == [f"{bucket}/up/config.toml"] and len(buckets.find(f"{bucket}/up")) == 3
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("more")
    copies.push(folder, leave_out=written_apart)
    assert order[3:] == [f"{bucket}/up/metrics.jsonl"]
    with buckets.open_binary(order[-1]) as file:
        assert file.read() == b"metrics.jsonlmore"
    with pytest.raises(InputError, match="://no-such-bucket/a cannot be written: there is no such bucket"):
        other = place(f"{bucket.partition('://')[0]}://no-such-bucket/a")
        other.parent.mkdir(parents=True)
        other.write_text("text")
        copies.push(other)


def test_a_checkpoint_that_was_not_written_to_its_end_is_none(bucket):
    whole = {"checkpoints__1__parameters__d": "numbers", "checkpoints__1__metrics__metrics": "{}"}
    folder = written(
        f"{bucket}/run",
        **{"config.toml": "", "checkpoints__1__checksums.json": "{}", **whole},
        **{name.replace("1", "2"): text for name, text in whole.items()},
        **{"model.safetensors": "", "adapter_model.safetensors": ""},
    )
    (folder / "checkpoints/2/parameters").mkdir(parents=True)
    (folder / "checkpoints/2/checksums.json").write_text("{}")  # whole here, when the process was killed
    copies.pull(folder, small_files)
    small = [
        "adapter_model.safetensors",
        "checkpoints/1/checksums.json",
        "checkpoints/1/metrics/metrics",
        "config.toml",
    ]
    assert names(folder) == small
    copies.pull_missing(folder / "checkpoints" / "1")
    assert names(folder) == sorted([*small, "checkpoints/1/parameters/d"])
    copies.delete(folder / "checkpoints" / "1")
    assert [name for name in buckets.find(f"{bucket}/run") if "/checkpoints/1/" in name] == []


def test_what_a_process_works_on_is_left_as_it_is(bucket):
    folder = written(f"{bucket}/runs/busy", **{"config.toml": "old"})
    copies.pull(folder)
    (folder / "config.toml").write_text("newer")
    (folder / "metrics.jsonl").write_text("only here")
    with (folder / copies.LOCK).open("a") as file:
        assert lock(file)
        copies.pull(folder)
        copies.pull(folder.parent)
        assert (folder / "config.toml").read_text() == "newer" and (folder / "metrics.jsonl").exists()
    copies.pull(folder.parent)
    assert (folder / "config.toml").read_text() == "old" and not (folder / "metrics.jsonl").exists()


def test_a_job_keeps_a_bucket_up_to_date(bucket, monkeypatch):
    monkeypatch.setattr(copies, "_SIGN_OF_LIFE_S", 0.05)
    folder, said = place(f"{bucket}/kept"), []
    folder.mkdir(parents=True)
    with copies.kept_up(folder, written_apart, said.append):
        (folder / "metrics.jsonl").write_text("line")
        for _ in range(400):
            if buckets.status(f"{bucket}/kept/metrics.jsonl"):
                break
            time.sleep(0.01)
        copies.check_free(folder)  # it is ours
        (folder / "sample.txt").write_text("the end")
    assert sorted(buckets.find(f"{bucket}/kept")) == [f"{bucket}/kept/metrics.jsonl", f"{bucket}/kept/sample.txt"]
    assert said == []


def test_a_job_of_another_machine_has_a_folder_until_it_gives_no_sign_of_life(bucket, monkeypatch):
    folder = written(f"{bucket}/taken", **{"lease.json": '{"owner": "elsewhere:cache"}'})
    copies.pull(folder)
    assert not folder.exists()
    with pytest.raises(copies.Taken, match=f"at work in {bucket}/taken, on elsewhere: .*choose another --out"):
        copies.check_free(folder)
    with pytest.raises(copies.Taken), copies.kept_up(folder, written_apart, print):
        pass
    monkeypatch.setattr(copies, "_LEASE_S", -1.0)
    copies.check_free(folder)


def test_a_file_keeps_the_time_that_it_has_in_its_bucket(bucket):
    folder = written(f"{bucket}/times", a=content(3).hex())
    copies.pull(folder)
    assert os.stat(folder / "a").st_mtime == pytest.approx(buckets.status(f"{bucket}/times/a").changed)
