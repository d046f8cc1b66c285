"""The file names in RUN, the folder of a training run."""

import re
from pathlib import Path

from jaxlm.core.errors import InputError

# A pattern of glob, what Orbax does not quote in one, or the beginning of a bucket's URL.
_UNWRITABLE = re.compile(r"[*?\\]|\[[^/]*\]|gs:(?=/)")


class RunPaths:
    """Paths of the files in the folder of a run; each file exists once something has written it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.lock = directory / "lock"  # held by the job that is running
        # The definition of the run: the resolved experiment that it trains with now, the experiments that it was
        # trained with, each from a step, the tokenizer and the identity of the data.
        self.config = directory / "config.toml"
        self.history = directory / "history.jsonl"
        self.tokenizer = directory / "tokenizer.json"
        self.data = directory / "data.json"
        # Of a run that began with weights: whose they were, and the small files that published ones came with.
        self.origin = directory / "origin.json"
        self.huggingface = directory / "huggingface"
        # Of preferences: log-probabilities under the model that training began with, for each source and side.
        self.reference = directory / "reference"
        # Lines of JSON: the environment of each attempt, steps, held-out losses, norms per layer, seconds per attempt.
        self.attempts = directory / "attempts.jsonl"
        self.metrics = directory / "metrics.jsonl"
        self.evaluations = directory / "evaluations.jsonl"
        self.norms = directory / "norms.jsonl"
        self.goodput = directory / "goodput.jsonl"
        # For other programs: event files, the id of the run at Weights & Biases, traces.
        self.tensorboard = directory / "tensorboard"
        self.wandb_id = directory / "wandb_id"
        self.profile = directory / "profile"
        self.checkpoints = directory / "checkpoints"
        # Results at the end.
        self.ladder = directory / "ladder.json"
        self.loss_curve = directory / "loss.png"
        self.sample = directory / "sample.txt"

    @property
    def are_of_a_run(self) -> bool:
        """Return whether the folder holds a run, trained or imported."""
        return self.config.is_file() and (self.data.is_file() or self.huggingface.is_dir())

    def check_name(self) -> None:
        """Raise InputError for a folder that Orbax cannot write checkpoints to: it reads paths as patterns or URLs."""
        path = str(self.checkpoints.absolute())
        if found := _UNWRITABLE.search(path):
            raise InputError(
                f"{path} has {found[0]!r}, and checkpoints cannot be written to such a path; choose another --out"
            )

    def __str__(self) -> str:
        return str(self.directory)
