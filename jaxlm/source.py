"""A source of weights: a run, or a published model. What a run asks of one that it begins with."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxlm.config import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.schema import shown
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.models.config import ModelConfig
from jaxlm.training.changes import architecture
from jaxlm.training.display import Display

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.models.tree import Tree
    from jaxlm.parallel.rules import Rules

_NAMED = 6  # changed keys in a message, at most


class ModelSource(Protocol):
    """A folder with a model: a run (`jaxlm.run.Run`) or a Hugging Face directory
    (`jaxlm.published.PublishedSource`)."""

    def experiment(self) -> Experiment:
        """Return its configuration."""
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

    def restore(
        self,
        model: ModelConfig,
        mesh: "Mesh",
        rules: "Rules",
        dtype: "jax.typing.DTypeLike | None",
        *,
        checkpoint: str = "newest",
        average: bool = False,
        say: Callable[[str], None] = print,
    ) -> "tuple[int, Tree]":
        """Return its step and its parameters, on a mesh, in a dtype or each in its own. Raises InputError where they
        are not whole."""
        ...

    def carry(self, folder: Path) -> None:
        """Keep the small files that published weights came with in a folder."""
        ...

    def check_own_text(self, experiment: Experiment) -> None:
        """Raise InputError where it has no text of its own, or another."""
        ...

    def held_out(self, experiment: Experiment, display: Display) -> dict[str, Rows]:
        """Return the rows of its held-out text. Raises InputError as `check_own_text`."""
        ...

    def text(self, experiment: Experiment, data: str, display: Display) -> dict[str, Rows]:
        """Return the rows of other text in its tokens. Raises InputError where it cannot be read."""
        ...


def check_start(source: ModelSource, experiment: Experiment) -> None:
    """Raise InputError where a run cannot begin with these weights: another [model], or no tokenizer of theirs."""
    if found := architecture(source.experiment(), experiment):
        changes = [f"{change.key} = {shown(change.now)} and not {shown(change.before)}" for change in found]
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise InputError(
            f"--from {source} has another [model] than the configuration: {', '.join(changes[:_NAMED])}{more}"
        )
    if source.has_tokenizer and experiment.data.tokenizer == "bpe":
        raise _other_tokenizer(source)


def check_tokenizer(source: ModelSource, tokenizer: Tokenizer) -> None:
    """Raise InputError where a run would begin with weights that were trained with another tokenizer."""
    if source.has_tokenizer and source.load_tokenizer().to_json() != tokenizer.to_json():
        raise _other_tokenizer(source)


def _other_tokenizer(source: ModelSource) -> InputError:
    return InputError(f"--from {source} has a tokenizer of its own; set data.tokenizer={source.tokenizer_file}")
