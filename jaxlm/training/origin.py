"""The weights that a run began with, as origin.json in its folder says."""

import json
from pathlib import Path
from typing import Literal, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.files import replace


class Origin(NamedTuple):
    """A model whose weights a run began with.

    `source`: the absolute path of its folder, or its name at the Hub. `revision`: the commit there. `step`: of a run,
    once its weights are read. `digest`: of the weights, where adapters need them again.
    """

    source: str
    kind: Literal["run", "published"]
    step: int | None = None
    revision: str | None = None
    digest: str | None = None

    @property
    def pinned(self) -> str:
        """The path of the folder, or the name at the Hub with its commit."""
        return f"{self.source.partition('@')[0]}@{self.revision}" if self.revision else self.source

    def __str__(self) -> str:
        return self.source if not self.step else f"{self.source}, step {self.step}"

    def check(self, run: object, digest: str) -> None:
        """Raise InputError where the weights that a run adapts have another digest than those that it began with."""
        if digest != self.digest:
            raise InputError(f"{self} is not the model that {run} adapts: its weights have changed; put them back")

    def save(self, file: Path) -> None:
        """Write it, atomically."""
        values = {key: value for key, value in self._asdict().items() if key != "digest" or value}
        replace(file, json.dumps(values, indent=1) + "\n")


def read(file: Path) -> Origin | None:
    """Return the origin that a file says, or None without one. Raises InputError for a file that is broken."""
    try:
        return Origin(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        raise InputError(f"{file} does not say what the run began with; put it back") from None
