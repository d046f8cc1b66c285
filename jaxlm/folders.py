"""Whether a folder takes files, asked before work that would be lost."""

import os
import tempfile
from pathlib import Path


def unwritable(folder: Path) -> str | None:
    """Why a folder, or the nearest above it where it is not there yet, takes no files; None where it does."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        tempfile.TemporaryFile(dir=there).close()  # permissions alone do not tell for root
    except OSError as error:
        return error.strerror
    return None
