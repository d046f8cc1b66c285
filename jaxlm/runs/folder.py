"""RUN, the folder of a training run: what it holds, and which job has it."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from jaxlm import config
from jaxlm.config.experiment import Experiment
from jaxlm.core import copies
from jaxlm.core.errors import InputError
from jaxlm.core.files import lock
from jaxlm.core.schema import Change
from jaxlm.data import tokenizers
from jaxlm.data.config import TOKENIZERS, expanded
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families import tokens
from jaxlm.families.files import CONFIG as PUBLISHED
from jaxlm.families.files import is_published
from jaxlm.models.quantize_config import Quantization
from jaxlm.training import manifests
from jaxlm.training import origin as origins
from jaxlm.training.origin import Origin
from jaxlm.training.paths import RunPaths, small_files

_NAMED = 8  # changed keys in a message, at most


class Run:
    """The folder of a run: its files (`paths`), what they say, and the claim of a job to it.

    Of a run in a bucket the files but for arrays are copied here, where they are not or older.
    """

    def __init__(self, directory: Path):
        copies.pull(directory, small_files)
        self.paths = RunPaths(directory)
        self._claimed: TextIO | None = None

    def __str__(self) -> str:
        return str(self.paths)

    def experiment(self) -> Experiment:
        """Return the resolved configuration. Raises InputError where this is no run."""
        if not self.paths.config.is_file():
            raise self._is_none()
        return config.load(self.paths.directory)

    def _is_none(self) -> InputError:
        """Return the error for a path at which there is no run, with the nearest one beside it."""
        paths, directory = self.paths, self.paths.directory
        if directory.is_file():
            return InputError(f"{paths} is a file and no run; give a run, a Hugging Face directory or hf:ORG/NAME")
        if directory.exists():
            return InputError(
                f"{paths} is no run: it holds no {paths.config.name}, nor the {PUBLISHED} of a Hugging Face directory; "
                "jaxlm train makes one"
            )
        near = nearest_run(directory)
        return InputError(f"there is no run {paths}; {f'did you mean {near}?' if near else 'jaxlm train makes one'}")

    def digest(self) -> str:
        """Return the identity of the data that it was begun with. Raises InputError where that is not recorded."""
        try:
            return json.loads(self.paths.data.read_text())["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.paths} is no run: it has no {self.paths.data.name} that is whole; choose another --out"
            ) from None

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises InputError where there is none, or one with more tokens than the model."""
        if not self.paths.tokenizer.is_file():
            name = self.paths.tokenizer.name
            raise InputError(f"{self.paths} has no {name}, which texts need; generate from --token-ids")
        if is_published(self.paths.huggingface):
            tokenizer = tokens.load(self.paths.tokenizer, self.paths.huggingface)
        else:
            tokenizer = tokenizers.load(self.paths.tokenizer)
        check_vocabulary(tokenizer, self.experiment().model.vocab_size, self.paths.tokenizer)
        return tokenizer

    def keeps(self, tokenizer: str) -> bool:
        """Return whether a `data.tokenizer` is the copy that the run keeps."""
        own = self.paths.tokenizer
        if tokenizer in TOKENIZERS or not own.is_file():
            return False
        return expanded(tokenizer, "data.tokenizer").absolute() == own.absolute()

    def trained_with(self, changed: Sequence[Change]) -> str:
        """Return a sentence that says with which values of these keys it was trained."""
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        return f"{self.paths} was trained with {'; '.join(map(str, changed[:_NAMED]))}{more}"

    @property
    def begun_from(self) -> Origin | None:
        """The weights that the run began with; None for those of its seed. Raises InputError where that is broken."""
        return origins.read(self.paths.origin)

    @property
    def quantized(self) -> Quantization | None:
        """The form that the matrices of layers are kept in; None where they are not quantised. Raises InputError where
        that is broken."""
        if not self.paths.quantized.is_file():
            return None
        try:
            kept = Quantization(**json.loads(self.paths.quantized.read_text(encoding="utf-8")))
            return kept._replace(targets=tuple(kept.targets))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{self.paths.quantized} is broken: {error}") from None

    @property
    def has_adapters(self) -> bool:
        """Return whether it trains adapters of other weights."""
        return self.paths.config.is_file() and self.experiment().lora is not None

    @property
    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint that was written to its end, whole or not by now."""
        return bool(manifests.steps_in(self.paths.checkpoints))

    @property
    def is_imported(self) -> bool:
        """Return whether it is the result of `jaxlm import`, which has no data and is not trained."""
        paths = self.paths
        return paths.config.is_file() and paths.huggingface.is_dir() and not paths.data.exists()

    def claim(self) -> None:
        """Claim the folder, once it is there, for this job alone until `release`, or the end of its first process.

        Raises InputError where another job has it, or where nothing can be written to it.
        """
        if self._claimed is not None or not self.paths.directory.exists():
            return
        try:
            self._claimed = self.paths.lock.open("a")  # and left open: the system releases the lock with the process
        except OSError as error:
            raise InputError(f"{self.paths} cannot be written to ({error.strerror}); choose another --out") from None
        try:
            lock(self._claimed)
        except BlockingIOError:
            raise self._taken() from None

    def release(self) -> None:
        """Leave the folder to other jobs, if this one has it."""
        if self._claimed is not None:
            self._claimed.close()
            self._claimed = None

    def check_free(self) -> None:
        """Raise InputError where another job has the folder.

        Every process checks before it joins the others: a job that was started with the same address would be joined,
        and die of it.
        """
        try:
            copies.check_free(self.paths.directory)
        except copies.Taken as taken:
            raise InputError(str(taken)) from None
        try:
            with self.paths.lock.open("r+") as file:
                lock(file, shared=True)
        except BlockingIOError:
            raise self._taken() from None
        except OSError:
            pass  # none there yet, or none for us: `claim` says which

    def _taken(self) -> InputError:
        return InputError(f"another jaxlm train is at work in {self.paths}; wait for its end, or choose another --out")


def nearest_run(missing: Path) -> Path | None:
    """Return the run beside a path at which there is none whose name is the nearest: first of those that begin with
    it, as of one with overrides."""
    try:
        runs = sorted(path.name for path in missing.parent.iterdir() if RunPaths(path).are_of_a_run)
    except OSError:
        return None
    longer = [name for name in runs if name.startswith(f"{missing.name},")]
    near = longer[:1] or difflib.get_close_matches(missing.name, runs, 1)
    return missing.parent / near[0] if near else None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, file: Path) -> None:
    """Raise InputError for a tokenizer with more tokens than a model."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{file} has {tokenizer.vocab_size} tokens, and model.vocab_size = {vocab_size}: the model was trained "
            "with another; put that back"
        )
