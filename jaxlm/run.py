"""RUN, the folder of a training run: its resolved configuration, tokenizer and data identity, and what it holds."""

import json
import os
from pathlib import Path
from typing import Any

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.data import tokenizers
from jaxlm.data.dataset import Dataset
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.errors import InputError

# What a resumed run must share with its beginning; everything else may change.
_KEPT = ("model", "training.batch", "training.sequence", "training.seed", "optimizer.kind")


class Run:
    """Paths of a run folder, and what can be read from it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = directory / "config.toml"
        self.tokenizer = directory / "tokenizer.json"
        self.data = directory / "data.json"
        self.starts = directory / "starts.jsonl"
        self.metrics = directory / "metrics.jsonl"
        self.evaluations = directory / "evaluations.jsonl"
        self.checkpoints = directory / "checkpoints"
        self.loss_curve = directory / "loss.png"
        self.sample = directory / "sample.txt"

    def open(self, experiment: Experiment, dataset: Dataset) -> None:
        """Make the folder, or check that what it holds can be continued by this experiment.

        Raises InputError where model, batch order or data are other than when the run began.
        """
        if self.config.exists():
            before = config.load(self.config)
            for key in _KEPT:
                _check_same(self.directory, key, _value(before, key), _value(experiment, key))
            if json.loads(self.data.read_text())["digest"] != dataset.digest:
                raise InputError(
                    f"{self.directory} was trained on other data than data.text and data.tokenizer give now; "
                    "put them back, or choose another --out"
                )
        elif self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
            raise InputError(f"{self.directory} is there and is no run; choose another --out")
        self.directory.mkdir(parents=True, exist_ok=True)
        dataset.tokenizer.save(self.tokenizer)
        self.data.write_text(json.dumps({"digest": dataset.digest, "held_out_bytes": dataset.held_out_bytes}))
        partial = self.config.with_suffix(".partial")
        partial.write_text(experiment.to_toml(), encoding="utf-8")
        os.replace(partial, self.config)

    def experiment(self) -> Experiment:
        """The resolved configuration. Raises InputError where this is no run."""
        if not self.config.is_file():
            raise InputError(f"{self.directory} is no run: it holds no config.toml; jaxlm train makes one")
        return config.load(self.config)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the run. Raises InputError where it has none."""
        if not self.tokenizer.is_file():
            raise InputError(f"{self.directory} has no tokenizer.json; give --token-ids in place of --prompt")
        return tokenizers.load(self.tokenizer)


def _value(experiment: Experiment, key: str) -> Any:
    value: Any = experiment
    for part in key.split("."):
        value = getattr(value, part)
    return value.model_dump() if hasattr(value, "model_dump") else value


def _check_same(directory: Path, key: str, before: Any, now: Any) -> None:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            _check_same(directory, f"{key}.{name}", before.get(name), now.get(name))
    elif before != now:
        raise InputError(f"{directory} was begun with {key} = {before}, not {now}; put it back, or choose another --out")
