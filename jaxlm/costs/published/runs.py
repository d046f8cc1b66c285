"""Measured runs with their whole configurations, and the rules by which each becomes a workload, a target and a stack.

`runs.json` holds facts alone, as the sources print them; `rules.toml` says what a group of runs, a framework or a table
means by them. Another file of the same format is read by the same rules.
"""

import functools
import json
import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, PositiveInt, ValidationError

from jaxlm.core.errors import InputError
from jaxlm.core.explain import first_line
from jaxlm.core.schema import Section, merged
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.hardware.catalog import find
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.published.figures import megatron_flops
from jaxlm.costs.published.run_models import NotExpressed, run_model
from jaxlm.costs.stack import Pipeline, Stack, stack_from
from jaxlm.costs.workload import Workload
from jaxlm.inference.settings import EngineSettings
from jaxlm.models.execution_config import ExecutionConfig, Remat
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.layout_choice import with_shards
from jaxlm.parallel.rules import RULES as SHARDING
from jaxlm.parallel.rules import TRAIN, Kind, Rules

# Degrees of parallelism, which are 1 unless a run says more.
_DEGREES = ("slices", "pp", "vpp", "dp", "fsdp", "tp", "cp", "ep")

RUNS, RULES = (Path(__file__).with_name(name) for name in ("runs.json", "rules.toml"))


class MeasuredRun(Section):
    """A measured run, as its source prints it.

    `seq` is its sequence length, `isl` and `osl` the tokens of prompts and outputs of a serving table. `global_batch`
    is in sequences, `micro_batch` on one device; `grad_accum` is the number of microbatches. `dims` are sizes of the
    model: layers L, width d, query and key/value heads H and Hkv of width Dh, feed-forward width F, vocabulary V.
    """

    model_config = ConfigDict(extra="ignore")

    id: str
    kind: Literal["train", "decode", "serve"]
    group: str
    model: str
    dims: dict[str, Any]
    chip: str
    chips: PositiveInt
    parallel: dict[str, Any]
    seq: PositiveInt
    global_batch: PositiveInt | None = None
    micro_batch: PositiveInt | None = None
    grad_accum: PositiveInt | None = None
    precision: str
    remat: str
    attention_kernel: str = ""
    framework: str
    measured: dict[str, float]
    isl: PositiveInt | None = None
    osl: PositiveInt | None = None
    source: str
    licence: str = ""
    verified: Literal["read", "recalled"] = "read"
    note: str = ""

    @property
    def family(self) -> str:
        """The model on a kind of chip, of which a group may have several runs."""
        return f"{self.group}|{self.model}|{self.chip}"

    @property
    def is_mixture(self) -> bool:
        """True for a mixture of experts."""
        return "experts" in self.dims


class RunRule(Section):
    """A rule of `rules.toml`, whose head explains its keys."""

    group: str = ""
    where: dict[str, str] = Field(default_factory=dict)
    stack: dict[str, Any] = Field(default_factory=dict)
    remat: dict[str, Remat | float] = Field(default_factory=dict)
    flops: Literal["model", "megatron"] | None = None
    on: str | None = None
    chip: dict[str, Any] = Field(default_factory=dict)
    scan_layers: bool = False
    chunk_tokens: PositiveInt = EngineSettings.chunk_tokens
    nearest: str = ""
    reported: str = ""
    not_expressed: str = ""
    source: str = ""

    def applies(self, run: MeasuredRun) -> bool:
        """Return whether the rule is of this run."""
        return run.group.startswith(self.group) and all(
            re.search(pattern, getattr(run, name)) for name, pattern in self.where.items()
        )


class ServedRequests(NamedTuple):
    """The requests of a serving table: tokens of prompts and outputs, and the clients that send one request after the
    other; None where they are as many as memory holds."""

    prompt: int
    output: int
    clients: int | None


@dataclass(frozen=True)
class ExpressedRun:
    """A run as the cost model counts it. `recomputed`: the share of layers that are recomputed, where that is neither
    none nor all; `work` keeps all activations then. `seconds`: the measured time of a step, or of an output token of
    all `served` requests together."""

    work: Workload
    target: Target
    stack: Stack
    seconds: float
    recomputed: float | None = None
    served: ServedRequests | None = None


@functools.cache
def rules() -> tuple[RunRule, ...]:
    """Return the rules of `rules.toml`, in its order. Raises InputError for a broken file."""
    values = tomllib.loads(RULES.read_text(encoding="utf-8"))
    try:
        return tuple(RunRule.model_validate(rule) for rule in values["rule"])
    except ValidationError as error:
        raise InputError(f"{RULES.name}: {first_line(error)}") from None


def read_runs(path: Path = RUNS) -> list[MeasuredRun]:
    """Return the runs of a file. Raises InputError if it is missing or is not a file of runs."""
    try:
        return [MeasuredRun.model_validate(run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except FileNotFoundError:
        raise InputError(f"there is no file {path} of measured runs") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = first_line(error) if isinstance(error, ValidationError) else repr(error)
        raise InputError(f"{path} is no file of measured runs: {said}") from None


def rule_of(run: MeasuredRun) -> RunRule:
    """Return the rules of a run as one."""
    values: dict[str, Any] = {}
    for rule in rules():
        if rule.applies(run):
            values = merged(values, rule.model_dump(exclude_unset=True, exclude={"group", "where"}))
    return RunRule.model_validate(values)


def express(run: MeasuredRun, rule: RunRule) -> ExpressedRun:
    """Return a run as the cost model counts it. Raises NotExpressed where the model lacks something of it."""
    _refuse(run, rule)
    slices = run.parallel.get("slices", 1)
    stack, target = _stack(run, rule), _target(run, rule, slices)
    layout = _layout(run, target, stack, slices)
    kept, recomputed = _remat(run, rule)
    if run.kind == "train":
        batch, sequence = run.global_batch, run.seq
    else:
        batch, sequence = run.global_batch or layout.over(SHARDING["decode"].over("batch")), _context(run)
    work = Workload(
        "train" if run.kind == "train" else "decode",
        run_model(run.dims, sequence),
        batch,
        sequence,
        ExecutionConfig(remat=kept, scan_layers=rule.scan_layers),
        layout,
        own_rules=_own_rules(run),
        microbatches=_microbatches(run, layout, batch) if run.kind == "train" else 1,
        chunk_tokens=rule.chunk_tokens,
    )
    if batch % (layout.over(work.rules.over("batch")) * work.microbatches):
        raise NotExpressed(f"{work.microbatches} microbatches of {batch} sequences on the mesh {layout}")
    seconds = _seconds(run, rule, work, target)
    return ExpressedRun(work.on(target.chip), target, stack, seconds, recomputed, _served(run))


def _refuse(run: MeasuredRun, rule: RunRule) -> None:
    degrees = {name: run.parallel.get(name, 1) for name in _DEGREES}
    if wrong := [f"{name} = {value!r}" for name, value in degrees.items() if not (type(value) is int and value > 0)]:
        raise NotExpressed(f"degrees of parallelism are at least 1, not {', '.join(wrong)}")
    if wrong := [f"{name} = {value}" for name, value in run.measured.items() if not 0 < value < math.inf]:
        raise NotExpressed(f"measured figures are above 0, not {', '.join(wrong)}")
    lacks = {
        "context parallelism in inference": degrees["cp"] > 1 and run.kind != "train",
        "the layout is not published": "note" in run.parallel,
        "no batch is published": run.global_batch is None and _served(run) is None,
        "replicas in one table": _served(run) is not None and degrees["dp"] > 1,
    }
    if reasons := [reason for reason, is_so in lacks.items() if is_so]:
        raise NotExpressed(", ".join(reasons))
    if rule.not_expressed:
        raise NotExpressed(rule.not_expressed)


def _stack(run: MeasuredRun, rule: RunRule) -> Stack:
    """Return the stack of a run: that of its rules, with its pipeline, and with ZeRO-1's shards of optimizer state."""
    stack = stack_from(rule.stack)
    changes: dict[str, Any] = {}
    if (stages := run.parallel.get("pp", 1)) > 1:
        changes["pipeline"] = Pipeline(stages=stages, chunks=run.parallel.get("vpp", 1))
    if stack.state_bytes and run.parallel.get("zero") == 1:
        # 6 bytes of parameters and gradients, and 12 of optimizer state over data-parallel replicas:
        # github:NVIDIA/Megatron-LM:docs/source/api-guide/dist_optimizer.md.
        changes["state_bytes"] = 6 + 12 / run.parallel.get("dp", 1)
    return stack.model_copy(update=changes)


def _target(run: MeasuredRun, rule: RunRule, slices: int) -> Target:
    """Return the chips of a run."""
    try:
        chip = find(rule.on or run.chip)
    except InputError:
        raise NotExpressed(f"the catalog has no {run.chip}") from None
    chips = run.chips // slices
    domain = chip.link.domain if chip.link and not chip.slices else None
    topology = ""
    if domain and chips > domain:
        within = next(size for size in range(domain, 0, -1) if chips % size == 0)
        topology = f":{chips // within}x{within}"
    target = Target.parse(f"{chip.id}{topology or f':{chips}'}")
    return Target(Chip.model_validate(merged(target.chip.model_dump(), rule.chip)), target.topology, slices)


def _layout(run: MeasuredRun, target: Target, stack: Stack, slices: int) -> Layout:
    """Return the mesh of one stage."""
    of = run.parallel
    of_layers, of_parameters, of_sequence = (of.get(name, 1) for name in ("tp", "fsdp", "cp"))
    devices = target.devices // stack.pipeline.stages
    replicas, over = divmod(devices, of_layers * of_parameters * of_sequence)
    of_experts = math.gcd(replicas, of.get("ep", 1))
    if over or devices * stack.pipeline.stages != target.devices:
        along = f"tp = {of_layers}, fsdp = {of_parameters} and cp = {of_sequence}"
        raise NotExpressed(f"{along} on {devices} devices")
    shards = {"embed": of_parameters, "heads": of_layers, "sequence": of_sequence, "experts": of_experts}
    return with_shards(TRAIN, batch=replicas // of_experts, **shards)


def _own_rules(run: MeasuredRun) -> Rules | None:
    """Return the rules of a run whose context or expert parallelism leaves parameters whole but for the experts:
    Megatron's ZeRO-1 shards optimizer state alone, where `mesh.context` and `mesh.expert` shard parameters too, as FSDP
    does."""
    of = {"sequence": run.parallel.get("cp", 1), "experts": run.parallel.get("ep", 1)}
    whole = tuple(axis for name, count in of.items() if count > 1 for axis in TRAIN.over(name))
    return rules_with_whole("train", whole) if "zero" in run.parallel else None


@functools.cache
def rules_with_whole(kind: Kind, mesh_axes: tuple[str, ...]) -> Rules | None:
    """Return the rules of a kind of step in which these mesh axes shard no parameters; None for no axes."""
    return SHARDING[kind].with_whole_parameters(mesh_axes) if mesh_axes else None


def _microbatches(run: MeasuredRun, layout: Layout, batch: int) -> int:
    if run.grad_accum:
        return run.grad_accum
    rows = batch // layout.over(TRAIN.over("batch"))
    if run.parallel.get("pp", 1) > 1:  # a pipeline passes single sequences unless it says otherwise
        return rows
    return max(1, rows // (run.micro_batch or rows))


def _remat(run: MeasuredRun, rule: RunRule) -> tuple[Remat, float | None]:
    """Return what layers keep, and the share of layers that keep nothing."""
    for pattern, kept in reversed(rule.remat.items()):
        if re.search(pattern, run.remat):
            return ("none", kept) if isinstance(kept, float) else (kept, None)
    raise NotExpressed(f"rematerialisation: {run.remat}")


def _served(run: MeasuredRun) -> ServedRequests | None:
    """Return the requests of a serving table whose throughput is published."""
    if run.kind != "serve" or not (run.isl and run.osl and "output_tokens_per_s" in run.measured):
        return None
    return ServedRequests(run.isl, run.osl, run.global_batch)


def _context(run: MeasuredRun) -> int:
    """Return the tokens in a sequence's cache in the middle of decoding."""
    return run.isl + run.osl // 2 if run.isl and run.osl else run.seq


def _seconds(run: MeasuredRun, rule: RunRule, work: Workload, target: Target) -> float:
    """Return the measured seconds of a step: as published, or from a rate of tokens or of FLOPs."""
    of, chips = run.measured, target.chips
    if _served(run):
        return 1 / of["output_tokens_per_s"]
    if run.kind == "serve":
        if "tpot_s" not in of:
            raise NotExpressed("neither a step's time nor the time of a token is published")
        return of["tpot_s"]
    if "step_s" in of:
        return of["step_s"]
    if "tokens_per_s_per_chip" in of:
        return work.tokens / (of["tokens_per_s_per_chip"] * chips)
    if "tflops_per_chip" not in of or rule.flops is None:
        raise NotExpressed("no time, and no rate whose FLOPs are said")
    counted = flops(work).model if rule.flops == "model" else megatron_flops(work)
    return counted / (of["tflops_per_chip"] * 1e12 * chips)


def recomputing(expressed: ExpressedRun) -> ExpressedRun:
    """Return the run with all layers recomputed."""
    return replace(expressed, work=expressed.work.with_execution(remat="full"), recomputed=None)
