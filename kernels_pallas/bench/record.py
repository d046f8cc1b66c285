"""Results written to a file as they arrive: a process that ends early loses nothing, and the next one resumes."""

import json
import os
import re
from pathlib import Path
from typing import Any


def results_file(folder: Path, chip: str) -> Path:
    """Return FOLDER/<chip>/kernels.json."""
    return folder / re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") / "kernels.json"


class Record:
    """Results of a benchmark, kept in `kernels.json.part` until all are measured and then written to `kernels.json`.

    Without a file nothing is written. Raises ValueError if the file cannot be written.
    """

    def __init__(self, file: Path | None):
        self._file = file
        self._ended: list[dict[str, str]] = []
        if file is None:
            return
        folder = file.parent.parent
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {folder}: {error.strerror}; it must be a folder") from None
        if not os.access(file.parent, os.W_OK):
            raise ValueError(f"--out {folder}: it must be a folder that can be written")

    @property
    def _part(self) -> Path:
        return self._file.with_name(f"{self._file.name}.part")

    def begun(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the results so far of an earlier process with the same request, or None."""
        try:
            results = json.loads(self._part.read_text(encoding="utf-8")) if self._file else {}
        except (OSError, ValueError):
            return None
        if not request.items() <= results.items():
            return None
        running = results.pop("running")
        self._ended = results.pop("ended") + ([running] if running else [])
        return results

    def running(self, results: dict[str, Any], row: dict[str, str] | None) -> None:
        """Write the row that is being measured, None for no row, with the results so far."""
        if self._file:
            _replace(self._part, results | {"running": row, "ended": self._ended})

    def ended_in(self, row: dict[str, str]) -> bool:
        """Return whether an earlier process ended while it measured this row."""
        return row in self._ended

    def finish(self, results: dict[str, Any]) -> None:
        """Write the complete results."""
        if self._file:
            _replace(self._file, results)
            self._part.unlink(missing_ok=True)


def _replace(file: Path, content: dict[str, Any]) -> None:
    """Write a file atomically."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(new, file)
