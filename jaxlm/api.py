"""jaxlm from a program: train a model, load and compare trained ones, plan and compile their steps.

Importing this module imports nothing heavy; its functions import what they need.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, cast

from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.config import Experiment
    from jaxlm.costs.ranking import Ranking
    from jaxlm.data.chat_template import ChatTemplate, Message
    from jaxlm.data.tokenizers import Tokenizer
    from jaxlm.inference.completion import Completion, Piece
    from jaxlm.inference.engine import Engine
    from jaxlm.inference.requests import Named, Request, Sampling
    from jaxlm.inference.settings import EngineSettings
    from jaxlm.lowering.report import CompiledStep
    from jaxlm.models.config import ModelConfig
    from jaxlm.models.tree import Tree
    from jaxlm.parallel.layout import Layout
    from jaxlm.parallel.processes import ProcessSpec
    from jaxlm.parallel.rules import Kind
    from jaxlm.runs.comparison import RunComparison
    from jaxlm.runs.conversion import Converted
    from jaxlm.runs.source import ModelSource
    from jaxlm.runs.summary import RunSummary
    from jaxlm.training.display import Display, Ended
    from jaxlm.training.evaluation import Evaluation
    from jaxlm.training.profile import ProfiledSteps

__all__ = ["LoadedModel", "compare", "compile", "configure", "export", "import_run", "load", "plan", "runs", "train"]

MAX_TOKENS = 100  # that are drawn where nobody says how many
MAX_ANSWER_TOKENS = 1024  # of an answer

# A text or token ids to continue, or the messages of a conversation to answer, each with `role` and `content`.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"


def _silent(line: str) -> None:
    pass


def configure(
    config: str | Path, overrides: Sequence[str] = (), *, start_from: str | Path | None = None
) -> "Experiment":
    """Load the configuration of a run. Raises InputError as `jaxlm.config.load` does.

    Args:
      config: a TOML file, a run, or the name of a configuration that comes with jaxlm.
      overrides: `key=value` changes.
      start_from: the model that the run is to begin with: [model] and data.tokenizer are its where they are not given.
    """
    from jaxlm import config as experiments
    from jaxlm.runs.locate import source_of
    from jaxlm.runs.source import load_experiment

    if start_from is None:
        return experiments.load(config, overrides)
    return load_experiment(config, overrides, source_of(Path(start_from)))


def train(
    experiment: "Experiment",
    out: str | Path,
    *,
    display: "Display | None" = None,
    profile: "ProfiledSteps | None" = None,
    max_hours: float | None = None,
    process: "ProcessSpec | None" = None,
    continue_with_changes: bool = False,
    start_from: str | Path | None = None,
) -> "Ended":
    """Train a model, or resume what `out` holds, up to `training.steps`.

    A first SIGINT, SIGTERM or SIGHUP ends the run after the step in progress, with a checkpoint; so does the end of
    `max_hours`. Call it in the main thread, which alone may handle signals.

    Args:
      experiment: as `configure` returns it.
      out: folder of the run, made where it is not there.
      display: shows the progress; by default nothing does.
      profile: steps to trace for XProf.
      max_hours: hours that this process may last, from its start.
      process: the place of this process in a job of several; Slurm, Open MPI and Cloud TPU say it themselves.
      continue_with_changes: whether a run may be continued as another one (`jaxlm.training.changes`); history.jsonl in
        `out` says from which step.
      start_from: a run or a Hugging Face directory whose weights a new run begins with, or adapts (`experiment.lora`);
        its architecture and tokenizer are to be the experiment's. A run that is resumed remembers it, and needs it only
        before its first checkpoint, or for adapters.

    Raises InputError where the experiment cannot be trained here or in `out`, Diverged and Unsaved (RunFailed) where
    the run fails, and Stopped for a signal before there is anything to save.
    """
    from jaxlm.runs.job import Job
    from jaxlm.runs.locate import needed_by, source_of
    from jaxlm.training.display import Display

    source = needed_by(Path(out)) if start_from is None else source_of(Path(start_from))
    shown = display or Display()
    return Job(experiment, Path(out), shown, profile, max_hours, process, continue_with_changes, source).run()


def load(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    reads: Collection[str] | None = None,
    checkpoint: Literal["newest", "best"] = "newest",
    average: bool = False,
    dtype: str | None = None,
    workload: "Kind" = "decode",
    engine: "EngineSettings | None" = None,
    say: Callable[[str], None] = _silent,
) -> "LoadedModel":
    """Load a trained model; its parameters are restored when they are first asked for.

    Args:
      run: folder of a run of `train`, a Hugging Face directory, or hf:ORG/NAME of the Hub.
      overrides: `key=value` changes of its experiment, such as "mesh.tensor=1"; none may change its architecture.
      reads: sections and keys that the caller reads: an override of any other is refused. None accepts all.
      checkpoint: the newest, or the one with the lowest held-out loss.
      average: whether to take the moving average of the weights (`training.ema_decay`) in their place.
      dtype: of the parameters, "float32" or "bfloat16", "stored" for the one that each is stored in, or "auto" for the
        one that is fastest here, as measured; `execution.dtype` where it is not given.
      workload: the step that parameters are laid out for: "decode" keeps weights where they are; "train", for
        `evaluate`, shards them over fsdp too, and "prefill" those of them that it divides.
      engine: settings of the engine that continues prompts; by default of the sizes in `experiment.inference`.
      say: takes a line about each checkpoint that is passed over, and about a dtype that was chosen.

    Raises InputError where there is no run, where it keeps no average, or where an override does not suit it.
    """
    from jaxlm.runs.locate import source_of

    source = source_of(Path(run))
    if average and source.experiment().training.ema_decay is None:
        raise InputError(f"{source} keeps no average of its weights (training.ema_decay); leave out --ema")
    experiment = source.overridden(overrides, reads)
    dtype = dtype or experiment.execution.dtype
    return LoadedModel(source, experiment, checkpoint, average, dtype, workload, engine, say)


class LoadedModel:
    """A trained or published model: `load` makes one.

    Attributes:
      experiment: that of its run, with overrides.
      settings: of the engine that `engine` makes.
    """

    def __init__(
        self,
        source: "ModelSource",
        experiment: "Experiment",
        checkpoint: Literal["newest", "best"],
        average: bool,
        dtype: str,
        workload: "Kind",
        engine: "EngineSettings | None",
        say: Callable[[str], None],
    ):
        self.source, self.experiment = source, experiment
        self.settings = engine or experiment.inference.settings()
        self._engine: Engine | None = None
        self._step: int | None = None
        self._checkpoint, self._average, self._dtype = checkpoint, average, dtype
        self._workload: Kind = workload
        self._say = say

    @property
    def config(self) -> "ModelConfig":
        """The architecture."""
        return self.experiment.model

    @property
    def parameters(self) -> "Tree":
        """The parameters, laid out on `mesh`. Raises InputError where there is no whole checkpoint."""
        return self._restored[1]

    @property
    def step(self) -> int:
        """The step that the parameters are of."""
        return self._restored[0] if self._step is None else self._step

    @cached_property
    def mesh(self) -> "Mesh":
        """The mesh on this machine's devices. Raises InputError where the experiment's does not divide them."""
        from jaxlm.parallel.devices import mesh_here

        return mesh_here(self.experiment.mesh.least().size, self._layout)

    def _layout(self, devices: int) -> "Layout":
        import jax

        from jaxlm import config
        from jaxlm.costs.hardware.target import of_devices
        from jaxlm.costs.placement import layout_on

        device = jax.devices()[0]
        if self._workload == "decode":
            try:
                return layout_on(self.experiment, of_devices(device.device_kind, device.platform, devices), "decode")
            except InputError:  # a chip that the catalog does not know
                pass
        # Nothing is trained: any number of sequences will do.
        found = config.layout(self.experiment, devices, "decode")
        if self._workload == "train":  # its evaluation
            config.check_divides(found, self.config)
        return found

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer of the run, or None. Raises InputError for one with more tokens than the model."""
        return self.source.text.load_tokenizer() if self.source.text.has_tokenizer else None

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The chat template. Raises InputError for a model without one."""
        if (template := self.source.chat.template()) is None:
            raise InputError(
                f"{self.source} has no chat template (chat_template.jinja, or one in tokenizer_config.json); give it a "
                "text to continue, without --chat"
            )
        return template

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, those of a conversation up to where the answer begins. Raises InputError for
        text where there is no tokenizer, and for messages where there is no chat template or it refuses them."""
        if _is_conversation(prompt):
            return self.chat_template.encode(prompt, reply=True)
        if not isinstance(prompt, str):
            return list(cast("Sequence[int]", prompt))
        return (self.tokenizer or self.source.text.load_tokenizer()).encode_prompt(prompt)

    def logits(self, tokens_BT: Any) -> "jax.Array":
        """Return float32 logits [B, T, V] of the token after each of int32 `tokens_BT`, each row a document."""
        import jax

        with jax.set_mesh(self.mesh):
            return self._logits(self.parameters, jax.numpy.asarray(tokens_BT, dtype=jax.numpy.int32))

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | None = None,
        *,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> "list[Completion]":
        """Continue prompts, each up to the separator of documents, and answer conversations: `num_samples`
        continuations of the first prompt, then of the next. They are drawn together, and each is as if it were alone.

        Args:
          prompts: texts, lists of token ids, or conversations: lists of messages such as {"role": "user",
            "content": "Hello"}, which the model's chat template shows.
          max_tokens: the most tokens to draw for each; by default `MAX_TOKENS`, of answers `MAX_ANSWER_TOKENS`, or what
            the context leaves.
          num_samples: continuations of each prompt.
          temperature: 0 takes the likeliest token.
          top_k: draws among the k likeliest.
          top_p: draws among the fewest that hold this much of the probability.
          stop: strings that end a text before them.
          seed: another seed draws other text. A continuation has random numbers of the seed, its prompt's place and its
            own among the samples, so that it does not depend on the others.

        Raises InputError for values that mean nothing, prompts without tokens, more tokens than the context holds, stop
        strings without a tokenizer, or logits that are not finite.
        """
        from jaxlm.inference.completion import completions

        drawn = self.stream(
            prompts, max_tokens, num_samples=num_samples, temperature=temperature, top_k=top_k, top_p=top_p,
            stop=stop, seed=seed,
        )  # fmt: skip
        return completions(drawn, len(prompts) * num_samples)

    def stream(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | None = None,
        *,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> "Iterator[Piece]":
        """Return the pieces of what `generate` gives, as they are drawn. Raises InputError as it does, at once but for
        logits that are not finite."""
        from jaxlm.inference.requests import Sampling, check_seed

        check_seed(seed)
        sampling = Sampling(temperature, top_k, top_p).check()
        return self.complete(self.requests(prompts, max_tokens, num_samples, sampling, stop), seed)

    def requests(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | None,
        num_samples: int,
        sampling: "Sampling",
        stop: Sequence[str],
        named: "Named" = "{} =".format,
    ) -> "list[Request]":
        """Return what `generate` asks for, for `complete`. Raises InputError as `jaxlm.inference.requests.sampled`."""
        from jaxlm.inference.requests import fitting_tokens, sampled

        encoded, limits = [self.encode(prompt) for prompt in prompts], [max_tokens or 0] * len(prompts)
        chats = [_is_conversation(prompt) for prompt in prompts]
        if max_tokens is None:
            limits = [
                fitting_tokens(self.config, len(ids), MAX_ANSWER_TOKENS if chat else MAX_TOKENS)
                for ids, chat in zip(encoded, chats, strict=True)
            ]
        asked = sampled(self.config, encoded, limits, num_samples, sampling, stop, named)
        return [
            request._replace(ends=self.chat_template.ends) if chats[row // num_samples] else request
            for row, request in enumerate(asked)
        ]

    def complete(self, requests: "Sequence[Request]", seed: int = 0) -> "Iterator[Piece]":
        """Return the pieces of the continuations of requests, as they are drawn. Raises InputError as `generate`."""
        from jaxlm.inference.completion import Completer

        if self.tokenizer is None and any(request.stop for request in requests):
            raise InputError("the run has no tokenizer, so that there is no text to find a stop string in")
        longest = max((request.most_tokens for request in requests), default=1)
        return Completer(self.engine(longest), self.tokenizer)(requests, seed)

    def engine(self, tokens: int = 1) -> "Engine":
        """Return the engine of the model, for sequences of so many tokens at least. It is made when it is first asked
        for, and again for longer sequences than its cache holds, unless `settings` give it a context or a memory.

        Raises InputError for a model that the engine cannot serve, or where memory does not hold its cache.
        """
        if self._engine is None:
            self._engine = self._new_engine(self.settings)
        may_grow = self.settings.context is None and self.settings.cache_bytes is None
        if may_grow and self._engine.longest < min(tokens, self.config.context_length):
            self._engine = None  # its memory is free before another takes some
            self._engine = self._new_engine(replace(self.settings, context=1 << (tokens - 1).bit_length()))
        return self._engine

    def _new_engine(self, settings: "EngineSettings") -> "Engine":
        from jaxlm.inference.engine import Engine

        self._step, parameters = self._restored
        del self._restored  # the engine keeps weights in a form of its own, and two are too many
        return Engine(
            self.config,
            parameters,
            self.mesh,
            settings,
            known=self.tokenizer and self.tokenizer.known(self.config.vocab_size),
            ends=self.tokenizer.ends if self.tokenizer else (),
            kernels=self.experiment.execution.kernels,
        )

    def evaluate(
        self, data: str | None = None, display: "Display | None" = None, *, is_chat: bool = False
    ) -> "Evaluation":
        """Return the loss on the held-out text of the run, or on all of the text at `data` (a file, directory or glob).

        With `is_chat` there are conversations at `data`, as in `data.chat`, and the loss is that on their answers.
        Raises InputError where the text cannot be read, or is not what the run was trained with.
        """
        import jax

        from jaxlm.runs.source import text_rows
        from jaxlm.training.display import Display
        from jaxlm.training.evaluation import evaluate_sources
        from jaxlm.training.step import TrainStep

        experiment, training = self.experiment, self.experiment.training
        if is_chat and data is None:
            raise InputError("is_chat is of other text; give data, the path of conversations")
        template = self.chat_template if is_chat else None
        if data is not None:
            self.source.text.load_tokenizer()  # refused before anything is restored
        else:
            self.source.text.check_held_out(experiment)
        parameters = self.parameters
        steps = TrainStep(self.config, experiment.execution, training, experiment.optimizer).jitted(self.mesh)
        with display or Display() as shown:
            if data is None:
                text = self.source.text.held_out(experiment, shown)
            else:
                text = text_rows(experiment, data, self.source.text.load_tokenizer(), template, shown)
        with jax.set_mesh(self.mesh):
            measured = evaluate_sources(steps.evaluate, parameters, text, training.batch, self.mesh)
        assert measured is not None  # nothing stops it
        return measured

    @cached_property
    def _restored(self) -> "tuple[int, Tree]":
        """The step and its parameters, rounded on their way: they never lie on the devices in float32 too."""
        from jaxlm.parallel.rules import RULES
        from jaxlm.runs.source import WeightsRequest

        mesh = self.mesh
        if self._dtype == "auto":
            from jaxlm.inference import dtype_choice

            self._dtype, why = dtype_choice.fastest()
            self._say(f"computing in {self._dtype}, {why}")
        dtype = None if self._dtype == "stored" else self._dtype
        rules = RULES[self._workload]
        request = WeightsRequest(self.config, mesh, rules, dtype, self._checkpoint, self._average, self._say)
        return self.source.weights.restore(request)

    @cached_property
    def _logits(self) -> "Callable[[Tree, jax.Array], jax.Array]":
        import jax
        from flax import nnx

        from jaxlm.models.kernels import using_kernels
        from jaxlm.models.positions import packed_causal_mask
        from jaxlm.models.tree import abstract
        from jaxlm.parallel.partition import using_rules
        from jaxlm.parallel.rules import PREFILL

        graph, _ = abstract(self.config)

        @jax.jit
        @using_rules(PREFILL)
        @using_kernels(self.experiment.execution.kernels)
        def logits(parameters: "Tree", tokens_BT: jax.Array) -> jax.Array:
            module = nnx.merge(graph, parameters)
            positions_BT = jax.numpy.broadcast_to(jax.numpy.arange(tokens_BT.shape[1]), tokens_BT.shape)
            hidden_BTD, _, _ = module.hidden(tokens_BT, positions_BT, packed_causal_mask(positions_BT))
            return module.logits(hidden_BTD)

        return logits


def _is_conversation(prompt: Prompt) -> "TypeGuard[Sequence[Message]]":
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def import_run(model: str | Path, run: str | Path, *, say: Callable[[str], None] = _silent) -> "Converted":
    """Convert a Hugging Face directory into a run, once. Nothing of it is executed.

    Args:
      model: the directory, or hf:ORG/NAME of the Hub: config.json and safetensors of a family that jaxlm has
        (docs/models.md).
      run: the folder to make. Training starts from it, and does not continue in it.
      say: takes a line about what is not read, or odd.

    Returns the family and the number of parameters. Raises InputError where the directory is broken, has a key or a
    tensor that jaxlm does not know, or where the folder is taken.
    """
    from jaxlm.runs import conversion

    return conversion.import_run(Path(model), Path(run), say)


def export(
    run: str | Path,
    folder: str | Path,
    *,
    checkpoint: Literal["newest", "best"] = "newest",
    average: bool = False,
    adapter: bool = False,
    say: Callable[[str], None] = _silent,
) -> "Converted":
    """Write the model of a run as a Hugging Face directory.

    Args:
      run: the folder of a run, or a Hugging Face directory.
      folder: the directory to make.
      checkpoint, average: as in `load`.
      adapter: write the adapters of a run alone, as a PEFT directory; otherwise they are added to what they adapt.
      say: takes a line about each file.

    Returns the family and the number of parameters. Raises InputError where the model is of no family, where the folder
    is there, or for an `adapter` of a run that has none.
    """
    from jaxlm.runs import adapters, conversion
    from jaxlm.runs.locate import source_of

    if adapter:
        source = source_of(Path(run))
        if not isinstance(source.weights, adapters.AdaptedWeights):
            raise InputError(f"{source} is no run with adapters ([lora]); leave out --adapter")
        return adapters.export(source.weights, Path(folder), checkpoint, average, say)
    # Nothing is computed: each device holds as little as may be.
    model = load(run, checkpoint=checkpoint, average=average, dtype="stored", workload="prefill", say=say)
    return conversion.export(model.source, model.parameters, model.experiment, Path(folder), say)


def runs(folder: str | Path = "runs") -> "list[RunSummary]":
    """Return the runs in a folder and below it, the latest first. Raises InputError where there is no such folder."""
    from jaxlm.runs.summary import find

    return find(Path(folder))


def compare(runs: Sequence[str | Path], picture: str | Path | None = None) -> "RunComparison":
    """Compare runs: the keys that differ, and their losses at equal steps and at equal training tokens.

    Args:
      runs: their folders.
      picture: where to draw their losses as a PNG.

    Raises InputError where a folder is no run, or where the picture cannot be written.
    """
    from jaxlm.runs.comparison import compare

    return compare([Path(run) for run in runs], None if picture is None else Path(picture))


def plan(
    experiment: "Experiment",
    on: str,
    *,
    mesh: str | None = None,
    workload: "Kind" = "train",
    held: Collection[str] = (),
) -> "Ranking":
    """Count what a step costs on chips that need not be here, without starting a JAX backend.

    Args:
      experiment: as `jaxlm.config.load` returns it; where it gives no `training.batch`, or in inference no
        `inference.sequences`, they are padded until the mesh divides them.
      on: chips, such as "h200-sxm:8" or "tpu-v5e:4x4"; "all:8" ranks 8 chips of each kind in the catalog.
      mesh: axes, such as "fsdp=8,tensor=2", in place of the experiment's; "auto" ranks those that fit.
      workload: a step of training, a prefill or one decoded token of each sequence (`jaxlm.config.SIZE_KEYS`).
      held: settings that a search leaves as they are, of "microbatches" and "remat".

    Returns plans, the best first, with why chips of the catalog are not among them. Raises InputError where the chips
    are not known or lack a figure, where the mesh does not divide the model, or where no mesh fits.
    """
    from jaxlm.costs.ranking import rank

    return rank(experiment, on, mesh, workload, held)


def compile(
    experiment: "Experiment",
    on: str,
    *,
    mesh: str | None = None,
    workload: "Kind" = "train",
    fit: bool = False,
    quick: bool = False,
    held: Collection[str] = (),
    say: Callable[[str], None] = _silent,
    warn: Callable[[str], None] = warnings.warn,
) -> "CompiledStep":
    """Compile a step for chips that need not be here, by XLA's own compiler for them. It keeps JAX in this process to
    the CPU.

    Args:
      experiment, on, mesh, workload, held: as in `plan`, but for "auto" and "all".
      fit: find the largest microbatch and the cheapest rematerialisation that fit, in place of the experiment's.
      quick: search less for a fast program; for TPUs only.
      say: takes a line before each program that is compiled.
      warn: takes a line about what is unusual of the mesh.

    Raises DoesNotFit where the compiler itself refuses for want of memory (TPUs), InputError where the step cannot be
    compiled, or as `plan` does.
    """
    import jax

    from jaxlm.costs.hardware.target import Target
    from jaxlm.costs.ladder import say_replicated
    from jaxlm.costs.placement import batch_shards, layout_on, on_mesh, with_batch
    from jaxlm.costs.workload import Workload
    from jaxlm.lowering import report, targets
    from jaxlm.lowering.fit import compile_fitting
    from jaxlm.parallel.mesh import make_mesh

    if fit and workload != "train":
        raise InputError(f"--fit varies microbatches and rematerialisation, which {workload} does not have")
    target = Target.parse(on)
    if quick and target.chip.kind != "tpu":
        raise InputError(f"--quick is for TPUs, whose compiler takes longer: leave it out for {target}")
    experiment = on_mesh(experiment, mesh)
    experiment = with_batch(experiment, batch_shards(experiment, target, workload), workload)
    layout = layout_on(experiment, target, workload)
    if replicated := say_replicated(Workload.of(experiment, layout, workload)):
        warn(replicated)
    jax.config.update("jax_platforms", "cpu")  # whatever is here is not what is compiled for
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        devices = make_mesh(layout, targets.devices(target))
    for warning in caught:
        warn(str(warning.message))
    if fit:
        return compile_fitting(experiment, target, devices, quick, say, held)
    say(f"compiling for {target}")
    return report.compile(experiment, workload, target, devices, quick)
