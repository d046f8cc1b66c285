"""Paths that a command is given."""

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
        raise ArgumentTypeError(f"{text!r} is not UTF-8; rename it") from None
    if "://" in text:
        raise ArgumentTypeError(f"{text!r} is no path here; mount it as a file system, and give where it is mounted")
    return Path(text)
