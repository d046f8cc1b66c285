"""Addresses in buckets, such as gs://BUCKET/FOLDER, and the folder of this machine that has the copies of them.

An address stands for a path in a cache folder, its place, which the rest of jaxlm reads and writes like any path;
`jaxlm.core.buckets` moves files between a place and its bucket.
"""

import re
from pathlib import Path

from jaxlm.core.files import default_cache

SCHEMES = ("gs", "s3", "hf")
_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://(.*)", re.DOTALL)


def root() -> Path:
    """Return the folder of the places of all addresses."""
    return Path(default_cache(), "buckets").expanduser().absolute()


def is_address(text: str | Path) -> bool:
    """Return whether a text is an address in a bucket, and no path."""
    return _ADDRESS.fullmatch(str(text)) is not None


def place(text: str | Path) -> Path:
    """Return the place of an address, or the path itself. Raises ValueError for an address that leaves its bucket."""
    parts = _ADDRESS.fullmatch(str(text))
    if parts is None:
        return Path(text)
    names = [name for name in parts[2].split("/") if name not in ("", ".")]
    if not names or ".." in names:
        raise ValueError(f"{text} is no address in a bucket; write {parts[1]}://BUCKET/FOLDER")
    return root().joinpath(parts[1], *names)


def address(path: Path) -> str | None:
    """Return the address that a path is the place of; None for another path."""
    try:
        scheme, *names = path.relative_to(root()).parts
    except ValueError:
        return None
    return f"{scheme}://{'/'.join(names)}" if scheme in SCHEMES and names else None


def with_addresses(text: object) -> str:
    """Return a text with addresses where it has their places."""
    return re.sub(rf"{re.escape(str(root()))}/({'|'.join(SCHEMES)})/", r"\1://", str(text))
