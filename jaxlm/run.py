"""RUN, the folder of a training run: its resolved configuration, tokenizer and data identity, and what it holds."""

import json
from pathlib import Path
from typing import Any, TextIO

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.data import tokenizers
from jaxlm.data.dataset import Dataset
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.distributed import is_first
from jaxlm.errors import InputError
from jaxlm.files import leftovers, lock, replace, unwritable
from jaxlm.schema import changed

# What a resumed run must share with its beginning; everything else may change.
_KEPT = ("model", "training.batch", "training.sequence", "training.seed", "optimizer.kind")
_FREE = {"kernels"}  # of the model: they change no result but by rounding
# What the parameters of a run are good for; the other keys of [model] may differ where they are used.
_ARCHITECTURE = ("vocabulary", "layers", "width", "norm", "attention", "feed_forward", "tied_embeddings")


class Run:
    """Paths of a run folder, and what can be read from it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.lock = directory / "lock"
        self.config = directory / "config.toml"
        self.tokenizer = directory / "tokenizer.json"
        self.data = directory / "data.json"
        self.starts = directory / "starts.jsonl"
        self.metrics = directory / "metrics.jsonl"
        self.evaluations = directory / "evaluations.jsonl"
        self.goodput = directory / "goodput.jsonl"
        self.ladder = directory / "ladder.json"
        self.profile = directory / "profile"
        self.checkpoints = directory / "checkpoints"
        self.loss_curve = directory / "loss.png"
        self.sample = directory / "sample.txt"
        self._claimed: TextIO | None = None

    def check(self, experiment: Experiment) -> None:
        """Raises InputError where the folder is none of ours or cannot be made, or where its run was begun as another
        experiment."""
        if self.config.exists():
            before = self.experiment()
            self.digest()
            for key in _KEPT:
                if change := changed(key, _value(before, key), _value(experiment, key)):
                    raise InputError(f"{self.directory} was begun with {change}; put it back, or choose another --out")
            was, now = before.training.ema_decay, experiment.training.ema_decay
            if (was is None) != (now is None):
                begun, now = ("without", now) if was is None else (f"with {was} for", "not set")
                raise InputError(
                    f"{self.directory} was begun {begun} training.ema_decay, which is {now} now, and an average begins "
                    "with its run; put it back, or choose another --out"
                )
            return
        try:
            # What a start leaves that was cut short.
            ours = {self.lock, self.tokenizer, self.data, *leftovers(self.config)}
            there = self.directory.exists()
            usable = set(self.directory.iterdir()) <= ours if there else not unwritable(self.directory)
        except OSError:
            usable = False
        if not usable:
            raise InputError(f"{self.directory} is there and is no run, or cannot be made; choose another --out")

    def check_model(self, experiment: Experiment) -> None:
        """Raises InputError where a model is none for the parameters of this run."""
        before = self.experiment()
        positions = ("position.kind", *(("context",) if before.model.position.kind == "learned" else ()))
        for key in (f"model.{name}" for name in (*_ARCHITECTURE, *positions)):
            if change := changed(key, _value(before, key), _value(experiment, key)):
                raise InputError(f"{self.directory} was trained with {change}; leave it out")

    def claim(self) -> None:
        """Have the folder, once it is there, for this job alone until its first process ends, however it ends.

        Raises InputError where another job has it, or where nothing can be written to it.
        """
        if self._claimed is not None or not self.directory.exists():
            return
        try:
            self._claimed = self.lock.open("a")  # and left open: the system releases the lock with the process
        except OSError as error:
            raise InputError(
                f"{self.directory} cannot be written to ({error.strerror}); choose another --out"
            ) from None
        try:
            lock(self._claimed)
        except BlockingIOError:
            raise self._taken() from None

    def check_free(self) -> None:
        """Raises InputError where another job has the folder. For every process, before it joins the others: where that
        job was started with the same address, it would be joined, and die of it."""
        try:
            with self.lock.open("r+") as file:
                lock(file, shared=True)
        except BlockingIOError:
            raise self._taken() from None
        except OSError:
            pass  # none there yet, or none for us: `claim` says which

    def _taken(self) -> InputError:
        return InputError(
            f"another jaxlm train is at work in {self.directory}; wait for its end, or choose another --out"
        )

    def open(self, experiment: Experiment, dataset: Dataset) -> None:
        """Make the folder, or continue it with the same data. The configuration comes last: it makes it a run.
        In a job of several processes the first writes, and the others, behind it, look.

        Raises InputError where another job has the folder, where the run was begun on other data, or where another
        process of this job does not see the folder.
        """
        if is_first():
            self.directory.mkdir(parents=True, exist_ok=True)
            self.claim()
        elif not self.config.exists():
            raise InputError(f"{self.directory} is not there for every process; choose an --out that all share")
        if not self.config.exists():
            dataset.tokenizer.save(self.tokenizer)
            self.data.write_text(json.dumps({"digest": dataset.digest, "held_out_bytes": dataset.held_out_bytes}))
        elif self.digest() != dataset.digest:
            raise InputError(
                f"{self.directory} was trained on other data than data.text and data.tokenizer give now; "
                "put them back, or choose another --out"
            )
        if is_first():
            replace(self.config, experiment.to_toml())

    def digest(self) -> str:
        """Identity of the data it was begun with. Raises InputError where that is not recorded."""
        try:
            return json.loads(self.data.read_text())["digest"]
        except (OSError, ValueError, KeyError):
            raise InputError(f"{self.directory} is no run: it has no data.json; choose another --out") from None

    def experiment(self) -> Experiment:
        """The resolved configuration. Raises InputError where this is no run."""
        if not self.config.is_file():
            raise InputError(f"{self.directory} is no run: it holds no config.toml; jaxlm train makes one")
        return config.load(self.config)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the run. Raises InputError where it has none, or one with more tokens than the model."""
        if not self.tokenizer.is_file():
            raise InputError(f"{self.directory} has no tokenizer.json; give --token-ids in place of --prompt")
        tokenizer, model = tokenizers.load(self.tokenizer), self.experiment().model
        if tokenizer.vocabulary > model.vocabulary:
            raise InputError(
                f"{self.tokenizer} has {tokenizer.vocabulary} tokens, and model.vocabulary = {model.vocabulary}: the "
                "run was trained with another; put that back"
            )
        return tokenizer


def _value(experiment: Experiment, key: str) -> Any:
    value: Any = experiment
    for part in key.split("."):
        value = getattr(value, part)
    return value.model_dump(exclude=_FREE) if hasattr(value, "model_dump") else value
