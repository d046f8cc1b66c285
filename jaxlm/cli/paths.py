"""Paths that a command is given."""

from argparse import ArgumentTypeError
from pathlib import Path


def path(text: str) -> Path:
    """Raises ArgumentTypeError where there is none, as of a shell variable that is not set: "" would be here."""
    if not text:
        raise ArgumentTypeError("'' is no path; give one")
    return Path(text)
