"""Files in buckets of Google Cloud Storage and S3, and of the Hugging Face Hub, by way of fsspec.

Each call is tried again where a connection breaks.
"""

import functools
import io
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from jaxlm.core import addresses
from jaxlm.core.addresses import address
from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.extras import install

Result = TypeVar("Result")

_TRIES = 6
_FIRST_PAUSE_S = 0.25  # before the second try; it doubles with each
_UNCACHED: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
_BLOCK_BYTES = 2**23
_AT_ONCE = 8  # files that are moved
# The packages, and the extras that install them.
_NEEDS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3"), "hf": ("huggingface_hub", "hf")}
_LOG_IN = {
    "gs": "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "hf": "hf auth login, or set HF_TOKEN",
}
# Errors of credentials, by the names that google.auth, botocore and huggingface_hub give them.
_CREDENTIALS = ("DefaultCredentialsError", "RefreshError", "NoCredentialsError", "PartialCredentialsError")


class Unreachable(RunFailed):
    """A bucket that cannot be reached now."""


class Object(NamedTuple):
    """A file in a bucket: its bytes, its time of change (seconds since 1970, or 0) and a tag of its content."""

    size: int
    changed: float
    tag: str


@functools.cache
def filesystem(scheme: str) -> Any:
    """Return the file system of a scheme, which keeps no listings. Raises InputError without its package."""
    package, extra = _NEEDS[scheme]
    try:
        if scheme == "gs":
            from gcsfs.core import GCSFileSystem  # not the one that asks first, by gRPC, which kind a bucket is of

            token = "anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None
            return GCSFileSystem(**_UNCACHED, token=token)
        if scheme == "s3":
            import botocore.session
            from s3fs import S3FileSystem

            anonymous = botocore.session.Session().get_credentials() is None
            return S3FileSystem(**_UNCACHED, anon=anonymous)
        from huggingface_hub import HfFileSystem

        return HfFileSystem(**_UNCACHED)
    except ImportError:
        raise InputError(f"{scheme}:// needs the package {package}: {install(extra)}") from None


def _tried(url: str, action: Callable[[Any, str], Result]) -> Result:
    """Return action(file system, path without scheme), tried again where a connection breaks.

    Raises FileNotFoundError; InputError where the bucket refuses; Unreachable after the last try.
    """
    scheme, _, path = url.partition("://")
    cloud = filesystem(scheme)
    for attempt in range(1, _TRIES + 1):
        try:
            return action(cloud, path)
        except FileNotFoundError:
            cloud.invalidate_cache()
            raise
        except Exception as error:  # the packages raise all kinds
            why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            if _is_refusal(error):
                raise InputError(f"{url}: access is refused ({why[:200]}); {_LOG_IN[scheme]}") from None
            if attempt == _TRIES:
                raise Unreachable(f"{url} cannot be reached, after {_TRIES} tries ({why[:200]}); try again") from error
        time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError


def _is_refusal(error: Exception) -> bool:
    """Return whether trying again cannot help: no credentials, or none that suffice."""
    named = type(error).__name__ in _CREDENTIALS or str(error).startswith("Forbidden")
    return named or isinstance(error, PermissionError) or getattr(error, "code", None) in (401, 403, "401", "403")


def _object(entry: Mapping[str, Any]) -> Object:
    """Return an entry of fsspec, which each package writes in its own way."""
    tags = (entry.get(key) for key in ("generation", "ETag", "etag", "blob_id"))
    times = (entry.get(key) for key in ("updated", "LastModified", "mtime"))
    changed = next((each for each in times if each), 0.0)
    if isinstance(changed, str):
        changed = datetime.fromisoformat(changed)
    return Object(
        int(entry["size"] or 0),
        changed.timestamp() if isinstance(changed, datetime) else float(changed),
        str(next((tag for tag in tags if tag), "")),
    )


def status(url: str) -> Object | None:
    """Return the file at an address, or None where there is none. Raises InputError and Unreachable."""
    try:
        entry = _tried(url, lambda filesystem, path: filesystem.info(path))
    except FileNotFoundError:
        return None
    return _object(entry) if entry["type"] == "file" else None


def statuses(urls: Iterable[str]) -> dict[str, Object | None]:
    """Return the files at addresses, as `status` does."""
    urls = list(urls)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(urls, pool.map(status, urls), strict=True))


def sizes(files: Iterable[Path]) -> dict[Path, int | None]:
    """Return the bytes of files, None for one that cannot be read. Raises InputError and Unreachable."""
    files = list(files)
    there = statuses(url for file in files if (url := address(file)) is not None)

    def size(file: Path) -> int | None:
        if (url := address(file)) is not None:
            status_there = there[url]
            return None if status_there is None else status_there.size
        try:
            return file.stat().st_size
        except OSError:
            return None

    return {file: size(file) for file in files}


def find(url: str) -> dict[str, Object]:
    """Return the files at an address and below it, by their addresses. Raises InputError and Unreachable."""
    scheme = url.partition("://")[0]
    try:
        found = _tried(url, lambda filesystem, path: filesystem.find(path, detail=True))
    except FileNotFoundError:
        return {}
    files = {f"{scheme}://{path}": entry for path, entry in found.items() if not path.endswith("/")}
    return {name: _object(entry) for name, entry in sorted(files.items()) if name == url or name.startswith(f"{url}/")}


def matching(pattern: str) -> list[str]:
    """Return the addresses of the files that match a glob, sorted. Raises InputError and Unreachable."""
    scheme = pattern.partition("://")[0]
    found = _tried(pattern, lambda filesystem, path: filesystem.glob(path, detail=True))
    return sorted(f"{scheme}://{path}" for path, entry in found.items() if entry["type"] == "file")


def names_in(url: str) -> list[str]:
    """Return the names of files and folders in a folder. Raises InputError and Unreachable."""
    try:
        found = _tried(url, lambda filesystem, path: filesystem.ls(path, detail=False))
    except FileNotFoundError:
        return []
    return [name.rstrip("/").rpartition("/")[2] for name in found]


def check_writable(url: str) -> None:
    """Raise InputError for an address of the Hub, where a change is a commit."""
    if url.startswith("hf:"):
        raise InputError(f"{url} cannot be written: jaxlm reads the Hub; give gs://, s3:// or a folder")


def upload(file: Path, url: str) -> Object:
    """Write a file of this machine to an address. Raises InputError and Unreachable."""

    def put(filesystem: Any, path: str) -> Object:
        if file.stat().st_size <= _BLOCK_BYTES:
            _put(filesystem, path, file.read_bytes())
        else:
            filesystem.put_file(str(file), path)
        return _object(filesystem.info(path))

    return _tried(url, put)


def write(url: str, content: bytes) -> None:
    """Write bytes to an address. Raises InputError and Unreachable."""
    _tried(url, lambda filesystem, path: _put(filesystem, path, content))


def _put(filesystem: Any, path: str, content: bytes) -> None:
    """Write bytes in one request.

    To Google Cloud Storage they are its whole body. gcsfs writes small objects as a part of a multipart body whose
    lines end with a line feed alone, which loses a carriage return at their end.
    """
    if "gs" not in filesystem.protocol or not content:
        filesystem.pipe_file(path, content)
        return
    bucket, name, _ = filesystem.split_path(path)
    url = filesystem.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
    kind = {"Content-Type": "application/octet-stream"}
    filesystem.call("POST", url, bucket, uploadType="media", name=name, data=content, headers=kind)


def remove(url: str) -> None:
    """Remove a file, if there is one. Raises InputError and Unreachable."""
    try:
        _tried(url, lambda filesystem, path: filesystem.rm_file(path))
    except FileNotFoundError:
        pass


class _Stream(io.RawIOBase):
    """The bytes of a file in a bucket, read by ranges, each tried again where its connection breaks."""

    def __init__(self, url: str):
        there = status(url)
        if there is None:
            raise FileNotFoundError(2, "there is no such file", url)
        self._url, self._size, self._at = url, there.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max({os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset, 0)
        return self._at

    def readall(self) -> bytes:
        """Return the rest, in few requests: that of the base class takes a few kilobytes with each."""
        blocks = []
        while block := self.read(_BLOCK_BYTES):
            blocks.append(block)
        return b"".join(blocks)

    def readinto(self, buffer: Any) -> int:
        start, end = self._at, min(self._at + len(buffer), self._size)
        if start >= end:
            return 0

        def read(filesystem: Any, path: str) -> bytes:
            content = filesystem.cat_file(path, start=start, end=end)
            if len(content) != end - start:
                raise ConnectionError(f"{len(content):,} of {end - start:,} bytes came")
            return content

        buffer[: end - start] = _tried(self._url, read)
        self._at = end
        return end - start


def open_binary(file: str | Path) -> BinaryIO:
    """Open a file for reading, by its path, or as a stream by its address."""
    return io.BufferedReader(_Stream(str(file)), _BLOCK_BYTES) if addresses.is_address(file) else open(file, "rb")
