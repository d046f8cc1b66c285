"""RUN, the folder of a training run, as one job has it: whether it may, and what it was begun with."""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.files import building, leftovers, lock, replace, replacing, unwritable
from jaxlm.core.schema import Change
from jaxlm.data import tokenizers
from jaxlm.data.config import TOKENIZERS, expanded
from jaxlm.data.dataset import Dataset, prepare, tokenize_whole
from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families import tokens
from jaxlm.families.files import GENERATION, is_published, read_json
from jaxlm.models.config import ModelConfig
from jaxlm.parallel.processes import is_first
from jaxlm.training import manifests
from jaxlm.training import origin as origins
from jaxlm.training.changes import architecture, bound, changed_keys, is_by_content, is_free
from jaxlm.training.display import Display
from jaxlm.training.origin import Origin
from jaxlm.training.paths import RunPaths
from jaxlm.training.records import JsonLines

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from jax.sharding import Mesh

    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.models.tree import Tree
    from jaxlm.parallel.rules import Rules

# Keys of [data] that decide the tokens: by themselves, or by files, which may have been moved.
SHAPING = ("field", "documents", "held_out")
FILES = ("tokenizer", "text", "chat", "chat_template", "validation", "sources")
_OTHER_OUT = "choose another --out"
_CONTINUE = "--continue-with-changes"
_ATTEMPTS = 5  # to read a checkpoint of a run that trains on, and removes older ones
_NAMED = 8  # changed keys in a message, at most


class Run:
    """The folder of a run: its files (`paths`), what they hold, and the checks before a run starts in it."""

    def __init__(self, directory: Path):
        self.paths = RunPaths(directory)
        self._claimed: TextIO | None = None

    def __str__(self) -> str:
        return str(self.paths)

    def check(
        self, experiment: Experiment, continue_with_changes: bool = False, origin: Origin | None = None
    ) -> list[Change]:
        """Return the keys that a run in the folder is resumed with other values of.

        Raises InputError where the folder is none of ours or cannot be made, where its run has lost its checkpoints or
        began with other weights than `origin`, or where it was trained as another experiment: unless
        `continue_with_changes`, if its checkpoints go with the new one.
        """
        self.paths.check_name()
        if self.paths.config.exists():
            before = self.experiment()
            if self.is_imported:
                raise InputError(
                    f"{self.paths} holds imported weights, in which no training continues; start from them: "
                    f"--from {self.paths}, with another --out"
                )
            self.digest()
            self._check_origin(origin)
            self._check_checkpoints(before.checkpoint.every)
            found = changed_keys(before, experiment)
            if refused := bound(before, experiment):
                raise InputError(f"{self._trained_with(refused)}, which its checkpoints are bound to; {_OTHER_OUT}")
            others = [change for change in found if not is_free(change.key) and not is_by_content(change.key)]
            if others and not continue_with_changes:
                raise InputError(f"{self._trained_with(others)}; {_ways_out(others)}")
            return found
        try:
            # What a start leaves that was cut short.
            paths = self.paths
            ours = {paths.lock, paths.tokenizer, paths.data, paths.origin, paths.huggingface}
            ours.update(leftovers(paths.directory))
            there = self.paths.directory.exists()
            usable = set(self.paths.directory.iterdir()) <= ours if there else not unwritable(self.paths.directory)
        except OSError:
            usable = False
        if not usable:
            raise InputError(f"{self.paths} is there and is no run, or cannot be made; {_OTHER_OUT}")
        return []

    @property
    def begun_from(self) -> Origin | None:
        """The weights that the run began with; None for those of its seed. Raises InputError where that is broken."""
        return origins.read(self.paths.origin)

    def _check_origin(self, asked: Origin | None) -> None:
        begun = self.begun_from
        if asked is not None and (begun is None or begun.source != asked.source):
            before = "weights of its own" if begun is None else f"the weights of {begun.source}"
            raise InputError(
                f"{self.paths} began with {before}, not with those of {asked.source}; leave out --from, or {_OTHER_OUT}"
            )

    @property
    def has_adapters(self) -> bool:
        """Return whether it trains adapters of other weights."""
        return self.paths.config.is_file() and self.experiment().lora is not None

    @property
    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint that was written to its end, whole or not by now."""
        return bool(manifests.steps_in(self.paths.checkpoints))

    def _trained_with(self, found: Sequence[Change]) -> str:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"{self.paths} was trained with {'; '.join(map(str, found[:_NAMED]))}{more}"

    def _check_checkpoints(self, every: int) -> None:
        """Raises InputError where those are lost that it had, as on a disk that is away: it would begin anew, and what
        it has written down would go."""
        steps = [row["step"] for row in JsonLines(self.paths.metrics).rows()]
        lost = bool(steps) and not self.paths.checkpoints.is_dir()  # there before the first line
        # The second checkpoint is begun once the first is whole.
        lost |= max(steps, default=0) > 2 * every and not self.has_checkpoint
        if lost:
            raise InputError(
                f"{self.paths.checkpoints} has no checkpoint, though {self.paths.metrics.name} has {max(steps)} steps; "
                "put it back, or choose another --out"
            )

    @property
    def is_imported(self) -> bool:
        """Return whether `jaxlm import` made it: it was begun with no data, and is not trained."""
        paths = self.paths
        return paths.config.is_file() and paths.huggingface.is_dir() and not paths.data.exists()

    def check_model(self, experiment: Experiment) -> None:
        """Raises InputError where a model is none for the parameters of this run."""
        if found := architecture(self.experiment(), experiment):
            raise InputError(f"{self._trained_with(found)}; leave it out")

    def overridden(self, overrides: Collection[str], reads: Collection[str] | None = None) -> Experiment:
        """The experiment with `key=value` overrides, of those sections and keys that the caller `reads` alone. Raises
        InputError where this is no run, where no such model is in it, or where an override would change nothing."""
        self.experiment()  # refuses what is no run
        experiment = config.load(self.paths.config, overrides, None)
        self.check_model(experiment)
        check_reads(config.overridden(overrides), reads)
        return experiment

    def check_own_text(self, experiment: Experiment) -> None:
        """Raise InputError where keys of [data] are not as the run was trained with, so that its text is another."""
        if experiment.dpo is not None:
            raise InputError(
                f"{self.paths} was trained on preferences, whose held-out loss is in {self.paths.evaluations.name}; "
                "give --data PATH"
            )
        own = experiment.data.tokenizer in TOKENIZERS
        self.check_shaping(experiment, (*SHAPING, "tokenizer") if own else SHAPING)

    def check_shaping(self, experiment: Experiment, keys: Iterable[str]) -> None:
        """Raise InputError where one of these keys of [data] is not as the run was trained with."""
        before = self.experiment().data
        for key in keys:
            if getattr(experiment.data, key) != getattr(before, key):
                raise InputError(
                    f"data.{key} is not what {self.paths} was trained with, and gives other text; leave it out, or "
                    "give --data PATH"
                )

    def held_out(self, experiment: Experiment, display: Display) -> dict[str, Rows]:
        """The rows of the text that was held out, by source. Raises InputError where that is no longer the text of the
        run."""
        dataset = prepare(experiment.data, experiment.model.vocab_size, display.say, display.progress)
        if dataset.digest != self.digest():
            self.check_shaping(experiment, FILES)
            raise InputError(f"the text of {self.paths} has changed since it was trained; give --data PATH")
        return {name: Rows(source.held_out, experiment.training.sequence) for name, source in dataset.sources.items()}

    def text(
        self, experiment: Experiment, data: str, template: "ChatTemplate | None", display: Display
    ) -> dict[str, Rows]:
        """The rows of other text at the path `data`, or of conversations that a template shows, in the tokens of the
        run. Raises InputError where it cannot be read."""
        return text_rows(experiment, data, self.load_tokenizer(), template, display)

    def claim(self) -> None:
        """Have the folder, once it is there, for this job alone until `release`, or the end of its first process.

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
        """Raises InputError where another job has the folder. For every process, before it joins the others: where that
        job was started with the same address, it would be joined, and die of it."""
        try:
            with self.paths.lock.open("r+") as file:
                lock(file, shared=True)
        except BlockingIOError:
            raise self._taken() from None
        except OSError:
            pass  # none there yet, or none for us: `claim` says which

    def _taken(self) -> InputError:
        return InputError(f"another jaxlm train is at work in {self.paths}; wait for its end, or choose another --out")

    def open(
        self,
        experiment: Experiment,
        dataset: Dataset,
        continue_with_changes: bool = False,
        origin: Origin | None = None,
        carried: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        """Make the folder, or continue it with the same data. The configuration comes last: it makes it a run.
        In a job of several processes the first writes, and the others, after it, look.

        Args:
          origin: of the weights that a new run begins with.
          carried: returns the small files that these came with.

        Raises InputError where another job has the folder, where the run was trained on other data and may not
        `continue_with_changes` or has another tokenizer, or where another process of this job does not see the folder.
        """
        if is_first():
            self.paths.directory.mkdir(parents=True, exist_ok=True)
            self.claim()
            for killed in leftovers(self.paths.directory):
                shutil.rmtree(killed) if killed.is_dir() else killed.unlink()
        elif not self.paths.config.exists():
            raise InputError(f"{self.paths} is not there for every process; choose an --out that all share")
        if not self.paths.config.exists():
            self._save_tokenizer(dataset)
            self._save_data(dataset)
            self._save_origin(origin, carried())
        elif self.digest() != dataset.digest:
            self._check_data(experiment, dataset, continue_with_changes)
        if is_first():
            if not self.paths.tokenizer.is_file():
                self._save_tokenizer(dataset)
            if not self.paths.config.exists():
                replace(self.paths.config, experiment.to_toml())

    def _check_data(self, experiment: Experiment, dataset: Dataset, continue_with_changes: bool) -> None:
        """Raise InputError where a run cannot, or may not, go on with other data."""
        if not continue_with_changes:
            found = [c for c in changed_keys(self.experiment(), experiment) if is_by_content(c.key)]
            other = f"{self.paths} was trained with other text, sources or tokenizer than [data] gives now"
            raise InputError(f"{self._trained_with(found) if found else other}; {_ways_out(found)}")
        if self.paths.tokenizer.is_file() and self.load_tokenizer().to_json() != dataset.tokenizer.to_json():
            raise InputError(
                f"{self.paths} was trained with another tokenizer; set data.tokenizer={self.paths.tokenizer}, or "
                f"{_OTHER_OUT}"
            )

    def record(self, experiment: Experiment, dataset: Dataset, step: int) -> None:
        """Record, once a step is trained, that it and those after it have this configuration and data.

        In a job of several processes the first one writes.
        """
        if not is_first():
            return
        rows = [
            row for row in JsonLines(self.paths.history).rows() if row["step"] < step
        ]  # later ones are trained anew
        if not rows and step > 1:  # begun before there was a history
            rows = [{"step": 1, "data": self.digest(), "config": self.experiment().model_dump(mode="json")}]
        now = {"step": step, "data": dataset.digest, "config": experiment.model_dump(mode="json")}
        if not rows or {**rows[-1], "step": step, "config": config.resolved(rows[-1]["config"])} != now:
            rows.append(now)
        JsonLines(self.paths.history).replace(rows)
        self._save_data(dataset)
        replace(self.paths.config, experiment.to_toml())

    def _save_data(self, dataset: Dataset) -> None:
        values = {"digest": dataset.digest, "held_out_bytes": dataset.held_out_bytes}
        replace(self.paths.data, json.dumps(values))

    def _save_origin(self, origin: Origin | None, carried: Mapping[str, bytes]) -> None:
        self.paths.origin.unlink(missing_ok=True)  # of a start that was cut short, as the folder
        shutil.rmtree(self.paths.huggingface, ignore_errors=True)
        if origin is not None:
            origin.save(self.paths.origin)
        if carried:
            keep(carried, self.paths.huggingface)

    def _save_tokenizer(self, dataset: Dataset) -> None:
        with replacing(self.paths.tokenizer) as partial:
            dataset.tokenizer.save(partial)

    def digest(self) -> str:
        """Identity of the data it was begun with. Raises InputError where that is not recorded."""
        try:
            return json.loads(self.paths.data.read_text())["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.paths} is no run: it has no {self.paths.data.name} that is whole; choose another --out"
            ) from None

    def experiment(self) -> Experiment:
        """The resolved configuration. Raises InputError where this is no run."""
        if not self.paths.config.is_file():
            raise InputError(f"{self.paths} is no run: it holds no {self.paths.config.name}; jaxlm train makes one")
        return config.load(self.paths.config)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the run. Raises InputError where it has none, or one with more tokens than the model."""
        if not self.paths.tokenizer.is_file():
            raise InputError(f"{self.paths} has no {self.paths.tokenizer.name}; give --token-ids in place of --prompt")
        if is_published(self.paths.huggingface):
            tokenizer = tokens.load(self.paths.tokenizer, self.paths.huggingface)
        else:
            tokenizer = tokenizers.load(self.paths.tokenizer)
        check_vocabulary(tokenizer, self.experiment().model.vocab_size, self.paths.tokenizer)
        return tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the run has a tokenizer."""
        return self.paths.tokenizer.is_file()

    @property
    def tokenizer_file(self) -> Path:
        """The file of the tokenizer, which need not be there."""
        return self.paths.tokenizer

    def chat_template(self) -> "ChatTemplate | None":
        """The chat template that it was trained with, or its weights came with, or beside its tokenizer, with the
        variables of its configuration; None without one. Raises InputError for one that is broken."""
        from jaxlm.data.chat_template import load

        if not self.has_tokenizer:
            return None
        data, tokenizer, published = self.experiment().data, self.load_tokenizer(), self.paths.huggingface
        found = load(published, tokenizer)
        if found is None and data.tokenizer not in TOKENIZERS:
            found = load(expanded(data.tokenizer, "data.tokenizer").parent, tokenizer)
        return found and found.with_kwargs(data.chat_template_kwargs)

    def carried(self) -> dict[str, bytes]:
        """The small files that its weights came with, by name: none unless it began with published ones."""
        folder = self.paths.huggingface
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    def origin(self, step: int | None = None) -> Origin:
        """The record of a run that begins with its weights, of this step."""
        return Origin(str(self.paths.directory.absolute()), "run", step)

    @property
    def generation(self) -> dict[str, Any]:
        """The content of the generation_config.json that its weights came with; empty without one."""
        file = self.paths.huggingface / GENERATION
        return read_json(file) if file.is_file() else {}

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
        """Return a step and its parameters on a mesh, rounded to a dtype while they are read.

        Args:
          dtype: None keeps the one that each array is stored in.
          checkpoint: "newest", or "best", the one with the lowest held-out loss, or a step.
          average: whether to take the moving average of the weights.
          say: takes a line about each checkpoint that is passed over.

        Raises InputError where there is no whole checkpoint.
        """
        from jaxlm.models import tree as model_tree

        return self.restored(model_tree.abstract(model)[1], mesh, rules, dtype, checkpoint, average, say)

    def restored(
        self,
        tree: "nnx.State",
        mesh: "Mesh",
        rules: "Rules",
        dtype: "jax.typing.DTypeLike | None",
        checkpoint: str | int,
        average: bool,
        say: Callable[[str], None],
    ) -> "tuple[int, Tree]":
        """Return a step and what it saved of the parameters of an abstract tree, as `restore` does."""
        from jaxlm.models import tree as model_tree
        from jaxlm.training import checkpoints

        placement = model_tree.shardings(tree, mesh, rules)
        like = model_tree.placed(model_tree.shapes(tree, dtype), placement)
        folder, said = self.paths.checkpoints, set[str]()

        def say_once(line: str) -> None:
            if line not in said:
                say(line)
            said.add(line)

        for attempt in range(1, _ATTEMPTS + 1):
            step = self._chosen(checkpoint, say_once)
            try:
                return step, checkpoints.restore_parameters(folder, step, like, average, as_stored=dtype is None)
            except checkpoints.Gone:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError

    def _chosen(self, checkpoint: str | int, say: Callable[[str], None]) -> int:
        """Return the step of a checkpoint. Raises InputError where it is not whole."""
        folder = self.paths.checkpoints
        if isinstance(checkpoint, int):
            if broken := manifests.corruption_of(folder / str(checkpoint)):
                raise InputError(f"{self.paths} has no whole checkpoint of step {checkpoint} ({broken}); put it back")
            return checkpoint
        choose = manifests.best_verified if checkpoint == "best" else manifests.newest_verified
        step = choose(folder, say)
        if step is None:
            raise InputError(f"{self.paths} has no whole checkpoint yet; jaxlm train writes one")
        return step

    def weights_digest(self, step: int | None = None) -> str:
        """Return a digest of the parameters of a step, the newest by default. Raises InputError where it is not
        whole."""
        found = self._chosen("newest" if step is None else step, lambda line: None)
        return manifests.digest_of(self.paths.checkpoints, found)


def keep(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a new folder, all or none."""
    with building(folder) as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)


def check_reads(keys: Iterable[str], reads: Collection[str] | None) -> None:
    """Raise InputError for a key that is set and that nobody `reads`; None reads all."""
    for key in () if reads is None else keys:
        if not any(f"{key}.".startswith(f"{read}.") for read in reads):
            raise InputError(f"{key} changes nothing here, where {', '.join(reads)} are read of the run; leave it out")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, file: Path) -> None:
    """Raise InputError for a tokenizer with more tokens than a model."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{file} has {tokenizer.vocab_size} tokens, and model.vocab_size = {vocab_size}: the model was trained "
            "with another; put that back"
        )


def _ways_out(found: Iterable[Change]) -> str:
    """Return how to go on where a run would become another one."""
    kept = [change for change in found if change.key == "optimizer.schedule.decay_steps"]
    schedule = f"keep its schedule with {kept[0].key}={kept[0].before}, " if kept and kept[0].before else ""
    return f"{schedule}{_OTHER_OUT}, or go on in this one with {_CONTINUE}"


def text_rows(
    experiment: Experiment, data: str, tokenizer: Tokenizer, template: "ChatTemplate | None", display: Display
) -> dict[str, Rows]:
    """Return the rows of a text at the path `data`, or of conversations that a template shows, in tokens. Raises
    InputError where it cannot be read."""
    try:
        store = tokenize_whole(experiment.data, data, tokenizer, template, display.say, display.progress)
    except InputError as error:
        raise InputError(re.sub(r"^data\.(text|chat)\b", _options, str(error))) from None
    return {"data": Rows(store, experiment.training.sequence)}


def _options(key: re.Match[str]) -> str:
    """Return the option of `jaxlm eval` for a key of other text."""
    return {"text": "--data", "chat": "--chat"}[key[1]]
