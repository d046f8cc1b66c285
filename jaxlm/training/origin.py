"""The weights that a run began with, as recorded in origin.json in the run's folder."""

import json
from pathlib import Path
from typing import Literal, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.files import replace


class Origin(NamedTuple):
    """A model whose weights a run began with.

    `source`: the absolute path of the model's folder, or the model's name at the Hub. `revision`: the commit there.
    `step`: the step of a model that is a run, once its weights are read. `digest`: of the weights, for adapters, which
    need the same weights again.
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
        """Write origin.json, atomically."""
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
