"""A Hugging Face directory, a model of the Hub, or a GGUF file, as a source of a model."""

import json
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm import config
from jaxlm.config.experiment import Experiment
from jaxlm.config.overrides import overridden
from jaxlm.core import copies
from jaxlm.core.addresses import with_addresses
from jaxlm.core.errors import InputError
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families import files, hub, tokens
from jaxlm.families.files import DTYPES, TOKENIZER, computing_dtype, is_adapter, is_gguf
from jaxlm.families.special_tokens import SpecialTokens
from jaxlm.models.execution_config import Dtype, keys_of
from jaxlm.runs.folder import check_vocabulary
from jaxlm.runs.source import WeightsRequest, check_reads
from jaxlm.training.display import Display
from jaxlm.training.origin import Origin
from jaxlm.training.paths import small_files

if TYPE_CHECKING:
    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.families.directory import PublishedModel
    from jaxlm.families.safetensors import LazyTensor, StoredTensor
    from jaxlm.models.tree import Tree


class PublishedSource:
    """The model in a Hugging Face directory."""

    def __init__(self, path: Path):
        """Take a directory, of a model or of adapters of one, the name of such a one on the Hub, whose small files are
        fetched, or a GGUF file."""
        copies.pull(path, small_files)
        self.model = _opened(path)
        self.weights, self.text = PublishedWeights(self.model), PublishedText(self.model)
        self.chat = PublishedChat(self.model, self.text)

    def __str__(self) -> str:
        return str(self.model)

    def experiment(self) -> Experiment:
        """Return the architecture, and for the rest defaults."""
        return config.load(self.model.folder, kind=None)

    def overridden(self, overrides: Collection[str], reads: Collection[str] | None = None) -> Experiment:
        """Return the experiment with `key=value` overrides. Raises InputError for one that is not among `reads`, and
        for those that make another model of it."""
        # Quantised weights are kept as they are, unless somebody asks for another form.
        is_kept = "execution.quantize" not in overridden(overrides)
        kept = self.model.quantization if is_kept else None
        own = [] if kept is None else [f"execution.{key}={json.dumps(value)}" for key, value in keys_of(kept).items()]
        experiment = config.load(self.model.folder, [*own, *overrides], None)
        if experiment.model != self.experiment().model:
            raise InputError(f"{self} has another [model] than the overrides make of it; leave them out")
        check_reads(overridden(overrides), reads)
        return experiment


def _opened(path: Path) -> "PublishedModel":
    """Return the model at a path, with the adapter that the path names."""
    from jaxlm.families.directory import PublishedModel
    from jaxlm.families.gguf.model import GgufModel
    from jaxlm.families.peft import AdaptedModel

    if is_gguf(path):
        return GgufModel(path)
    folder, name = (hub.fetch(path), str(path)) if hub.is_name(path) else (path, None)
    return AdaptedModel(folder, name) if is_adapter(folder) else PublishedModel(folder, name)


class PublishedWeights:
    """The weights in a Hugging Face directory."""

    def __init__(self, model: "PublishedModel"):
        self._model = model

    def restore(self, request: WeightsRequest) -> "tuple[int, Tree]":
        """Return 0 and the parameters, read from the file into their shards. Raises InputError where it is broken."""
        if request.average or request.checkpoint not in ("newest", 0):
            raise InputError(
                f"{self._model} is a published model, with one set of weights; leave out --ema and --checkpoint"
            )
        for remark in self._model.remarks(request.quantized):
            request.say(f"{self._model}: {remark}")
        return 0, self._model.load(request.mesh, request.rules, request.dtype, request.quantized)

    @property
    def published_dtype(self) -> Dtype:
        """The dtype to compute in that is no coarser than most tensors. Raises InputError where a file is broken."""
        return computing_dtype(self._model.dtypes())

    def digest(self, step: int | None = None) -> str:
        """Return a digest of the weights. Raises InputError where a file is missing."""
        return self._model.digest()

    def origin(self, step: int | None = None) -> Origin:
        """Return the record of a run that begins with these weights, which have no step."""
        hub_name, folder = self._model.hub_name, self._model.path
        return Origin(hub_name or with_addresses(folder.absolute()), "published", None, hub_name and folder.name)

    def sidecar_files(self) -> dict[str, bytes]:
        """Return the small files of the directory by name, and the dtypes of its tensors."""
        contents = {file.name: file.read_bytes() for file in files.carried(self._model.folder)}
        return contents | {DTYPES: (json.dumps(self._model.dtypes(), indent=1) + "\n").encode()}

    def mtp_tensors(self) -> "Mapping[str, StoredTensor | LazyTensor]":
        """Return the tensors of layers for multi-token prediction, by name. Raises InputError for a broken file."""
        return self._model.mtp_tensors


class PublishedText:
    """The tokenizer in a Hugging Face directory, which has no text."""

    def __init__(self, model: "PublishedModel"):
        self._model = model

    @property
    def has_tokenizer(self) -> bool:
        """Return whether there is a tokenizer, in a file of a format that jaxlm has."""
        return bool(tokens.files(self._model.folder))

    @property
    def tokenizer_file(self) -> Path:
        """The file of the tokenizer, or of what that is converted to. Raises InputError where there is none, or one
        that cannot be converted."""
        return self._tokenizer_file

    @cached_property
    def _tokenizer_file(self) -> Path:
        folder = self._model.folder
        if not self.has_tokenizer:
            only = f", but {code}, which is code and is not run" if (code := tokens.code(folder)) else ""
            raise InputError(f"{self._model} has no {TOKENIZER}{only}, which texts need; generate from --token-ids")
        return tokens.complete(folder, self._model.model.vocab_size)

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises InputError as `tokenizer_file`, and for one with more tokens than the model."""
        tokenizer = tokens.load(self.tokenizer_file, self._model.folder)
        check_vocabulary(tokenizer, self._model.model.vocab_size, self.tokenizer_file)
        return tokenizer

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids of `eos_token_id`. Raises InputError where a file has what is no id."""
        return SpecialTokens(self._model.folder).stop_token_ids

    def check_held_out(self, experiment: Experiment) -> None:
        """Raise InputError: no text is known that a published model was trained with."""
        raise self._has_none()

    def held_out(self, experiment: Experiment, display: Display) -> dict[str, Rows]:
        """Raise InputError as `check_held_out` does."""
        raise self._has_none()

    def _has_none(self) -> InputError:
        return InputError(f"{self._model} is a published model, which has no held-out text; give --data PATH")


class PublishedChat:
    """The chat template in a Hugging Face directory, and the settings that its publisher draws with."""

    def __init__(self, model: "PublishedModel", text: PublishedText):
        self._model, self._text = model, text

    def template(self, path_or_name: str | None = None, key: str = "--chat-template") -> "ChatTemplate | None":
        """Return the chat template that is given, or of the directory, that beside an adapter before its base's; None
        without one, or without a tokenizer. Raises InputError for one that is broken, or not there."""
        from jaxlm.data.chat_template import FILE, SETTINGS, chosen, load, read

        if not self._text.has_tokenizer:
            return None
        folder, tokenizer = self._model.folder, self._text.load_tokenizer()
        if (adapter := self._model.adapter) is not None and (adapter / SETTINGS).is_file():
            folder = adapter
        if path_or_name is not None:
            return chosen(path_or_name, key, folder, tokenizer)
        if adapter is not None and (adapter / FILE).is_file():
            return read(adapter / FILE, folder, tokenizer)
        return load(folder, tokenizer) or load(self._model.folder, tokenizer)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the template: none but its own."""
        return {}

    @property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json."""
        return self._model.generation
