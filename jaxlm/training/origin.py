"""The weights that a run began with, as origin.json in its folder says."""

import json
from pathlib import Path
from typing import Literal, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.files import replace


class Origin(NamedTuple):
    """A model whose weights a run began with.

    `source`: the absolute path of its folder, or its name at the Hub. `revision`: the commit there. `step`: of a run,
    once its weights are read.
    """

    source: str
    kind: Literal["run", "published"]
    step: int | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.source if not self.step else f"{self.source}, step {self.step}"

    def save(self, file: Path) -> None:
        """Write it, atomically."""
        replace(file, json.dumps(self._asdict(), indent=1) + "\n")


def read(file: Path) -> Origin | None:
    """Return what a file says, or None without one. Raises InputError for a file that is broken."""
    try:
        return Origin(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        raise InputError(f"{file} does not say what the run began with; put it back") from None
