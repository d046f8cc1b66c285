"""A Hugging Face directory as a model to use, and runs that were imported from one or are to become one."""

import json
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.files import replace, unwritable
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families import files, hub, tokens
from jaxlm.families.files import TOKENIZER, is_adapter
from jaxlm.models.config import ModelConfig
from jaxlm.run import Run, check_reads, check_vocabulary, keep, text_rows
from jaxlm.source import ModelSource
from jaxlm.training.display import Display
from jaxlm.training.origin import Origin

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.models.tree import Tree
    from jaxlm.parallel.rules import Rules

_DTYPES = "dtypes.json"  # of the tensors that an imported run was read from


class PublishedSource:
    """The model in a Hugging Face directory, with what `jaxlm.api.LoadedModel` asks of a run."""

    def __init__(self, path: Path):
        """Take a directory, of a model or of adapters of one, or the name of such a one on the Hub, whose small files
        are fetched."""
        from jaxlm.families.directory import PublishedModel
        from jaxlm.families.peft import AdaptedModel

        folder, name = (hub.fetch(path), str(path)) if hub.is_name(path) else (path, None)
        self.model = AdaptedModel(folder, name) if is_adapter(folder) else PublishedModel(folder, name)
        self.folder = self.model.folder

    def __str__(self) -> str:
        return str(self.model)

    def experiment(self) -> Experiment:
        """The architecture, and for the rest defaults."""
        return config.load(self.folder, kind=None)

    def overridden(self, overrides: Collection[str], reads: Collection[str] | None = None) -> Experiment:
        """The experiment with `key=value` overrides. Raises InputError as `Run.overridden` does."""
        experiment = config.load(self.folder, overrides, None)
        if experiment.model != self.experiment().model:
            raise InputError(f"{self} has another [model] than the overrides make of it; leave them out")
        check_reads(config.overridden(overrides), reads)
        return experiment

    @property
    def has_tokenizer(self) -> bool:
        """Return whether there is a tokenizer, in a file of a format that jaxlm has."""
        return bool(tokens.files(self.folder))

    @property
    def tokenizer_file(self) -> Path:
        """The file of its tokenizer, or of what that is converted to. Raises InputError where there is none, or one
        that cannot be converted."""
        return self._tokenizer_file

    @cached_property
    def _tokenizer_file(self) -> Path:
        if not self.has_tokenizer:
            only = f", but {code}, which is code and is not run" if (code := tokens.code(self.folder)) else ""
            raise InputError(f"{self} has no {TOKENIZER}{only}; give --token-ids in place of --prompt")
        return tokens.complete(self.folder, self.model.model.vocab_size)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises InputError as `tokenizer_file`, and for one with more tokens than the model."""
        found = tokens.load(self.tokenizer_file, self.folder)
        check_vocabulary(found, self.model.model.vocab_size, self.tokenizer_file)
        return found

    def chat_template(self) -> "ChatTemplate | None":
        """The chat template, or None. Raises InputError for one that is broken."""
        from jaxlm.data.chat_template import load

        return load(self.folder, self.load_tokenizer()) if self.has_tokenizer else None

    @property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json."""
        return self.model.generation

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
        """Return 0 and the parameters, read from the file into their shards. Raises InputError where it is broken."""
        if average or checkpoint not in ("newest", 0):
            raise InputError(f"{self} is a published model, with one set of weights; leave out --ema and --checkpoint")
        for remark in self.model.remarks():
            say(f"{self}: {remark}")
        return 0, self.model.load(mesh, rules, dtype)

    def check_own_text(self, experiment: Experiment) -> None:
        """Raise InputError: no text is known that a published model was trained with."""
        raise InputError(f"{self} is a published model, which has no held-out text; give --data PATH")

    def carried(self) -> dict[str, bytes]:
        """Its small files by name, and the dtypes of its tensors."""
        found = {file.name: file.read_bytes() for file in files.carried(self.folder)}
        return found | {_DTYPES: (json.dumps(self.model.dtypes(), indent=1) + "\n").encode()}

    def origin(self, step: int | None = None) -> Origin:
        """The record of a run that begins with its weights, which have no step."""
        hub_name, folder = self.model.hub_name, self.model.adapter or self.folder
        return Origin(hub_name or str(folder.absolute()), "published", None, hub_name and folder.name)

    def weights_digest(self, step: int | None = None) -> str:
        """Return a digest of its weights. Raises InputError where a file is missing."""
        return self.model.digest()

    def held_out(self, experiment: Experiment, display: Display) -> dict[str, Rows]:
        """Raise InputError as `check_own_text` does."""
        self.check_own_text(experiment)
        raise AssertionError

    def text(
        self, experiment: Experiment, data: str, template: "ChatTemplate | None", display: Display
    ) -> dict[str, Rows]:
        """The rows of a text, or of conversations that a template shows, in the model's tokens. Raises InputError where
        it cannot be read."""
        return text_rows(experiment, data, self.load_tokenizer(), template, display)


class Converted(NamedTuple):
    """The family of a model that was imported or exported, and its parameters."""

    family: str
    parameters: int


def import_run(path: Path, out: Path, say: Callable[[str], None]) -> Converted:
    """Convert a model in a Hugging Face directory, or of the Hub, into a run, once, in the dtype that it is stored in.

    The small files of the directory are carried in `huggingface/` of the run, for its tokenizer and for an export.
    Training continues in no such folder, but from it. Raises InputError where the directory is broken or the folder is
    taken.
    """
    import jax

    from jaxlm.models.tree import parameter_count, paths
    from jaxlm.parallel.devices import mesh_here
    from jaxlm.parallel.rules import PREFILL
    from jaxlm.training import checkpoints

    published, run = PublishedSource(path), Run(out)
    source, experiment = published.model, published.experiment()
    run.paths.check_name()
    if (out.exists() and any(out.iterdir())) or unwritable(out):
        raise InputError(f"{out} is there, or cannot be made; give another folder")
    for remark in source.remarks():
        say(remark)
    say(f"{source.family.name}: {len(source.tensors)} tensors")
    if published.has_tokenizer:
        published.load_tokenizer()  # refused before the weights are read
    elif code := tokens.code(published.folder):
        say(f"{code} is code and is not run: the run has no tokenizer")
    mesh = mesh_here(1, lambda devices: config.layout(experiment, devices, "decode"))
    with jax.set_mesh(mesh):
        parameters = source.load(mesh, PREFILL)  # sharded as in training, but for what these devices do not divide
        finite = jax.jit(lambda tree: jax.tree.map(_is_finite, tree))(parameters)
    if found := [path for path, good in paths(finite).items() if not good]:
        say(f"not all numbers are finite in {', '.join(found)}")
    keep(published.carried(), run.paths.huggingface)
    published.origin().save(run.paths.origin)
    if published.has_tokenizer:
        run.paths.tokenizer.write_bytes(published.tokenizer_file.read_bytes())
        data = experiment.data.model_copy(update={"tokenizer": str(run.paths.tokenizer)})
        experiment = experiment.model_copy(update={"data": data})
    checkpoints.save_parameters(run.paths.checkpoints, parameters)
    replace(run.paths.config, experiment.to_toml())  # last: it makes the folder a run
    return Converted(source.family.name, parameter_count(source.model))


def _is_finite(x: "jax.Array") -> "jax.Array":
    """Return whether all numbers are finite, by their extremes: XLA would keep an answer for each number."""
    from jax.numpy import isfinite

    return isfinite(x.min()) & isfinite(x.max())


def export(
    source: ModelSource, parameters: "Tree", experiment: Experiment, out: Path, say: Callable[[str], None]
) -> Converted:
    """Write a Hugging Face directory of a model.

    A run that was imported, or started from published weights, gives back the files that it came with and the dtypes of
    its tensors; another is in float32, with its own tokenizer. Raises InputError for a model of no family, and for a
    folder that is there.
    """
    from jaxlm.families import directory
    from jaxlm.models.tree import parameter_count

    if out.exists() or unwritable(out):
        raise InputError(f"{out} is there, or cannot be made; give another folder")
    carried = source.carried()
    dtypes = json.loads(carried.pop(_DTYPES, b'{"": "F32"}'))
    if not tokens.among(carried) and source.has_tokenizer:
        carried = _own_tokenizer(source, experiment) | carried
    family = directory.write(out, experiment.model, parameters, dtypes, carried, say)
    return Converted(family.name, parameter_count(experiment.model))


def _own_tokenizer(source: ModelSource, experiment: Experiment) -> dict[str, bytes]:
    """Return the files of a tokenizer of ours: a text begins after its separator, and ends with it."""
    tokenizer, described = source.load_tokenizer(), json.loads(source.tokenizer_file.read_text(encoding="utf-8"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": experiment.model.context_length,
        "clean_up_tokenization_spaces": False,
    }
    generation: dict[str, Any] = {}
    if (separator := tokenizer.separator) is not None:
        name = tokenizer.name_of(separator)
        settings |= {"bos_token": name, "eos_token": name}
        generation |= {"bos_token_id": separator, "eos_token_id": separator}
        described["post_processor"] = tokens.template(name, separator)
    made = {TOKENIZER: described, "tokenizer_config.json": settings, "generation_config.json": generation}
    return {name: json.dumps(content, indent=2, ensure_ascii=False).encode() for name, content in made.items()}
