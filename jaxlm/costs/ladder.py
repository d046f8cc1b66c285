"""The ladder of a run: what was estimated on a napkin, what was counted, what was measured, and the gaps explained."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

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
from jaxlm.costs.plan import StepTime, mfu, step_time
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
        line += f", {units.seconds(counted.time.lower_bound)} to {units.seconds(counted.time.upper_bound)} a step"
    if counted.capacity is not None and counted.memory.total > counted.capacity:
        line += (
            f"; a device has {units.memory(counted.capacity)}, and may run out of it: lower training.batch, or raise "
            "training.microbatches"
        )
    return line


def say_replicated(*works: Workload) -> str | None:
    """Return a line that says that several devices compute and keep the same key/value heads, or None if none do: in
    one step, or in one on each of several meshes."""
    replicated = [(work, heads) for work in works if (heads := replicated_kv_heads(work))]
    if not replicated:
        return None
    axes = works[0].rules.over("act_heads")
    shards = sorted({work.layout.over(axes) for work, _ in replicated})
    heads = sorted({number for _, numbers in replicated for number in numbers})
    does = "does" if len(shards) == 1 else "do"
    return (
        f"{describe_axes(axes)} = {' or '.join(map(str, shards))} {does} not divide {' or '.join(map(str, heads))} "
        "key/value heads: several devices compute and keep the same ones"
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
            "step_s": time and [time.lower_bound, time.upper_bound],
            "memory_bytes": before.memory.total,
        },
        "measured": {
            "flops": None,
            "step_s": step_s,
            "memory_bytes": settled[-1].get("peak_memory_bytes"),
            "mfu": before.mfu(step_s),
            "other_load": other_load if before.target and before.target.chip.kind == "cpu" else None,
        },
        "inside": time and time.lower_bound <= step_s <= time.upper_bound,
        "gap": gap(before, settled, step_s),
    }


def gap(before: Counted, metrics: Sequence[dict[str, Any]], step_s: float) -> dict[str, float]:
    """Return the seconds between the napkin's step and the measured step, by cause.

    `attention`, `rematerialisation` and `optimizer`: the seconds of their products at the peak, as the lower bound
    counts these products. `memory_and_collectives`: the seconds of the lower bound beyond those of products. The
    measured seconds between lower and upper bound are divided in proportion to what the upper bound counts:
    `products_below_peak`, the time of products below the peak, and `not_overlapped`, the time of passes between
    products, of collectives and of the step's dispatch if nothing overlaps. `data_wait`: the measured wait for data.
    `not_counted`: the rest.
    """
    first = before.napkin
    if first.step_s is None or before.time is None:
        return {}
    per_flop = first.step_s / first.flops
    phases = dict.fromkeys(get_args(operations.Phase), 0.0)
    for op in operations.step(before.work):
        phases[op.phase] += op.times * op.least_flops * before.work.layout.size
    time = before.time
    causes = {
        "attention": (phases["forward"] + phases["backward"] - first.flops) * per_flop,
        "rematerialisation": phases["rematerialised"] * per_flop,
        "optimizer": phases["optimizer"] * per_flop,
    }
    ideal = first.step_s + sum(causes.values())
    together = max(time.lower_bound, ideal)
    waited = statistics.median(row["data_wait_s"] for row in metrics)
    computed = step_s - waited
    causes["memory_and_collectives"] = together - ideal
    beyond = max(0.0, min(computed, time.upper_bound) - together)
    below_peak = beyond * min(1.0, time.below_peak / (time.upper_bound - together)) if beyond else 0.0
    causes["products_below_peak"] = below_peak
    causes["not_overlapped"] = beyond - below_peak
    causes["data_wait"] = waited
    causes["not_counted"] = computed - together - beyond
    return causes
