"""Sinks of records besides the run's own files: TensorBoard and Weights & Biases."""

import importlib.util
import uuid
from pathlib import Path
from typing import Any, Protocol

from jaxlm.core.errors import InputError
from jaxlm.core.extras import install
from jaxlm.training.paths import RunPaths


class Sink(Protocol):
    """A destination of named numbers."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the values of one step."""

    def flush(self) -> None:
        """Make the written values survive the process."""

    def close(self) -> None:
        """Finish writing."""


def check_installed(wandb_project: str | None) -> None:
    """Raise InputError if a requested package is not installed."""
    if wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise InputError(f"records.wandb_project needs Weights & Biases: {install('wandb')}")


class TensorBoard:
    """A writer of event files. Events of steps after `resumed` that an earlier attempt wrote are superseded."""

    def __init__(self, directory: Path, resumed: int):
        from tensorboardX import SummaryWriter

        # Files are read in the order of their names, whose timestamps are whole seconds.
        suffix = f".{len(list(directory.glob('events*'))):06d}" if directory.is_dir() else ""
        self._writer = SummaryWriter(str(directory), purge_step=resumed + 1, flush_secs=10, filename_suffix=suffix)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A writer to one W&B run per run folder. The folder keeps the run's id, so that a resumed run continues it.

    Steps that are repeated after a resume keep their first values: W&B accepts no step twice.
    """

    def __init__(self, paths: RunPaths, project: str, config: dict[str, Any]):
        import wandb

        if not paths.wandb_id.exists():
            paths.wandb_id.write_text(uuid.uuid4().hex[:12])
        settings = wandb.Settings(console="off")  # do not capture the progress bar
        try:
            self._run = wandb.init(
                project=project,
                name=paths.directory.absolute().name,
                id=paths.wandb_id.read_text().strip(),
                resume="allow",
                dir=str(paths),
                config=config,
                settings=settings,
            )
        except wandb.Error as error:
            raise InputError(
                f"Weights & Biases refuses the run: {str(error).splitlines()[0]}; log in (wandb login), or set "
                "WANDB_MODE=offline"
            ) from None

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def flush(self) -> None:
        pass  # W&B's own process does this

    def close(self) -> None:
        self._run.finish()
