"""A source of weights: a run, or a published model. What a run asks of one that it begins with."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.schema import shown
from jaxlm.data import tokenizers
from jaxlm.data.config import TOKENIZERS, expanded
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.models.config import ModelConfig
from jaxlm.training.changes import architecture
from jaxlm.training.display import Display
from jaxlm.training.origin import Origin

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.models.tree import Tree
    from jaxlm.parallel.rules import Rules

_NAMED = 6  # changed keys in a message, at most


class ModelSource(Protocol):
    """A folder with a model: a run (`jaxlm.run.Run`) or a Hugging Face directory
    (`jaxlm.published.PublishedSource`)."""

    def experiment(self) -> Experiment:
        """Return its configuration."""
        ...

    def overridden(self, overrides: Collection[str], reads: Collection[str] | None = None) -> Experiment:
        """Return its configuration with `key=value` overrides, of the sections and keys that the caller `reads` alone;
        None reads all. Raises InputError for any other, and where they make another model of it."""
        ...

    @property
    def has_tokenizer(self) -> bool:
        """Return whether it has a tokenizer."""
        ...

    @property
    def tokenizer_file(self) -> Path:
        """Return the file of its tokenizer, which need not be there."""
        ...

    @property
    def generation(self) -> dict[str, Any]:
        """Return the content of its generation_config.json; empty without one."""
        ...

    def load_tokenizer(self) -> Tokenizer:
        """Return its tokenizer. Raises InputError without one."""
        ...

    def chat_template(self) -> "ChatTemplate | None":
        """Return its chat template, or None. Raises InputError for one that is broken."""
        ...

    def restore(
        self,
        model: ModelConfig,
        mesh: "Mesh",
        rules: "Rules",
        dtype: "jax.typing.DTypeLike | None",
        *,
        checkpoint: str | int = "newest",
        average: bool = False,
        say: Callable[[str], None] = print,
    ) -> "tuple[int, Tree]":
        """Return its step and its parameters, on a mesh, in a dtype or each in its own. Raises InputError where they
        are not whole."""
        ...

    def carried(self) -> dict[str, bytes]:
        """Return the small files that published weights came with, by name, which an export gives back."""
        ...

    def weights_digest(self, step: int | None = None) -> str:
        """Return a digest of its weights, of a step or the newest. Raises InputError where they are not whole."""
        ...

    def origin(self, step: int | None = None) -> Origin:
        """Return the record of a run that begins with its weights, of this step."""
        ...

    def check_own_text(self, experiment: Experiment) -> None:
        """Raise InputError where it has no text of its own, or another."""
        ...

    def held_out(self, experiment: Experiment, display: Display) -> dict[str, Rows]:
        """Return the rows of its held-out text. Raises InputError as `check_own_text`."""
        ...

    def text(
        self, experiment: Experiment, data: str, template: "ChatTemplate | None", display: Display
    ) -> dict[str, Rows]:
        """Return the rows of other text, or of conversations that a template shows, in its tokens. Raises InputError
        where it cannot be read."""
        ...


def load_experiment(path: str | Path, overrides: Iterable[str], source: ModelSource) -> Experiment:
    """Load a configuration of a run that begins with these weights: [model] and data.tokenizer are theirs where it does
    not give them. Raises InputError as `jaxlm.config.load` does."""
    model = source.experiment().model.model_dump(mode="json", exclude_none=True)
    tokenizer = str(source.tokenizer_file) if source.has_tokenizer else None
    return config.load(path, overrides, model=model, tokenizer=tokenizer)


def check_start(source: ModelSource, experiment: Experiment) -> None:
    """Raise InputError where a run cannot begin with these weights: another [model], or no tokenizer of theirs."""
    if found := architecture(source.experiment(), experiment):
        changes = [f"{change.key} = {shown(change.now)} and not {shown(change.before)}" for change in found]
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise InputError(
            f"--from {source} has another [model] than the configuration: {', '.join(changes[:_NAMED])}{more}"
        )
    tokenizer = experiment.data.tokenizer
    if tokenizer == "bpe" and not source.has_tokenizer:
        raise InputError(f"--from {source} has no tokenizer; set data.tokenizer to the one that it was trained with")
    if tokenizer == "bpe":
        raise _other_tokenizer(source)
    if tokenizer not in TOKENIZERS and Path(tokenizer) != source.tokenizer_file:
        check_tokenizer(source, tokenizers.load(expanded(tokenizer, "data.tokenizer")))


def with_own_tokenizer(experiment: Experiment, source: ModelSource, own: Path) -> Experiment:
    """Return the experiment of a run that begins with these weights and keeps a copy of their tokenizer.json."""
    if not source.has_tokenizer or experiment.data.tokenizer in TOKENIZERS:
        return experiment
    return experiment.model_copy(update={"data": experiment.data.model_copy(update={"tokenizer": str(own)})})


def check_tokenizer(source: ModelSource, tokenizer: Tokenizer) -> None:
    """Raise InputError where a run would begin with weights that were trained with another tokenizer."""
    if source.has_tokenizer and source.load_tokenizer().to_json() != tokenizer.to_json():
        raise _other_tokenizer(source)


def _other_tokenizer(source: ModelSource) -> InputError:
    return InputError(f"--from {source} has a tokenizer of its own, and data.tokenizer is another; leave that out")
