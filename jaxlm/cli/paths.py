"""Paths that a command is given."""

from argparse import ArgumentTypeError
from pathlib import Path


def path(text: str) -> Path:
    """Raises ArgumentTypeError where there is none, as of a shell variable that is not set: "" would be here, and
    gs://bucket a folder named gs:."""
    if not text:
        raise ArgumentTypeError("'' is no path; give one")
    if "://" in text:
        raise ArgumentTypeError(f"{text!r} is no path here; mount it as a file system, and give where it is mounted")
    return Path(text)
