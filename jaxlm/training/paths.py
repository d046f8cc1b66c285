"""The file names in RUN, the folder of a training run."""

import re
from collections.abc import Collection
from pathlib import Path

from jaxlm.core import addresses, buckets, copies
from jaxlm.core.errors import InputError

# A pattern of glob, what Orbax does not quote in one, or what it takes for the beginning of an address.
_UNWRITABLE = re.compile(r"[*?\\]|\[[^/]*\]|gs:(?=/)")

CHECKSUMS = "checksums.json"  # of a checkpoint, which it completes
_OF_A_STEP = re.compile(r"(.*?(?:^|/)checkpoints/(?:0|[1-9][0-9]*)/)(.*)")  # and no other, as one set aside
_ARRAYS = re.compile(r"(parameters|average|rest)/")


def small_files(names: Collection[str]) -> dict[str, bool]:
    """Return the names of files in a folder, each with whether it is no array of numbers. A checkpoint that was not
    written to its end, whose manifest comes last, counts for nothing."""
    small = {}
    for name in names:
        if (step := _OF_A_STEP.fullmatch(name)) is None:
            small[name] = not copies.is_weights(name)
        elif f"{step[1]}{CHECKSUMS}" in names:
            small[name] = _ARRAYS.match(step[2]) is None
    return small


def written_apart(name: str) -> bool:
    """Return whether a file in RUN is not uploaded with the others: the lock, what a restart needs, and checkpoints,
    which are whole or not there."""
    return (
        name == copies.LOCK
        or name.startswith("elastic/")
        or (name.startswith("checkpoints/") and not name.startswith("checkpoints/corrupt/"))
    )


class RunPaths:
    """Paths of the files in the folder of a run; each file exists once something has written it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.lock = directory / copies.LOCK  # held by the job that is running
        # The definition of the run: the resolved experiment that it trains with now, the experiments that it was
        # trained with, each from a step, the tokenizer and the identity of the data.
        self.config = directory / "config.toml"
        self.history = directory / "history.jsonl"
        self.tokenizer = directory / "tokenizer.json"
        self.data = directory / "data.json"
        # Of a run that began with weights: whose they were, and the small files that published ones came with.
        self.origin = directory / "origin.json"
        self.huggingface = directory / "huggingface"
        # Of an imported run: the layers for multi-token prediction, which an export gives back.
        self.mtp = directory / "mtp.safetensors"
        # The form of weights that are quantised.
        self.quantized = directory / "quantized.json"
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
        # Of restarts: the name of copies in memory, what passes between hosts, and who goes on when a process is lost.
        self.elastic = directory / "elastic"
        self.memory_name = self.elastic / "memory_name"
        # Results at the end.
        self.ladder = directory / "ladder.json"
        self.loss_curve = directory / "loss.png"
        self.sample = directory / "sample.txt"

    @property
    def are_of_a_run(self) -> bool:
        """Return whether the folder holds a run, trained or imported."""
        return self.config.is_file() and (self.data.is_file() or self.huggingface.is_dir())

    def check_name(self) -> None:
        """Raise InputError for a folder of the Hub, and for one that Orbax cannot write checkpoints to.

        Orbax reads paths as patterns or URLs.
        """
        if (url := addresses.address(self.directory)) is not None:
            buckets.check_writable(url)
        path = str(self.checkpoints.absolute())
        if found := _UNWRITABLE.search(path):
            raise InputError(
                f"{path} has {found[0]!r}, and checkpoints cannot be written to such a path; choose another --out"
            )

    def __str__(self) -> str:
        return addresses.with_addresses(self.directory)
