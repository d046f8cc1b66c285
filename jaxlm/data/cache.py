"""What is wrong with a folder of the cache, in the words of the configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxlm.core.errors import InputError


@contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Raises InputError where the block cannot write to this folder of the cache."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data.cache: {folder} cannot be written ({error.strerror or error}); set it to a folder that can"
        ) from error


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raises InputError where the block cannot load what lies in this folder of the cache."""
    try:
        yield
    except (OSError, ValueError, EOFError, LookupError, TypeError) as error:
        raise InputError(f"data.cache: {folder} is damaged ({error}); remove it, and it is made anew") from error
