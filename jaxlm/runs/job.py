"""One start of a training run: from its data to its sample, as one process of a job."""

import json
import math
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.config import mesh_layout
from jaxlm.config.checks import check_quantized
from jaxlm.config.experiment import Experiment, with_steps
from jaxlm.core import accelerators, copies
from jaxlm.core.errors import InputError, RunFailed
from jaxlm.core.schema import shown
from jaxlm.costs import capacity
from jaxlm.data import chat_template, conversations
from jaxlm.data.config import TOKENIZERS, expanded
from jaxlm.data.dataset import Dataset, prepare
from jaxlm.data.packing import NothingToLearn, cut_remark, rows_of
from jaxlm.parallel import processes
from jaxlm.runs.job_folder import JobFolder
from jaxlm.runs.source import ModelSource, WeightsRequest, check_start, check_tokenizer, with_own_tokenizer
from jaxlm.runs.trained import RunChat
from jaxlm.training import profile, sinks
from jaxlm.training.display import Display, Ended
from jaxlm.training.environment import MachineLoad, environment, versions
from jaxlm.training.goodput import Attempts, Clock, summary
from jaxlm.training.interrupt import Stopped, StopRequest
from jaxlm.training.paths import written_apart
from jaxlm.training.records import JsonLines, plot_losses

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxlm.costs.ladder import Counted
    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.data.tokenizers import Tokenizer
    from jaxlm.models.tree import Tree
    from jaxlm.training.loop import Result

# Characters of a digest, to tell it from others.
_SHOWN = 12
# Epochs up to which repeated text is about as good as new text (Muennighoff et al. 2023, arXiv:2305.16264).
_MANY_EPOCHS = 4.0


class Job:
    """Trains an experiment in a folder: see `jaxlm.api.train`. JAX is imported once the data is there, so that bad
    input need not wait for it."""

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        display: Display,
        traced: profile.ProfiledSteps | None,
        max_hours: float | None,
        spec: processes.ProcessSpec | None,
        continue_with_changes: bool,
        source: ModelSource | None = None,
    ):
        self._clock = Clock()
        self._run = JobFolder(out)
        self._experiment = experiment = self._run.with_former_defaults(experiment)
        self._display, self._spec = display, spec
        self._traced = traced
        sinks.check_installed(experiment.records.wandb_project)
        self._continue_with_changes, self._source = continue_with_changes, source
        check_quantized(experiment)
        self._data = experiment.data  # as it is read: a run that begins has no tokenizer and template of its own yet
        if experiment.lora is not None and source is None:
            self._run.check(experiment, continue_with_changes)
            raise InputError("[lora] adapts the weights of a model: give --from MODEL")
        if source is not None:
            check_start(source, experiment)
            self._experiment = experiment = with_own_tokenizer(experiment, source, self._run.paths.tokenizer)
        self._origin = None if source is None else source.weights.origin()
        self._epochs = experiment.training.epochs  # which the text makes a number of steps
        if experiment.training.steps is None and self._run.paths.config.is_file():
            recorded = self._run.experiment().training.steps
            self._experiment = experiment = experiment if recorded is None else with_steps(experiment, recorded)
        self._set_length(experiment)
        self._stop = StopRequest(self._leave, max_hours)
        self._template: ChatTemplate | None = None  # that shows conversations
        self._uploading = ExitStack()  # to a bucket, while it trains
        self._saved: int | None = None  # the step that is
        self._trained_from: int | None = None  # the first step of this start

    def _set_length(self, experiment: Experiment) -> None:
        """Take an experiment, whose steps are known or not. Raises InputError where the run in the folder is another,
        or where it ends before the steps that are to be traced."""
        self._experiment = experiment
        self._changed = self._run.check(experiment, self._continue_with_changes, self._origin)
        if self._traced is not None and experiment.training.steps is not None:
            self._traced = self._traced.check(experiment.training.steps)

    def run(self) -> Ended:
        """Train, write the sample, and say how it ended."""
        with processes.failing_as_one(), self._stop:
            try:
                self._join()
                with self._uploading:
                    ended = self._train_and_sample()
            except Stopped as stopped:
                status = self._display.ended(Ended(self._saved, stopped.reason))
                if status is None:
                    raise
                os._exit(status)  # a compiler may still be at work in its threads, and would be waited for
            finally:
                self._run.release()
            self._display.ended(ended)
            return ended

    def _leave(self, reason: int) -> int:
        """Display the end of a run whose main thread does not notice the request to stop. Return the exit status."""
        status = self._display.ended(Ended(self._saved, reason))
        return 128 + reason if status is None else status

    def _join(self) -> None:
        """Become one process of the job, all of which do the same."""
        self._run.check_free()
        processes.join(self._spec)
        # Each computes its part of a step by its own: with others the replicas drift apart, or wait for ever.
        processes.check_same("versions", versions("jaxlm", "jax", "jaxlib"), "install the same for all")
        settings = {"COUNT": processes.process_count(), **self._experiment.model_dump(mode="json")}
        processes.check_same("settings", settings, "start all with the same CONFIG, key=value and COUNT")
        if processes.is_first():
            self._run.claim()
        else:
            self._display.mute()

    def _train_and_sample(self) -> Ended:
        with self._display:
            for change in self._changed:
                self._display.say(f"resumed with {change.key} = {shown(change.now)}, before {shown(change.before)}")
            if self._source is not None and self._run.has_checkpoint and self._experiment.lora is None:
                self._display.say(f"{self._run.paths} goes on from its checkpoint: --from {self._source} is not used")
            # An accelerator tells what it has once it is started; a CPU is started later, as that sets how memory is
            # allocated.
            capacity.check_before_reading(self._experiment)
            costs_and_mesh = self._count() if accelerators.platforms() != "cpu" else None
            dataset = self._prepare()
            counted, mesh = costs_and_mesh or self._count()
            load = MachineLoad()
            result = self._train(dataset, counted, mesh)
            others = load.others()
        with self._clock.phase("ending"):
            self._saved = result.step
            if processes.is_first():
                self._sum_up(counted, others)
            if result.reason:
                return Ended(result.step, result.reason)
            if not self._experiment.records.sample_tokens:
                return Ended(result.step, 0)
            from jaxlm.runs.sample import sample

            dataset = dataset._replace(tokenizer=self._run.load_tokenizer())  # with the ends of published weights
            sample_text = sample(self._experiment, dataset, self._merged(result.parameters, mesh), mesh)
        if processes.is_first():
            self._run.paths.sample.write_text(sample_text, encoding="utf-8")
        return Ended(result.step, 0, sample_text)

    def _prepare(self) -> Dataset:
        data, vocabulary, say = self._data, self._experiment.model.vocab_size, self._display.say
        tokenizer, self._template = self._tokenizer_and_template()
        with self._clock.phase("data_preparation"):
            with processes.first_process_first("data"):
                dataset = prepare(data, vocabulary, say, self._display.progress, tokenizer, self._template)
            identity = {"digest": dataset.digest[:_SHOWN]}
            processes.check_same("data", identity, "let data.text and data.tokenizer be the same for all")
        if self._source is not None:
            check_tokenizer(self._source, dataset.tokenizer)
        with processes.first_process_first("packing"):
            rows = self._pack(dataset)
        training = self._experiment.training
        if self._epochs is not None:
            count = sum(rows.values())
            steps = math.ceil(self._epochs * count / training.batch)
            self._display.say(
                f"training.epochs = {self._epochs:g}: {steps:,} steps of {training.batch} rows, of {count:,}"
            )
            if steps != training.steps:
                self._set_length(with_steps(self._experiment, steps))
        self._say_what_is_repeated(dataset, rows)
        return dataset

    def _tokenizer_and_template(self) -> "tuple[Tokenizer | None, ChatTemplate | None]":
        """Return the tokenizer of the weights that the run begins with, or of the run that is resumed, and the chat
        template that shows its conversations; None for what `data` alone gives."""
        data = self._data
        if data.tokenizer in TOKENIZERS:
            return None, None
        if self._source is not None and self._source.text.has_tokenizer:
            tokenizer, chat = self._source.text.load_tokenizer(), self._source.chat
        elif self._run.keeps(data.tokenizer):
            tokenizer, chat = self._run.load_tokenizer(), RunChat(self._run)
        else:
            return None, None
        if not data.of_conversations:
            return tokenizer, None
        template = chat.template(data.chat_template, "data.chat_template")
        if template is not None and not conversations.ends_answers(template.with_kwargs(data.chat_template_kwargs)):
            self._display.say(
                f"{template.name} writes no control token behind an answer, so that nothing that is learned ends one; "
                "give a data.chat_template that does"
            )
        return tokenizer, template

    def _sidecar_files(self) -> dict[str, bytes]:
        """Return the small files that the weights came with, and the chat template that the run is trained with."""
        contents = {} if self._source is None else self._source.weights.sidecar_files()
        if (given := self._experiment.data.chat_template) is None:
            return contents
        if (file := expanded(given, "data.chat_template")).is_file():
            contents[chat_template.FILE] = file.read_bytes()
        elif self._template is not None:
            contents[chat_template.FILE] = self._template.source.encode()
        return contents

    def _pack(self, dataset: Dataset) -> dict[str, int]:
        """Pack the rows of training and of evaluation, and return the number of rows to train on of each source. Show
        one conversation and what of it is learned, and say how many are cut or left out. Raises InputError where a
        source leaves nothing to learn, or to measure."""
        sequence, counts = self._experiment.training.sequence, {}
        for name, source in dataset.sources.items():
            for side, store in (("training", source.train), ("held-out", source.held_out)):
                try:
                    rows = rows_of(store, sequence)
                    remark = cut_remark(rows)
                except NothingToLearn as error:
                    raise InputError(f"{side} text of {name}: {error}") from None
                if remark is not None:
                    self._display.say(f"{side} text of {name}: {remark}")
                if side == "training":
                    counts[name] = len(rows)
            if source.train.of_conversations:
                of_pairs = source.train.of_pairs
                titles = ["a chosen answer", "the rejected one"] if of_pairs else ["one conversation"]
                use = "compared" if of_pairs else "learned"
                for number, title in enumerate(titles):
                    pieces = conversations.pieces(source.train, number, dataset.tokenizer)
                    self._display.example(f"{title} of {name}, and what of it is {use}:", pieces)
        return counts

    def _say_what_is_repeated(self, dataset: Dataset, rows: dict[str, int]) -> None:
        """Say how often the text of each source is read, where that is more than once."""
        training = self._experiment.training
        for name, source in dataset.sources.items():
            epochs = (training.steps or 0) * training.batch * source.weight / rows[name]
            many = epochs > _MANY_EPOCHS
            if many or (epochs > 1.05 and self._epochs is None):
                advice = "; text that is read so often teaches ever less (arXiv:2305.16264): give more, or train less"
                self._display.say(
                    f"{name} is read {epochs:.1f} times: {training.steps:,} steps of {training.batch} rows, and it has "
                    f"{rows[name]:,}{advice if many else ''}"
                )

    def _count(self) -> "tuple[Counted, Mesh]":
        """Make the mesh, and say what a step on it costs."""
        from jaxlm.costs.hardware import calibration
        from jaxlm.costs.ladder import counted, say_counted, say_replicated
        from jaxlm.costs.plan import parameter_counts
        from jaxlm.costs.workload import Workload
        from jaxlm.models.tree import parameter_count
        from jaxlm.parallel.devices import describe, mesh_here
        from jaxlm.parallel.layout import Layout

        experiment, say = self._experiment, self._display.say
        with self._clock.phase("calibration"), processes.first_process_first("calibration"):
            calibration.ensure(say)
        mesh = mesh_here(experiment.mesh.least().size, partial(mesh_layout.layout, experiment))
        work = Workload.of(experiment, Layout(mesh.shape))
        trained = f", and {work.trainable_numbers:,} in adapters" if experiment.lora else ""
        total, counts = parameter_count(experiment.model), parameter_counts(work)  # the latter with adapters
        unused = counts["total"] - counts["active"]
        active = f", of which {total - unused:,} are active for each token" if unused else ""
        say(f"{total:,} parameters{active}{trained} on {describe(mesh)}")
        costs = counted(work, mesh)
        capacity.check(costs.memory, costs.capacity)
        if divided := mesh_layout.say_layout(experiment, costs.work.layout):
            say(divided)
        if replicated := say_replicated(costs.work):
            say(replicated)
        say(say_counted(costs))
        say(str(costs.layers))
        steps = experiment.training.steps
        ends = getattr(experiment.optimizer.schedule, "decay_steps", steps)
        if ends is not None and steps is not None and ends < steps:
            say(
                f"optimizer.schedule.decay_steps = {ends}: from there to training.steps = {steps} "
                "the learning rate stays where it ends"
            )
        return costs, mesh

    def _train(self, dataset: Dataset, counted: "Counted", mesh: "Mesh") -> "Result":
        from jaxlm.core import compilation_cache
        from jaxlm.costs.layer_loops import with_choice
        from jaxlm.training.loop import Start, Trainer

        run, paths = self._run, self._run.paths
        if mesh.devices.flat[0].platform != "cpu":  # XLA warns of each program that it loads for a CPU
            compilation_cache.enable(self._display.say)
        start = Start(
            clock=self._clock,
            display=self._display,
            profiler=profile.Profiler(self._traced, paths.profile, self._display.say),
            stop=self._stop,
            trains_from=partial(self._record, dataset),
            weights=partial(self._weights, mesh),
        )
        # The configuration of the run keeps "auto": on the same chip a resumed run chooses the same.
        trainer = Trainer(with_choice(self._experiment, counted.work), dataset, mesh, paths, counted.mfu, start)
        # Only now that nothing was refused is it a run.
        with processes.first_process_first("run"):
            run.open(self._experiment, dataset, self._continue_with_changes, self._origin, self._sidecar_files)
        if processes.is_first():
            self._uploading.enter_context(copies.kept_up(paths.directory, written_apart, self._display.say))
            here = environment(list(mesh.devices.flat)) | {"compiler_options": self._compiler_options(mesh)}
            JsonLines(paths.attempts).append({**here, "layers": counted.layers.row()})
        try:
            result = trainer.train()
            if self._changed and self._trained_from is None:
                self._display.say("no step was left to train, and the record stays as it is")
            return result
        except FileNotFoundError as error:
            if paths.config.exists():
                raise
            raise RunFailed(
                f"{paths} was moved or removed; put it back, and the run goes on from its newest checkpoint"
            ) from error

    def _compiler_options(self, mesh: "Mesh") -> dict[str, Any]:
        from jaxlm.parallel import compiler_options

        return compiler_options.on_mesh(mesh, self._experiment.execution.compiler_options)

    def _weights(self, mesh: "Mesh") -> "Tree | None":
        """Return the weights that the run begins with, or that its adapters adapt; None for those of its seed."""
        from jaxlm.models import tree as model_tree
        from jaxlm.parallel.rules import TRAIN

        if self._source is None:
            return None
        experiment, lora, run, say = self._experiment, self._experiment.lora, self._run, self._display.say
        adapted = run.begun_from if lora is not None and run.has_checkpoint else None
        if adapted is not None and processes.is_first():
            adapted.check(run, self._source.weights.digest(adapted.step))
        dtype = "float32" if lora is None else experiment.execution.dtype
        checkpoint = "newest" if adapted is None or adapted.step is None else adapted.step
        weights = self._source.weights
        quantized = experiment.execution.quantization
        request = WeightsRequest(experiment.model, mesh, TRAIN, dtype, checkpoint, say=say, quantized=quantized)
        step, parameters = weights.restore(request)
        origin = weights.origin(step)
        if processes.is_first() and adapted is None:
            digest = None if lora is None else weights.digest(step)
            origin._replace(digest=digest).save(run.paths.origin)
        if lora is None:
            say(f"beginning with the weights of {origin}")
            return parameters
        say(f"adapting the weights of {origin}")
        return model_tree.under_adapters(parameters, model_tree.targets(experiment.model, lora))

    def _merged(self, parameters: "Tree", mesh: "Mesh") -> "Tree":
        """Return the parameters of the model, with adapters added to what they adapt."""
        from jaxlm.models import tree as model_tree
        from jaxlm.parallel.rules import TRAIN

        model, lora = self._experiment.model, self._experiment.lora
        quantized = self._experiment.execution.quantization
        return parameters if lora is None else model_tree.merged(model, lora, parameters, mesh, TRAIN, quantized)

    def _record(self, dataset: Dataset, step: int) -> None:
        self._trained_from = step
        self._run.record(self._experiment, dataset, step)

    def _sum_up(self, counted: "Counted", other_load: float | None) -> None:
        """Draw the loss curve, write the ladder, and say where the time went."""
        from jaxlm.costs.ladder import ladder

        paths, rungs = self._run.paths, None
        metrics = JsonLines(paths.metrics).rows()
        if metrics:
            plot_losses(metrics, JsonLines(paths.evaluations).rows(), paths.loss_curve)
            rungs = ladder(counted, metrics, other_load)
            paths.ladder.write_text(json.dumps(rungs, indent=1) + "\n", encoding="utf-8")
        self._display.summary(summary(Attempts.file(paths.goodput).rows()), rungs)
