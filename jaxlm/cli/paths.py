"""Paths and texts that a command is given."""

import os
from argparse import ArgumentTypeError
from pathlib import Path


def path(text: str) -> Path:
    """Raises ArgumentTypeError where there is none, as of a shell variable that is not set: "" would be here,
    gs://bucket a folder named gs:, and what is not UTF-8 Orbax and TOML cannot name."""
    if not text:
        raise ArgumentTypeError("'' is no path; give one")
    try:
        text.encode()
    except UnicodeEncodeError:
        remedy = "is not UTF-8; rename it" if as_utf8(text) == text else "is no path in this locale; set PYTHONUTF8=1"
        raise ArgumentTypeError(f"{text!r} {remedy}") from None
    if "://" in text:
        raise ArgumentTypeError(f"{text!r} is no path here; mount it as a file system, and give where it is mounted")
    return Path(text)


def as_utf8(text: str) -> str:
    """Return an argument read as UTF-8, also where the locale has another encoding."""
    try:
        return os.fsencode(text).decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # it does not come from a command line
        return text
