"""Paths and texts that a command is given."""

import os
from argparse import ArgumentTypeError
from pathlib import Path

from jaxlm.core import addresses, units


def location(text: str) -> Path:
    """Return a path, or the place of an address in a bucket, such as gs://BUCKET/FOLDER. Raises ArgumentTypeError as
    `path` does, and for an address that names nothing."""
    if not addresses.is_address(text):
        return path(text)
    try:
        return addresses.place(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def path(text: str) -> Path:
    """Return a path. Raises ArgumentTypeError where there is none, as of a shell variable that is not set: "" would be
    here, gs://bucket a folder named gs:, and what is not UTF-8 Orbax and TOML cannot name."""
    if not text:
        raise ArgumentTypeError("'' is no path; give one")
    try:
        text.encode()
    except UnicodeEncodeError:
        remedy = "is not UTF-8; rename it" if as_utf8(text) == text else "is no path in this locale; set PYTHONUTF8=1"
        raise ArgumentTypeError(f"{text!r} {remedy}") from None
    if "://" in text:
        raise ArgumentTypeError(f"{text!r} is no path, as is needed here; give one")
    return Path(text)


def duration(text: str) -> float:
    """Return the seconds of a time, such as "30d". Raises ArgumentTypeError for what is none."""
    try:
        return units.parse_seconds(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def as_utf8(text: str) -> str:
    """Return an argument read as UTF-8, also where the locale has another encoding."""
    try:
        return os.fsencode(text).decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # it does not come from a command line
        return text
