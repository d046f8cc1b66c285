"""A run as a source of a model: its weights, its text and its chat template."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm import config
from jaxlm.config.experiment import Experiment
from jaxlm.config.overrides import overridden
from jaxlm.core import copies
from jaxlm.core.addresses import with_addresses
from jaxlm.core.errors import InputError
from jaxlm.data.config import TOKENIZERS, expanded
from jaxlm.data.dataset import prepare
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families.files import DTYPES, GENERATION, computing_dtype, read_json
from jaxlm.families.special_tokens import SpecialTokens
from jaxlm.models.execution_config import Dtype
from jaxlm.runs.folder import Run
from jaxlm.runs.source import ModelWeights, WeightsRequest, check_reads
from jaxlm.training import manifests
from jaxlm.training.changes import architecture
from jaxlm.training.display import Display
from jaxlm.training.origin import Origin

if TYPE_CHECKING:
    from flax import nnx

    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.families.safetensors import LazyTensor, StoredTensor
    from jaxlm.models.tree import Tree

# Keys of [data] that decide the tokens: by themselves, or by files, which may have been moved.
_SHAPING = ("field", "documents", "held_out")
_FILES = ("tokenizer", "text", "chat", "chat_template", "validation", "sources")
_ATTEMPTS = 5  # to read a checkpoint of a run that trains on, and removes older ones


class RunSource:
    """The model of a run. Its weights are those in its checkpoints, unless others are given, as for adapters."""

    def __init__(self, run: Run, weights: ModelWeights | None = None):
        self.run = run
        self.weights: ModelWeights = weights or RunWeights(run)
        self.text, self.chat = RunText(run), RunChat(run)

    def __str__(self) -> str:
        return str(self.run)

    def experiment(self) -> Experiment:
        """Return the resolved configuration of the run. Raises InputError where it is none."""
        return self.run.experiment()

    def overridden(self, overrides: Collection[str], reads: Collection[str] | None = None) -> Experiment:
        """Return the experiment with `key=value` overrides, of the sections and keys that the caller `reads` alone.

        Raises InputError where this is no run, where no such model is in it, or where an override would change nothing.
        """
        before = self.experiment()  # refuses what is no run
        # What adapters were trained with is the form of their base, and not of its sum with them.
        of_base = ["execution.quantize=none"] if before.lora is not None else []
        experiment = config.load(self.run.paths.directory, [*of_base, *overrides], None)
        if changed := architecture(before, experiment):
            raise InputError(f"{self.run.trained_with(changed)}; leave it out")
        check_reads(overridden(overrides), reads)
        return experiment


class RunWeights:
    """The weights in the checkpoints of a run."""

    def __init__(self, run: Run):
        self.run = run

    def restore(self, request: WeightsRequest) -> "tuple[int, Tree]":
        """Return the step of a checkpoint and its parameters, rounded to a dtype while they are read, or quantised one
        matrix after the other. Raises InputError where there is no whole checkpoint, or one that is quantised
        otherwise."""
        from jaxlm.models import tree as model_tree
        from jaxlm.models.quantizing import Quantizer

        kept = self.run.quantized
        if kept is not None and request.quantized != kept:
            cannot = "widened" if request.quantized is None else f"rounded to {request.quantized}"
            raise InputError(f"{self.run} is kept in {kept}, and cannot be {cannot}; take the model that was quantised")
        if kept is not None or request.quantized is None:
            return self.restore_tree(model_tree.abstract(request.model, quantized=kept)[1], request)
        # As it is stored, so that numbers are rounded once.
        step, parameters = self.restore_tree(model_tree.abstract(request.model)[1], request._replace(dtype=None))
        quantizer = Quantizer(request.model, request.quantized, request.mesh, request.rules, request.dtype)
        return step, quantizer.tree(parameters)

    def restore_tree(self, tree: "nnx.State", request: WeightsRequest) -> "tuple[int, Tree]":
        """Return a step and what it saved of the parameters of an abstract tree, as `restore` does."""
        from jaxlm.models import tree as model_tree
        from jaxlm.training import checkpoints

        dtype, average = request.dtype, request.average
        placement = model_tree.shardings(tree, request.mesh, request.rules)
        like = model_tree.placed(model_tree.shapes(tree, dtype), placement)
        folder, said = self.run.paths.checkpoints, set[str]()

        def say_once(line: str) -> None:
            if line not in said:
                request.say(line)
            said.add(line)

        for attempt in range(1, _ATTEMPTS + 1):
            step = self._chosen(request.checkpoint, say_once)
            try:
                return step, checkpoints.restore_parameters(folder, step, like, average, as_stored=dtype is None)
            except checkpoints.Gone:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError

    @property
    def published_dtype(self) -> Dtype | None:
        """The dtype to compute in that is no coarser than imported weights; None of weights that were trained."""
        file = self.run.paths.huggingface / DTYPES
        return computing_dtype(read_json(file)) if self.run.is_imported and file.is_file() else None

    def digest(self, step: int | None = None) -> str:
        """Return a digest of the parameters of a step, the newest by default. Raises InputError where they are not
        whole."""
        chosen = self._chosen("newest" if step is None else step, lambda line: None)
        return manifests.digest_of(self.run.paths.checkpoints, chosen)

    def origin(self, step: int | None = None) -> Origin:
        """Return the record of a run that begins with these weights, of this step."""
        return Origin(with_addresses(self.run.paths.directory.absolute()), "run", step)

    def sidecar_files(self) -> dict[str, bytes]:
        """Return the small files that the weights came with, by name: none unless the run began with published ones."""
        folder = self.run.paths.huggingface
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    def mtp_tensors(self) -> "Mapping[str, StoredTensor | LazyTensor]":
        """Return the tensors that an import kept for an export, by name. Raises InputError for a broken file."""
        from jaxlm.families import safetensors

        copies.pull(self.run.paths.mtp)
        return safetensors.read_header(self.run.paths.mtp) if self.run.paths.mtp.is_file() else {}

    def _chosen(self, checkpoint: str | int, say: Callable[[str], None]) -> int:
        """Return the step of a checkpoint. Raises InputError where it is not whole."""
        folder = self.run.paths.checkpoints
        if isinstance(checkpoint, int):
            if broken := manifests.corruption_of(folder / str(checkpoint)):
                raise InputError(f"{self.run} has no whole checkpoint of step {checkpoint} ({broken}); put it back")
            return checkpoint
        choose = manifests.best_verified if checkpoint == "best" else manifests.newest_verified
        step = choose(folder, say)
        if step is None:
            raise InputError(f"{self.run} has no whole checkpoint yet; jaxlm train writes one")
        return step


class RunText:
    """The tokenizer of a run, and the text that it held out."""

    def __init__(self, run: Run):
        self._run = run

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the run has a tokenizer."""
        return self._run.paths.tokenizer.is_file()

    @property
    def tokenizer_file(self) -> Path:
        """The file of the tokenizer, which need not be there."""
        return self._run.paths.tokenizer

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises InputError where there is none, or one with more tokens than the model."""
        return self._run.load_tokenizer()

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids of `eos_token_id` that its weights came with. Raises InputError where a file has what is no id."""
        return SpecialTokens(self._run.paths.huggingface).stop_token_ids

    def check_held_out(self, experiment: Experiment) -> None:
        """Raise InputError where keys of [data] are not as the run was trained with, so that its text is another."""
        if experiment.dpo is not None:
            raise InputError(
                f"{self._run} was trained on preferences, whose held-out loss is in "
                f"{self._run.paths.evaluations.name}; give --data PATH"
            )
        own = experiment.data.tokenizer in TOKENIZERS
        self._check_shaping(experiment, (*_SHAPING, "tokenizer") if own else _SHAPING)

    def held_out(self, experiment: Experiment, display: Display) -> dict[str, Rows]:
        """Return the rows of the held-out text, by source. Raises InputError where it is no longer the text of the
        run."""
        data, run, template, tokenizer = experiment.data, self._run, None, None
        if run.keeps(data.tokenizer):
            tokenizer = run.load_tokenizer()
            if data.of_conversations:
                template = RunChat(run).template(data.chat_template, "data.chat_template")
        vocabulary = experiment.model.vocab_size
        dataset = prepare(data, vocabulary, display.say, display.progress, tokenizer, template)
        if dataset.digest != self._run.digest():
            self._check_shaping(experiment, _FILES)
            raise InputError(f"the text of {self._run} has changed since it was trained; give --data PATH")
        return {name: Rows(source.held_out, experiment.training.sequence) for name, source in dataset.sources.items()}

    def _check_shaping(self, experiment: Experiment, keys: Iterable[str]) -> None:
        """Raise InputError where one of these keys of [data] is not as the run was trained with."""
        before = self._run.experiment().data
        for key in keys:
            if getattr(experiment.data, key) != getattr(before, key):
                raise InputError(
                    f"data.{key} is not what {self._run} was trained with, and gives other text; leave it out, or "
                    "give --data PATH"
                )


class RunChat:
    """The chat template of a run, and the settings that the publisher of its weights draws with."""

    def __init__(self, run: Run):
        self._run = run

    def template(self, path_or_name: str | None = None, key: str = "--chat-template") -> "ChatTemplate | None":
        """Return the chat template that is given, or that the run was trained with, or its weights came with, or beside
        its tokenizer; None without one. Raises InputError for one that is broken, or not there."""
        from jaxlm.data.chat_template import chosen, load

        run = self._run
        if not run.paths.tokenizer.is_file():
            return None
        data, tokenizer = run.experiment().data, run.load_tokenizer()
        if path_or_name is not None:
            return chosen(path_or_name, key, run.paths.huggingface, tokenizer)
        template = load(run.paths.huggingface, tokenizer)
        if template is None and data.tokenizer not in TOKENIZERS:
            template = load(expanded(data.tokenizer, "data.tokenizer").parent, tokenizer)
        return template

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the template that the run was trained with."""
        return self._run.experiment().data.chat_template_kwargs

    @property
    def generation(self) -> dict[str, Any]:
        """The content of the generation_config.json that its weights came with; empty without one."""
        file = self._run.paths.huggingface / GENERATION
        return read_json(file) if file.is_file() else {}
