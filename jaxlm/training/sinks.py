"""Where records go besides the run's own files: TensorBoard and Weights & Biases."""

import importlib.util
import uuid
from pathlib import Path
from typing import Any, Protocol

from jaxlm.core.errors import InputError
from jaxlm.training.paths import RunPaths


class Sink(Protocol):
    """Takes numbers by name."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """The values of one step."""

    def flush(self) -> None:
        """What was written survives the process."""

    def close(self) -> None:
        """Nothing more comes."""


def check_installed(wandb_project: str | None) -> None:
    """Raises InputError where a package that is asked for is not here."""
    if wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise InputError("records.wandb_project needs Weights & Biases: pip install 'jaxlm[wandb]'")


class TensorBoard:
    """Event files. Those of steps after `resumed` that an earlier start wrote are superseded."""

    def __init__(self, directory: Path, resumed: int):
        from tensorboardX import SummaryWriter

        # Files are read in the order of their names, which have only the second in them.
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
    """One W&B run per run folder, whose id is kept in it: a start that resumes continues it.

    Steps that are done again after a resume keep their first values: W&B takes no step twice.
    """

    def __init__(self, paths: RunPaths, project: str, config: dict[str, Any]):
        import wandb

        if not paths.wandb_id.exists():
            paths.wandb_id.write_text(uuid.uuid4().hex[:12])
        settings = wandb.Settings(console="off")  # the bar is nothing to keep
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
        pass  # its own process does

    def close(self) -> None:
        self._run.finish()
