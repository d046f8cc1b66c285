"""The ladder of a run: what was estimated on a napkin, what was counted, what was measured, and the gaps explained."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs import layer_loops
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.device import replicated_kv_heads
from jaxlm.costs.counted.flops import Flops, flops
from jaxlm.costs.counted.memory import Memory, memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import LayerChoice
from jaxlm.costs.napkin import Napkin, napkin
from jaxlm.costs.plan import mfu
from jaxlm.costs.timing.step_time import StepTime, step_time
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout_choice import describe_axes


@dataclass(frozen=True)
class Counted:
    """The figures of a run's step, counted before the run. `target` is None for unknown devices; `time` is None for
    unknown devices and for a chip that lacks a figure that times need. `layers`: the choice that `work` has."""

    work: Workload
    flops: Flops
    memory: Memory
    target: Target | None
    time: StepTime | None
    layers: LayerChoice

    def mfu(self, step_s: float) -> float | None:
        """Return the model FLOP utilisation of a step that takes `step_s` seconds; None if the peak is unknown."""
        try:
            return self.target and mfu(self.flops.model, step_s, self.target.chip, self.target.chips, self.work.dtype)
        except InputError:  # the chip has no published peak
            return None

    @property
    def capacity(self) -> int | None:
        """Bytes of memory of one device; None if unknown."""
        return self.target and self.target.chip.device_capacity()

    @property
    def napkin(self) -> Napkin:
        return napkin(self.work, self.target)


def counted(work: Workload, mesh: Mesh) -> Counted:
    """Count a workload on the devices of a mesh."""
    work, target = layer_loops.on_mesh(work, mesh)
    layers = layer_loops.choose(work, target and target.chip.device_capacity())
    work = work.with_execution(scan_layers=layers.in_loop)
    try:
        seconds = target and step_time(work, target)
    except InputError:  # emulated devices have no links, and some chips no published rate
        seconds = None
    return Counted(work, flops(work), memory(work), target, seconds, layers)


def say_counted(counted: Counted) -> str:
    """Return the line that is printed before the first step."""
    line = f"counted: {counted.flops.model:.3g} model FLOPs a step, {units.memory(counted.memory.total)} on each device"
    if counted.time is not None:
        time = counted.time
        line += f", {units.seconds(time.expected)} a step ({units.seconds(time.low)} to "
        line += f"{units.seconds(time.upper_bound)})"
    if counted.capacity is not None and counted.memory.total > counted.capacity:
        line += (
            f"; a device has {units.memory(counted.capacity)}, and may run out of it: lower training.batch, or raise "
            "training.microbatches"
        )
    return line


def say_replicated(*works: Workload) -> str | None:
    """Return a line that says that several devices compute and keep the same key/value heads, or groups of Mamba-2;
    None if none do: in one step, or in one on each of several meshes."""
    replicated = [(work, heads) for work in works if (heads := replicated_kv_heads(work))]
    if not replicated:
        return None
    axes = works[0].rules.over("act_heads")
    used = [axis for axis in axes if any(work.layout[axis] > 1 for work, _ in replicated)]
    shards = sorted({work.layout.over(axes) for work, _ in replicated})
    heads = sorted({number for _, numbers in replicated for number in numbers})
    does = "does" if len(shards) == 1 else "do"
    fields = {"num_kv_heads": "key/value heads", "num_groups": "groups"}  # of attention, of Mamba-2
    layers = works[0].model.layers
    names = [name for key, name in fields.items() if any(getattr(each.attention, key, 0) in heads for each in layers)]
    named = " or ".join(name.removesuffix("s") if heads == [1] else name for name in names or ["key/value heads"])
    return (
        f"{describe_axes(used)} = {' or '.join(map(str, shards))} {does} not divide {' or '.join(map(str, heads))} "
        f"{named}: several devices compute and keep the same ones"
    )


def ladder(before: Counted, metrics: Sequence[dict[str, Any]], other_load: float | None = None) -> dict[str, Any]:
    """Return the rungs of a run from its lines of metrics; the first line is left out if there are others.

    FLOPs are of a step over the whole job, seconds of a step, and bytes on one device (on CPUs: of the process).
    `other_load` is the share of this machine that other programs kept busy, which slows down steps on a CPU.
    """
    settled = metrics[1:] or metrics
    step_s = statistics.median(row["step_s"] for row in settled)
    time = before.time
    return {
        "napkin": before.napkin._asdict(),
        "counted": {
            "flops": before.flops.executed,
            "step_s": time and time.expected,
            "bracket_s": time and [time.low, time.upper_bound],
            "memory_bytes": before.memory.total,
        },
        "measured": {
            "flops": None,
            "step_s": step_s,
            "memory_bytes": settled[-1].get("peak_memory_bytes"),
            "mfu": before.mfu(step_s),
            "other_load": other_load if before.target and before.target.chip.kind == "cpu" else None,
        },
        "inside": time and time.low <= step_s <= time.upper_bound,
        "gap": gap(before, settled, step_s),
    }


def gap(before: Counted, metrics: Sequence[dict[str, Any]], step_s: float) -> dict[str, float]:
    """Return the seconds between the napkin's step and the measured step, by cause.

    `attention`: the seconds of its products at the peak, which the napkin leaves out. `memory`: of products that wait
    for what they read, at the published bandwidth. Then what the expected time counts beyond these, by name
    (`StepTime.reasons`): products below peak, passes, recomputation, the optimizer, exposed collectives, launches.
    `data_wait`: the measured wait for data. `not_counted`: the rest, negative if the step was faster than expected.
    """
    first, time = before.napkin, before.time
    if first.step_s is None or time is None:
        return {}
    per_flop = first.step_s / first.flops
    computed = (op for op in operations.step(before.work) if op.phase in ("forward", "backward"))
    model_flops = sum(op.times * op.least_flops * before.work.layout.size for op in computed)
    causes = {"attention": (model_flops - first.flops) * per_flop}
    causes["memory"] = time.ideal - model_flops * per_flop
    causes |= {reason.name.replace(" ", "_"): reason.seconds for reason in time.reasons}
    causes["data_wait"] = statistics.median(row["data_wait_s"] for row in metrics)
    causes["not_counted"] = step_s - first.step_s - sum(causes.values())
    return causes
