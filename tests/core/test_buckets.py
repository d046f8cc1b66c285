"""Files in buckets, read and written over connections that break."""

import bucket_servers
import pytest
from bucket_servers import BUCKET, content

from jaxlm.core import buckets
from jaxlm.core.errors import InputError


@pytest.fixture(scope="module", params=bucket_servers.SCHEMES)
def bucket(request):
    """The address of a bucket, and the proxy before it."""
    with bucket_servers.serving(request.param) as (proxy, _):
        yield f"{request.param}://{BUCKET}", proxy


def test_files_are_found_as_they_were_written(bucket):
    url = f"{bucket[0]}/found"
    for name, size in (("a.txt", 10), ("b/c.txt", 0), ("b/d.jsonl", 3)):
        buckets.write(f"{url}/{name}", content(size))
    buckets.write(f"{url}er.txt", b"beside the folder")
    assert {name: file.size for name, file in buckets.find(url).items()} == {
        f"{url}/a.txt": 10,
        f"{url}/b/c.txt": 0,
        f"{url}/b/d.jsonl": 3,
    }
    assert list(buckets.find(f"{url}/a.txt")) == [f"{url}/a.txt"]
    assert buckets.find(f"{url}/nothing") == {}
    assert buckets.matching(f"{url}/**/*.txt") == [f"{url}/a.txt", f"{url}/b/c.txt"]
    assert sorted(buckets.names_in(url)) == ["a.txt", "b"]
    assert buckets.status(f"{url}/b") is None is buckets.status(f"{url}/nothing")
    before = buckets.status(f"{url}/a.txt")
    buckets.write(f"{url}/a.txt", content(11)[:10])
    assert before.tag != buckets.status(f"{url}/a.txt").tag and before.changed > 1e9
    buckets.remove(f"{url}/a.txt")
    buckets.remove(f"{url}/a.txt")
    assert buckets.status(f"{url}/a.txt") is None


def test_a_stream_gives_every_range_though_connections_are_cut(bucket):
    (url, proxy), whole = bucket, content(9_000_000)
    buckets.write(f"{url}/large", whole)
    with buckets.open_binary(f"{url}/large") as file:
        proxy.cuts, proxy.after = 2, 100_000
        assert file.read() == whole
        assert proxy.cuts == 0
        assert file.seek(-1000, 2) and file.read() == whole[-1000:]
        assert file.seek(2_345_678) and file.read(10) == whole[2_345_678:2_345_688]
    with pytest.raises(FileNotFoundError):
        buckets.open_binary(f"{url}/none")


def test_a_file_that_is_uploaded_is_there_as_a_whole_though_connections_are_cut(bucket, tmp_path):
    (url, proxy), file = bucket, tmp_path / "file"
    file.write_bytes(content(3_000_000))
    proxy.cuts, proxy.after = 2, 100_000
    assert buckets.upload(file, f"{url}/uploaded").size == 3_000_000
    assert proxy.cuts == 0
    with buckets.open_binary(f"{url}/uploaded") as stream:
        assert stream.read() == content(3_000_000)


@pytest.mark.parametrize("last", [b"\r", b"\n", b"\r\n", b"\n--==0==\n", b""])
def test_every_last_byte_is_kept(bucket, tmp_path, last):
    url, file = f"{bucket[0]}/name with %20 & ü/last", tmp_path / "file"
    file.write_bytes(b"line" + last if last else b"")
    assert buckets.upload(file, url).size == file.stat().st_size
    with buckets.open_binary(url) as stream:
        assert stream.read() == file.read_bytes()
    buckets.write(url, last)
    assert list(buckets.find(url)) == [url] and buckets.status(url).size == len(last)


def test_a_bucket_that_is_away_is_one_line(bucket, monkeypatch):
    (url, proxy) = bucket
    monkeypatch.setattr(buckets, "_TRIES", 2)

    monkeypatch.setattr(buckets, "filesystem", lambda scheme: bucket_servers.Away())
    with pytest.raises(
        buckets.Unreachable, match=r"a.txt cannot be reached, after 2 tries \(connection reset by peer\)"
    ):
        buckets.status(f"{url}/a.txt")


def test_what_a_bucket_refuses_is_said_with_how_to_log_in(bucket, monkeypatch):
    monkeypatch.setattr(
        buckets, "filesystem", lambda scheme: bucket_servers.Away(PermissionError("Anonymous caller has no access"))
    )
    with pytest.raises(
        InputError, match="access is refused .Anonymous caller has no access.; (gcloud auth|aws configure)"
    ):
        buckets.status(f"{bucket[0]}/a.txt")


@pytest.mark.parametrize(
    "scheme, module, extra", [("gs", "gcsfs.core", "gcs"), ("s3", "s3fs", "s3"), ("hf", "huggingface_hub", "hf")]
)
def test_a_missing_package_is_named_with_its_extra(scheme, module, extra, monkeypatch):
    import sys

    buckets.filesystem.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"{scheme}:// needs the package \w+: pip install -e '\.\[{extra}\]'"):
        buckets.status(f"{scheme}://bucket/file")
