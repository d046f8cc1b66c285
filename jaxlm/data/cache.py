"""Errors of the cache folders, reported under their configuration key."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxlm.core.errors import InputError


@contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Raise InputError if the block cannot write to this cache folder."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data.cache: {folder} cannot be written ({error.strerror or error}); set it to a folder that can"
        ) from error


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise InputError if the block cannot load the contents of this cache folder."""
    try:
        yield
    except (OSError, ValueError, EOFError, LookupError, TypeError) as error:
        raise InputError(f"data.cache: {folder} is corrupt ({error}); remove it to rebuild it") from error
