"""A source of a model: a run, or a published model. The checks of a run that begins with one."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxlm import config
from jaxlm.config.experiment import Experiment
from jaxlm.core.addresses import place, with_addresses
from jaxlm.core.errors import InputError
from jaxlm.core.schema import shown
from jaxlm.data import tokenizers
from jaxlm.data.config import TOKENIZERS, expanded
from jaxlm.data.dataset import tokenize_whole
from jaxlm.data.packing import NothingToLearn, Rows, cut_remark
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import Dtype
from jaxlm.models.quantize_config import Quantization
from jaxlm.training.changes import architecture
from jaxlm.training.display import Display
from jaxlm.training.origin import Origin

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.families.safetensors import LazyTensor, StoredTensor
    from jaxlm.models.tree import Tree
    from jaxlm.parallel.rules import Rules

_NAMED = 6  # changed keys in a message, at most


class WeightsRequest(NamedTuple):
    """A request for weights.

    Attributes:
      model: the architecture.
      mesh, rules: where the parameters are to lie.
      dtype: of the parameters; None keeps the one that each array is stored in.
      checkpoint: "newest", or "best", the one with the lowest held-out loss, or a step.
      average: whether to take the moving average of the weights.
      say: takes a line about each checkpoint that is passed over.
      quantized: the form of the matrices of layers; None for all in `dtype`. Numbers are rounded from what is stored.
    """

    model: ModelConfig
    mesh: "Mesh"
    rules: "Rules"
    dtype: "jax.typing.DTypeLike | None"
    checkpoint: str | int = "newest"
    average: bool = False
    say: Callable[[str], None] = print
    quantized: Quantization | None = None


class ModelWeights(Protocol):
    """The weights of a model."""

    def restore(self, request: WeightsRequest) -> "tuple[int, Tree]":
        """Return their step and the parameters. Raises InputError where they are not whole, or quantised otherwise."""
        ...

    @property
    def published_dtype(self) -> Dtype | None:
        """The dtype to compute in that is no coarser than published weights; None of weights that were trained. Raises
        InputError where they are not whole."""
        ...

    def digest(self, step: int | None = None) -> str:
        """Return a digest of the weights of a step, or the newest. Raises InputError where they are not whole."""
        ...

    def origin(self, step: int | None = None) -> Origin:
        """Return the record of a run that begins with these weights, of this step."""
        ...

    def sidecar_files(self) -> dict[str, bytes]:
        """Return the small files that published weights came with, by name, which an export gives back."""
        ...

    def mtp_tensors(self) -> "Mapping[str, StoredTensor | LazyTensor]":
        """Return the tensors of published layers for multi-token prediction, by name, which an export gives back as
        they are: none of weights that were trained. Raises InputError where a file is broken."""
        ...


class ModelText(Protocol):
    """The tokenizer of a model, and the text that was held out from its training."""

    @property
    def has_tokenizer(self) -> bool:
        """Return whether there is a tokenizer."""
        ...

    @property
    def tokenizer_file(self) -> Path:
        """The file of the tokenizer, which need not be there."""
        ...

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises InputError without one."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids of `eos_token_id` that published weights came with, which end a text where there is no tokenizer."""
        ...

    def check_held_out(self, experiment: Experiment) -> None:
        """Raise InputError where there is no held-out text, or another than that of the experiment."""
        ...

    def held_out(self, experiment: Experiment, display: Display) -> dict[str, Rows]:
        """Return the rows of the held-out text, by source. Raises InputError as `check_held_out`."""
        ...


class ModelChat(Protocol):
    """The chat template of a model, and the settings that its publisher draws with."""

    def template(self, path_or_name: str | None = None, key: str = "--chat-template") -> "ChatTemplate | None":
        """Return the chat template, or None: that of a path or a name, which a key or option gives
        (`jaxlm.data.chat_template.chosen`), or else the model's own. Raises InputError for one that is broken, or not
        there."""
        ...

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the model's own template that it was trained with."""
        ...

    @property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty without one."""
        ...


class ModelSource(Protocol):
    """A folder with a model: a run (`jaxlm.runs.trained`), also one with adapters (`jaxlm.runs.adapters`), or a Hugging
    Face directory (`jaxlm.runs.published`)."""

    @property
    def weights(self) -> ModelWeights: ...

    @property
    def text(self) -> ModelText: ...

    @property
    def chat(self) -> ModelChat: ...

    def experiment(self) -> Experiment:
        """Return the configuration."""
        ...

    def overridden(self, overrides: Collection[str], reads: Collection[str] | None = None) -> Experiment:
        """Return the configuration with `key=value` overrides, of the sections and keys that the caller `reads` alone;
        None reads all. Raises InputError for any other, and where they make another model of it."""
        ...


def load_experiment(path: str | Path, overrides: Iterable[str], source: ModelSource) -> Experiment:
    """Load a configuration of a run that begins with these weights: [model] and data.tokenizer are theirs where it does
    not give them. Raises InputError as `jaxlm.config.load` does."""
    model = source.experiment().model.model_dump(mode="json", exclude_none=True)
    tokenizer = with_addresses(source.text.tokenizer_file) if source.text.has_tokenizer else None
    return config.load(path, overrides, model=model, tokenizer=tokenizer)


def check_start(source: ModelSource, experiment: Experiment) -> None:
    """Raise InputError where a run cannot begin with these weights: another [model], or no tokenizer of theirs."""
    if changed := architecture(source.experiment(), experiment):
        changes = [f"{change.key} = {shown(change.now)} and not {shown(change.before)}" for change in changed]
        more = f", and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise InputError(
            f"--from {source} has another [model] than the configuration: {', '.join(changes[:_NAMED])}{more}"
        )
    tokenizer = experiment.data.tokenizer
    if tokenizer == "bpe" and not source.text.has_tokenizer:
        raise InputError(f"--from {source} has no tokenizer; set data.tokenizer to the one that it was trained with")
    if tokenizer == "bpe":
        raise _other_tokenizer(source)
    if tokenizer not in TOKENIZERS and place(tokenizer) != source.text.tokenizer_file:
        check_tokenizer(source, tokenizers.load(expanded(tokenizer, "data.tokenizer")))


def with_own_tokenizer(experiment: Experiment, source: ModelSource, own: Path) -> Experiment:
    """Return the experiment of a run that begins with these weights and keeps a copy of their tokenizer.json."""
    if not source.text.has_tokenizer or experiment.data.tokenizer in TOKENIZERS:
        return experiment
    return experiment.model_copy(update={"data": experiment.data.model_copy(update={"tokenizer": with_addresses(own)})})


def check_tokenizer(source: ModelSource, tokenizer: Tokenizer) -> None:
    """Raise InputError where a run would begin with weights that were trained with another tokenizer."""
    if source.text.has_tokenizer and source.text.load_tokenizer().to_json() != tokenizer.to_json():
        raise _other_tokenizer(source)


def _other_tokenizer(source: ModelSource) -> InputError:
    return InputError(f"--from {source} has a tokenizer of its own, and data.tokenizer is another; leave that out")


def check_reads(keys: Iterable[str], reads: Collection[str] | None) -> None:
    """Raise InputError for a key that is set and that nobody `reads`; None reads all."""
    if reads is None:
        return
    for key in keys:
        if not any(f"{key}.".startswith(f"{read}.") for read in reads):
            raise InputError(f"{key} changes nothing here, where {', '.join(reads)} are read of the run; leave it out")


def text_rows(
    experiment: Experiment, data: str, tokenizer: Tokenizer, template: "ChatTemplate | None", display: Display
) -> dict[str, Rows]:
    """Return the rows of a text at the path `data`, or of conversations that a template shows, in tokens. Raises
    InputError where it cannot be read, or has nothing to predict."""
    try:
        store = tokenize_whole(experiment.data, data, tokenizer, template, display.say, display.progress)
        rows = Rows(store, experiment.training.sequence)
    except NothingToLearn as error:
        raise InputError(f"{data}: {str(error).removeprefix('data.text: ')}") from None
    except InputError as error:
        raise InputError(re.sub(r"^data\.(text|chat)\b", _options, str(error))) from None
    if (remark := cut_remark(rows)) is not None:
        display.say(f"{data}: {remark}")
    return {"data": rows}


def _options(key: re.Match[str]) -> str:
    """Return the option of `jaxlm eval` for a key of other text."""
    return {"text": "--data", "chat": "--chat"}[key[1]]
