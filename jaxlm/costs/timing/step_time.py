"""The time of a step: the lower bound, the expected time with its parts, and a bracket around it."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.costs import local_shapes
from jaxlm.costs.counted import operations, traffic
from jaxlm.costs.counted.operations import Operation
from jaxlm.costs.dispatches import dispatches, engine_turns
from jaxlm.costs.draft_steps import draft_drawing, draft_reading
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.rates import SustainedRates, sustained
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.stack import JAXLM, Pipeline, Stack
from jaxlm.costs.timing.communication import communication, sustained_time
from jaxlm.costs.timing.computation import Part, as_run, by_kernel, computation, least_moved, product_dtype
from jaxlm.costs.workload import Workload
from jaxlm.models.logical_axes import RESIDUAL

# Uncertainty that is common to all parts of a step. Large products of one shape run 8 to 17 % faster in short runs,
# before the clocks fall, than in long ones (github:ai-dynamo/aiconfigurator, tables of short and of sustained runs),
# and a step is between the two; the GPUs of one node differ by 5 % (github:stas00/ml-engineering). A run is slower for
# reasons that nothing here counts, stragglers among them: Megatron's MFU fell by 5 of 47 points from 96 to 4,608 GPUs
# at one batch (github:NVIDIA/Megatron-LM:README.md).
_FASTER, _SLOWER = 0.11, 0.16
# The share of the time of a hidden collective by which it may slow down the computation that hides it: NCCL runs on
# cores of the GPU.
_CONTENTION = 0.3


class Reason(NamedTuple):
    """A part of the gap between the published peaks and the expected time: `share` of the expected time."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on each device.

    `compute`: all products at the chip's peak; kernels skip the scores of attention that causality and windows hide.
    `memory`: the least traffic at the chip's bandwidth. `collectives`: all collectives at published rates, one after
    the other. `lower_bound`: each operation takes the longer of its compute and its least traffic, and collectives
    overlap with the operations; no program is faster. `expected`: the time of a well-tuned program, the sum of its
    `parts`, each at sustained rates. `low` and `upper_bound`: the bracket of `expected`, from the spreads of these
    rates. `exposed`: collectives that do not run behind computation, with their `exposed_bytes` on each device;
    `hidden`: those that do. All three are of all ticks of a pipeline; the time of idle ones is the part of the bubble.
    """

    compute: float
    memory: float
    collectives: float
    lower_bound: float
    low: float
    expected: float
    upper_bound: float
    parts: dict[str, Part] = field(default_factory=dict)
    exposed: float = 0.0
    exposed_bytes: float = 0.0
    hidden: float = 0.0

    @property
    def bound_by(self) -> str:
        parts = {"compute": self.compute, "memory": self.memory, "collectives": self.collectives}
        return max(parts, key=parts.__getitem__)

    @property
    def ideal(self) -> float:
        """The seconds of the model's products, and of what they read, at published rates."""
        return sum(part.ideal for part in self.parts.values())

    @property
    def reasons(self) -> list[Reason]:
        """The gap between `ideal` and `expected` by its reasons, the largest first."""
        gaps = {name: part.seconds - part.ideal for name, part in self.parts.items()}
        named = {f"{name} below peak" if self.parts[name].ideal else name: gap for name, gap in gaps.items()}
        return sorted((Reason(*each, each[1] / self.expected) for each in named.items()), key=lambda r: -r.seconds)


class _Bounds(NamedTuple):
    """Seconds at published rates: of all products, of the least traffic, of each operation's longer one, and of all
    collectives."""

    compute: float
    memory: float
    together: float
    collectives: float


def step_time(work: Workload, target: Target, stack: Stack = JAXLM) -> StepTime:
    """Return the time of a step on each device of a target, under a stack.

    Raises InputError where the chip lacks a published figure that the step needs.
    """
    if stack.pipeline.stages > 1:
        return pipelined(work, target, stack)
    rows = work.without_drafts()
    step = _on_device(rows, target, stack)
    parts, runs = step.parts, [step]
    if rows.stages > 1:
        parts = _with_bubble(step, _on_device(replace(rows, counts_idle=False), target, stack))
    if work.draft_model is not None:
        read = _on_device(draft_reading(work), target, stack, draws=False)
        drafting = [read, *[_on_device(draft_drawing(work), target, stack)] * work.drafts]
        parts, runs = {**parts, "draft model": _of_draft_model(drafting)}, [step, *drafting]
    busy, kernels = sum(part.seconds for part in parts.values()), sum(run.kernels for run in runs)
    if (idle := _host_seconds(work, sustained(target.chip), stack, kernels, busy)) > 0:
        parts = {**parts, "host": Part(idle, 0.0, 0.3 * idle)}
    bounds = _Bounds(*map(sum, zip(*(run.bounds for run in runs), strict=True)))
    exposed, exposed_bytes, hidden = (
        sum(getattr(run, name) for run in runs) for name in ("exposed", "exposed_bytes", "hidden")
    )
    return replace(_summed(bounds, parts, hidden), exposed=exposed, exposed_bytes=exposed_bytes)


class _DeviceTime(NamedTuple):
    """The time of programs on a device, whatever the host takes: bounds, parts, collectives that computation does not
    hide, their bytes, those that it hides, and kernels."""

    bounds: _Bounds
    parts: dict[str, Part]
    exposed: float
    exposed_bytes: float
    hidden: float
    kernels: int


def _on_device(work: Workload, target: Target, stack: Stack, draws: bool = True) -> _DeviceTime:
    """Return the time of a step without drafts on each device, with or without its draws."""
    chip, rates = target.chip, sustained(target.chip)
    network = Network(target, work.layout)
    collectives = [each for each in traffic.collectives(work) if draws or each.of != traffic.DRAWS]
    sent = sum(each.times * network.seconds(each.kind, each.bytes, each.axes) for each in collectives)
    ops = [op for op in operations.step(work) if draws or op.kind != "draw"]
    done = computation(as_run(ops, work, stack), work, chip, rates, stack)
    waited = communication(collectives, network, rates, stack, done.phases)
    parts = {**done.parts, **{f"exposed {name}": part for name, part in waited.exposed.items()}}
    bounds = _bounds(ops, work, chip, stack, sent)
    exposed = sum(part.seconds for part in waited.exposed.values())
    return _DeviceTime(bounds, parts, exposed, waited.exposed_bytes, waited.hidden, done.kernels)


def _with_bubble(step: _DeviceTime, busy: _DeviceTime) -> dict[str, Part]:
    """Return the parts of a step without the passes of idle stages, and the time of these passes by itself."""
    of_step, of_busy = (sum(part.seconds for part in run.parts.values()) for run in (step, busy))
    wait = of_step - of_busy
    return {**busy.parts, "pipeline bubble": Part(wait, 0.0, 0.1 * wait)}


def _of_draft_model(drafting: list[_DeviceTime]) -> Part:
    """Return the part of a step that a draft model takes."""
    parts = [part for run in drafting for part in run.parts.values()]
    return Part(sum(p.seconds for p in parts), sum(p.ideal for p in parts), math.hypot(*(p.spread for p in parts)))


def _bounds(ops: list[Operation], work: Workload, chip: Chip, stack: Stack, sent: float) -> _Bounds:
    share = 1 / chip.devices_per_chip  # of the chip's rates, for one device
    bandwidth, peaks = share * chip.memory_bytes_per_s, {}
    compute = least = together = 0.0
    for op, flops in by_kernel(ops):
        dtype = product_dtype(op, work, chip, stack) if op.product else work.dtype
        if dtype not in peaks:
            peaks[dtype] = share * chip.peak(dtype)
        ideal, fused = flops / peaks[dtype], least_moved(op, work, stack) / bandwidth
        compute += op.times * ideal
        least += op.times * fused
        together += op.times * max(ideal, fused)
    return _Bounds(compute, least, together, sent)


def _host_seconds(work: Workload, rates: SustainedRates, stack: Stack, kernels: int, busy: float) -> float:
    """Return the seconds that devices wait for the host, which starts programs or operations while devices are `busy`
    and, in inference, schedules each step of the engine, or several of one program, between two."""
    starts = kernels * rates.eager_s if stack.launch == "eager" else dispatches(work) * rates.step_s
    between = 0.0 if work.kind == "train" else engine_turns(work) * rates.token_s
    return max(0.0, starts - busy) + between


def _summed(bounds: _Bounds, parts: dict[str, Part], hidden: float) -> StepTime:
    lower = max(bounds.together, bounds.collectives)
    if (missing := lower - sum(part.seconds for part in parts.values())) > 0:
        parts = {**parts, "least time": Part(missing, 0.0, 0.0)}  # of collectives that would be hidden
    expected = sum(part.seconds for part in parts.values())
    # Rates of different parts are wrong independently of each other; computation behind which collectives run may be
    # slowed down by them.
    spread = math.sqrt(sum(part.spread**2 for part in parts.values()))
    least = max(lower, (1 - _FASTER) * expected - spread)
    most = (1 + _SLOWER) * expected + spread + _CONTENTION * hidden
    bound = bounds.compute, bounds.memory, bounds.collectives
    return StepTime(*bound, lower, least, expected, most, parts, hidden=hidden)


def pipelined(work: Workload, target: Target, stack: Stack) -> StepTime:
    """Return the time of a step whose layers are cut into the stages of `stack.pipeline`.

    Microbatches pass the stage that takes the longest; all stages wait for the bubble (`Pipeline.bubble`), and for the
    activations that the first microbatch brings to each stage and the last takes back. If the stages do not divide the
    layers, the first and the last have a layer fewer, in place of which they have the tables. Bounds are the means of
    all stages.
    """
    pipeline, model = stack.pipeline, work.model
    if model.num_layers < pipeline.stages or any(block != model.layers[0] for block in model.layers):
        raise InputError(f"a pipeline of {pipeline.stages} stages needs as many layers, all of one kind")
    within = stack.model_copy(update={"pipeline": Pipeline()})
    of_stage = target.part(pipeline.stages)

    def of_layers(layers: int) -> StepTime:
        return step_time(replace(work, model=model.model_copy(update={"num_layers": layers})), of_stage, within)

    most = -(-model.num_layers // pipeline.stages)
    # Two and three layers: a loop over a single one copies less.
    stage, two, three = of_layers(most), of_layers(2), of_layers(3)

    def mean(name: str) -> float:  # over all stages, of a time that grows by as much with each layer
        of_two, of_three = getattr(two, name), getattr(three, name)
        return (of_two + (model.num_layers - 2) * (of_three - of_two)) / pipeline.stages

    if model.num_layers % pipeline.stages:
        none = Part()
        inner = {
            name: part + two.parts.get(name, none).times(-3) + three.parts.get(name, none).times(2)
            for name, part in stage.parts.items()
        }
        outer = of_layers(max(1, most - 1))
        if sum(each.seconds for each in inner.values()) > outer.expected:
            stage = replace(stage, parts=inner)
        else:
            stage = outer
    parts = dict(stage.parts)
    computed = sum(each.seconds for name, each in parts.items() if name != "optimizer")
    wait = pipeline.bubble(work.microbatches) * computed
    parts["pipeline bubble"] = Part(wait, 0.0, 0.1 * wait)
    network, rates = Network(target, {"stage": pipeline.stages, **work.layout}), sustained(target.chip)
    activations = work.itemsize * math.prod(local_shapes.local_shape(work, RESIDUAL, (1, work.sequence, model.d_model)))
    once = sustained_time(network, rates, stack, "collective-permute", activations, ("stage",))
    parts["exposed sends between stages"] = once.times(2 * (pipeline.stages - 1) * pipeline.chunks)
    bounds = _Bounds(*map(mean, ("compute", "memory", "lower_bound", "collectives")))
    return _summed(bounds, parts, stage.hidden)
