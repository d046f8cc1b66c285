"""jaxlm from a program: train a model, load, serve, measure and compare trained ones, plan and compile their steps.

Importing this module imports nothing heavy; its functions import what they need.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jaxlm.api.measuring import bench_decode
from jaxlm.api.model import LoadedModel
from jaxlm.api.quantizing import quantize
from jaxlm.api.serving import serve
from jaxlm.core.addresses import place
from jaxlm.core.errors import InputError, refuse_single

if TYPE_CHECKING:
    from jaxlm.config.experiment import Experiment
    from jaxlm.costs.deployment import DeploymentRanking
    from jaxlm.costs.plan_order import Goal
    from jaxlm.costs.ranking import Ranking
    from jaxlm.costs.stack import Stack
    from jaxlm.inference.settings import EngineSettings
    from jaxlm.lowering.report import CompiledStep
    from jaxlm.parallel.processes import ProcessSpec
    from jaxlm.parallel.rules import Kind
    from jaxlm.runs.comparison import RunComparison
    from jaxlm.runs.conversion import Converted, Imported
    from jaxlm.runs.summary import RunSummary
    from jaxlm.training.display import Display, Ended
    from jaxlm.training.profile import ProfiledSteps

__all__ = [
    "LoadedModel", "bench_decode", "compare", "compile", "configure", "export", "import_run", "load", "plan",
    "plan_serving", "quantize", "runs", "serve", "train",
]  # fmt: skip


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

    refuse_single("overrides", overrides)
    if start_from is None:
        return experiments.load(config, overrides)
    return load_experiment(config, overrides, source_of(place(start_from)))


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
      out: folder of the run, made where it is not there, or its address in a bucket (gs://, s3://).
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

    source = needed_by(place(out)) if start_from is None else source_of(place(start_from))
    shown = display or Display()
    return Job(experiment, place(out), shown, profile, max_hours, process, continue_with_changes, source).run()


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
    chat_template: str | None = None,
    adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    say: Callable[[str], None] = _silent,
) -> "LoadedModel":
    """Load a trained model; its parameters are restored when they are first asked for.

    Args:
      run: folder of a run of `train`, a Hugging Face directory, the address of one in a bucket (gs://, s3://, hf://),
        or hf:ORG/NAME of the Hub.
      overrides: `key=value` changes of its experiment, such as "mesh.tensor=1"; none may change its architecture.
      reads: sections and keys that the caller reads: an override of any other is refused. None accepts all.
      checkpoint: the newest, or the one with the lowest held-out loss.
      average: whether to take the moving average of the weights (`training.ema_decay`) in their place.
      dtype: to compute in, "float32" or "bfloat16", or "auto" for the one that is fastest here, as measured; "stored"
        leaves each parameter as it is. By default `execution.dtype` of what was trained; of published weights their
        own, float16 as float32, and on a CPU the fastest that is no coarser.
      workload: the step that parameters are laid out for: "decode" keeps weights where they are; "train", for
        `evaluate`, keeps them in float32 and shards them over fsdp too, and "prefill" those of them that it divides.
      engine: settings of the engine that continues prompts; by default of the sizes in `experiment.inference`.
      chat_template: the path of a chat template, or the name of one that comes with jaxlm, in place of the model's own.
      adapter: a run with [lora] or a PEFT directory of the model, with which `generate` and `stream` draw texts, beside
        the weights as they are, such as quantised ones. `load(adapter)` adds it to them instead, and evaluates them so.
      adapters: adapters of the model by name, runs with [lora] or PEFT directories. `serve` serves the model with each
        under its name, and `complete` takes requests of them (`Request.adapter`).
      say: takes a line about each checkpoint that is passed over, and about a dtype that was chosen.

    Raises InputError where there is no run, where it keeps no average, or where an override does not suit it.
    """
    from jaxlm.config.overrides import overridden
    from jaxlm.runs.locate import source_of
    from jaxlm.runs.served_adapter import adapter_of

    refuse_single("overrides", overrides)
    source = source_of(place(run))
    name = None if adapter is None else place(adapter).name
    if name is not None and adapter is not None:
        if name in adapters:
            raise InputError(f"two adapters are called {name}; give each a name of its own")
        adapters = {**adapters, name: adapter}
    if average and adapters:
        raise InputError("adapters are trained beside weights, and not beside their average; leave out --ema")
    if average and source.experiment().training.ema_decay is None:
        raise InputError(f"{source} keeps no average of its weights (training.ema_decay); leave out --ema")
    experiment = source.overridden(overrides, reads)
    if dtype is None and "execution.dtype" in overridden(overrides):
        dtype = experiment.execution.dtype
    model = LoadedModel(source, experiment, checkpoint, average, dtype, workload, engine, say, chat_template)
    model.adapters = {name: adapter_of(name, place(where), source) for name, where in adapters.items()}
    model.adapter = name
    return model


def import_run(model: str | Path, run: str | Path, *, say: Callable[[str], None] = _silent) -> "Imported":
    """Convert a Hugging Face directory into a run, once. Nothing of it is executed.

    Args:
      model: the directory, or hf:ORG/NAME of the Hub: config.json and safetensors of a family that jaxlm has
        (docs/models.md).
      run: the folder to make. Training starts from it, and does not continue in it.
      say: takes a line about what is not read, or odd.

    Returns the family, the number of parameters, and their dtype. Raises InputError where the directory is broken, has
    a key or a tensor that jaxlm does not know, or where the folder is taken.
    """
    from jaxlm.runs import conversion

    return conversion.import_run(place(model), place(run), say)


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
        source = source_of(place(run))
        if not isinstance(source.weights, adapters.AdaptedWeights):
            raise InputError(f"{source} is no run with adapters ([lora]); leave out --adapter")
        return adapters.export(source, source.weights, place(folder), checkpoint, average, say)
    # Nothing is computed: each device holds as little as may be.
    options = {"checkpoint": checkpoint, "average": average, "dtype": "stored", "workload": "prefill"}
    model = load(run, ["execution.quantize=none"], **options, say=say)
    return conversion.export(model.source, model.parameters, model.experiment, place(folder), say)


def runs(folder: str | Path = "runs") -> "list[RunSummary]":
    """Return the runs in a folder and below it, the latest first. Raises InputError where there is no such folder."""
    from jaxlm.runs.summary import find

    return find(place(folder))


def compare(runs: Sequence[str | Path], picture: str | Path | None = None) -> "RunComparison":
    """Compare runs: the keys that differ, and their losses at equal steps and at equal training tokens.

    Args:
      runs: their folders.
      picture: where to draw their losses as a PNG.

    Raises InputError where a folder is no run, or where the picture cannot be written.
    """
    from jaxlm.runs.comparison import compare

    refuse_single("runs", runs)
    return compare([place(run) for run in runs], None if picture is None else Path(picture))


def plan(
    experiment: "Experiment",
    on: str,
    *,
    mesh: str | None = None,
    workload: "Kind" = "train",
    fixed: Collection[str] = (),
    objective: str | None = None,
    budget: float | None = None,
    deadline: float | None = None,
    chip: Mapping[str, Any] | None = None,
    stack: "Stack | None" = None,
) -> "Ranking":
    """Count what a step costs on chips that need not be here, without starting a JAX backend.

    Args:
      experiment: as `jaxlm.config.load` returns it; where it gives no `training.batch`, or in inference no
        `inference.sequences`, they are padded until the mesh divides them.
      on: chips, such as "h200-sxm:8" or "tpu-v5e:4x4"; "all:8" ranks 8 chips of each kind in the catalog.
      mesh: axes, such as "fsdp=8,tensor=2", in place of the experiment's; "auto" ranks those that fit.
      workload: a step of training, a prefill or one decoded token of each sequence (`jaxlm.config.step_sizes`).
      fixed: settings that a search leaves as they are, of "microbatches" and "remat".
      objective: what is best: the most tokens a second ("throughput", the default), the least time of a step of
        inference ("latency"), or the least USD per token ("cost", the default where there is a deadline).
      budget, deadline: the most USD, and the most seconds, of a training run of known steps.
      chip: figures in place of the catalog's, such as {"memory_bytes_per_s": 2.4e12, "usd_per_hour": 2.5}
        (`jaxlm.costs.hardware.chip_changes.with_figures`).
      stack: the software of the step in place of jaxlm's own (`jaxlm.costs.stack.stack_of`).

    Returns plans, the best first, with why chips of the catalog are not among them. Raises InputError where the chips
    are not known or lack a figure, where the mesh does not divide the model, or where no mesh fits or keeps budget and
    deadline.
    """
    from jaxlm.config.checks import check_quantized
    from jaxlm.costs.plan_order import PlanOrder
    from jaxlm.costs.ranking import rank
    from jaxlm.costs.stack import JAXLM

    check_quantized(experiment, workload)
    order = PlanOrder.of(objective, budget, deadline, workload)
    return rank(experiment, on, mesh, workload, fixed, order, chip, stack or JAXLM)


def plan_serving(
    experiment: "Experiment",
    on: str,
    *,
    prompt: int,
    output: int,
    ttft: float | None = None,
    tpot: float | None = None,
    rate: float | None = None,
    objective: "Goal" = "cost",
    searched: Collection[str] = (),
    chip: Mapping[str, Any] | None = None,
    stack: "Stack | None" = None,
) -> "DeploymentRanking":
    """Find the batch, `tensor` and number of replicas that serve requests best, within limits of latency; where asked
    for, the width of weights and the number of drafts as well.

    Args:
      experiment: as `jaxlm.config.load` returns it; its `inference.sequences`, where given, is the batch of a replica.
      on: chips, such as "h100-sxm5:8"; "all:8" ranks 8 chips of each kind in the catalog.
      prompt, output: tokens of each request.
      ttft: the most seconds until the first token, for nine of ten requests.
      tpot: the most seconds for each later token, on average.
      rate: requests a second, at random times; by default each sequence of the batch is a client who sends a request
        as soon as the one before is answered.
      objective: what is best: the least USD per token ("cost"), the most tokens a second of all chips ("throughput") or
        the least time of a request ("latency").
      searched: what else is chosen: "quantize", among all values of `execution.quantize`, and "drafts", among 0, 2, 4
        and so on up to the number in `inference.speculate`. What is not searched is as the experiment says.
      chip, stack: as in `plan`.

    Returns deployments, the best of each size of a replica or of each chip, the best first. Raises InputError where no
    deployment meets the limits, or as `plan` does.
    """
    from jaxlm.costs.demand import Demand
    from jaxlm.costs.deployment import deployments
    from jaxlm.costs.stack import JAXLM

    demand = Demand(prompt, output, ttft, tpot, rate)
    return deployments(experiment, on, demand, objective, chip, stack or JAXLM, searched)


def compile(
    experiment: "Experiment",
    on: str,
    *,
    mesh: str | None = None,
    workload: "Kind" = "train",
    fit: bool = False,
    quick: bool = False,
    fixed: Collection[str] = (),
    chip: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = _silent,
    warn: Callable[[str], None] = warnings.warn,
) -> "CompiledStep":
    """Compile a step for chips that need not be here, by XLA's own compiler for them. It keeps JAX in this process to
    the CPU.

    Args:
      experiment, on, mesh, workload, fixed, chip: as in `plan`, but for "auto" and "all".
      fit: find the largest microbatch and the cheapest rematerialisation that fit, in place of the experiment's.
      quick: search less for a fast program; for TPUs only.
      say: takes a line before each program that is compiled.
      warn: takes a line about what is unusual of the mesh, and about a batch that is padded for it.

    Raises DoesNotFit where the compiler itself refuses for want of memory (TPUs), InputError where the step cannot be
    compiled, or as `plan` does.
    """
    import jax

    from jaxlm.config.checks import check_quantized
    from jaxlm.costs.hardware.target import Target
    from jaxlm.costs.ladder import say_replicated
    from jaxlm.costs.placement import (
        batch_shards,
        check_cache,
        layout_on,
        on_mesh,
        say_batch,
        say_mesh,
        say_slices,
        with_batch,
    )
    from jaxlm.costs.workload import Workload
    from jaxlm.lowering import report, targets
    from jaxlm.lowering.fit import compile_fitting
    from jaxlm.parallel.mesh import make_mesh

    check_quantized(experiment, workload)
    if fit and workload != "train":
        raise InputError(f"--fit varies microbatches and rematerialisation, which {workload} does not have")
    target = Target.parse(on, chip)
    if quick and target.chip.kind != "tpu":
        raise InputError(f"--quick is for TPUs, whose compiler takes longer: leave it out for {target}")
    given = experiment = on_mesh(experiment, mesh)
    experiment = with_batch(experiment, batch_shards(experiment, target, workload), workload)
    layout = layout_on(experiment, target, workload)
    work = Workload.of(experiment, layout, workload)
    check_cache(experiment, work)
    remarks = say_mesh(given, work), say_batch(given, work), say_replicated(work), say_slices(target, layout)
    for remark in filter(None, remarks):
        warn(remark)
    jax.config.update("jax_platforms", "cpu")  # whatever is here is not what is compiled for
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        devices = make_mesh(layout, targets.devices(target))
    for warning in caught:
        warn(str(warning.message))
    if fit:
        return compile_fitting(experiment, target, devices, quick, say, fixed)
    say(f"compiling for {target}")
    return report.compile(experiment, workload, target, devices, quick)
