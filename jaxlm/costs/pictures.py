"""Pictures of a plan: operations under the roofline of a chip, a waterfall from the published peak to the expected
time, and memory against its capacity.

A roofline (Williams et al. 2009, doi:10.1145/1498765.1498785) is the maximum FLOP/s of a chip for work of a given
intensity, FLOPs per byte of memory traffic: its bandwidth times the intensity, up to its peak.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.core.units import GIB, gib
from jaxlm.costs import layer_loops
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.counted.operations import Operation
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.plan import Plan
from jaxlm.costs.stack import JAXLM
from jaxlm.costs.timing.computation import by_kernel, product_dtype
from jaxlm.costs.timing.step_time import StepTime
from jaxlm.costs.workload import Workload

_INK, _PALE = "#22313f", "#9aa5b1"
_PARTS = dict(
    zip(Memory._fields, ("#4c78a8", "#72b7b2", "#54a24b", "#f2a541", "#e4572e", "#9d6ac6", "#8c8c8c"), strict=True)
)
_WATERFALL = "#4c78a8", "#f2a541", "#54a24b"  # at the peak, its reasons, and what is expected
_LEAST_REASON = 0.01  # the least share of the expected time of a reason with a bar of its own
_NAMED = 10  # the maximum of labelled operations
_LEAST_SHARE = 0.005  # the least share of a step's time of a labelled operation


class Point(NamedTuple):
    """All operations of one scope of a step, in every phase. `seconds`: on one chip, with each operation at the longer
    of its compute and its least traffic. `share`: of the step's seconds. `peak`: of the dtype of its products."""

    scope: str
    flops: int
    bytes: int
    seconds: float
    share: float
    peak: float
    bandwidth: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """FLOP/s under the roofline."""
        return min(self.peak, self.bandwidth * self.intensity)

    @property
    def bound_by(self) -> str:
        return "compute" if self.peak < self.bandwidth * self.intensity else "memory"


def points(work: Workload, chip: Chip) -> list[Point]:
    """Return the scopes of a step on a chip, the longest first. Figures are those of one device with all of the chip's
    rates."""
    work = layer_loops.resolved(work.on(chip).without_drafts(), chip.device_capacity())
    scopes: dict[str, list[tuple[Operation, float]]] = {}
    for op, flops in by_kernel(operations.step(work)):
        in_kernel = op.kernel and op.product
        name = f"{op.scope.rpartition('/')[0]}/kernel" if in_kernel else op.scope
        scopes.setdefault(name, []).append((op, flops))
    bandwidth, scope_points = chip.memory_bytes_per_s, []
    for scope, ops in scopes.items():
        peak = chip.peak(product_dtype(ops[0][0], work, chip, JAXLM))
        seconds = sum(op.times * max(flops / peak, op.least_bytes / bandwidth) for op, flops in ops)
        flops = sum(op.times * each for op, each in ops)
        moved = sum(op.times * op.least_bytes for op, _ in ops)
        scope_points.append(Point(scope, flops, moved, seconds, 0.0, peak, bandwidth))
    whole = sum(point.seconds for point in scope_points)
    shared = (point._replace(share=point.seconds / whole) for point in scope_points)
    return sorted(shared, key=lambda point: -point.seconds)


def draw(plan: Plan, path: Path) -> None:
    """Draw the roofline of the target's chip with the operations of the step, the waterfall of its time, and the memory
    of one device into a file whose suffix gives its format. Raises InputError if it cannot be written."""
    figure = Figure(figsize=(10, 9.6), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InputError(f"{path} has no ending of a picture; the endings are {', '.join(sorted(known))}")
    above, middle, below = figure.subplots(3, 1, height_ratios=(6, 3, 1))
    work = plan.work
    what = f"{work.kind}, {work.batch:,} × {work.sequence:,} tokens in {work.dtype} on {plan.target}, {work.layout}"
    figure.suptitle(what, color=_INK, fontsize=11)
    operations_on_roof(above, work, plan.target.chip)
    waterfall(middle, plan.time)
    memory_bars(below, {"one device": plan})
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    except RuntimeError as error:  # the format needs a program that is not installed
        raise InputError(f"{path} cannot be drawn: {error}") from None


def rooflines(axes: Axes, chips: Sequence[Chip], dtype: str = "bfloat16", intensities: Iterable[float] = ()) -> None:
    """Draw the rooflines of chips, each with its ridge point; the axis covers these intensities."""
    ridges = [chip.intensity(dtype) for chip in chips]
    seen = [*ridges, *(i for i in intensities if i > 0)]
    low, high = min(0.5, min(seen) / 2), max(seen) * 5
    bottom = min(chip.memory_bytes_per_s for chip in chips) * low
    for chip, ridge in zip(chips, ridges, strict=True):
        peak, color = chip.peak(dtype), _INK if len(chips) == 1 else None
        xs = (low, ridge, high)
        (line,) = axes.plot(xs, (chip.memory_bytes_per_s * low, peak, peak), color=color, lw=1.6, label=chip.id)
        axes.plot(ridge, peak, "|", color=line.get_color(), ms=11, mew=1.6)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, 2 * max(chip.peak(dtype) for chip in chips)))
    axes.set(xlabel="intensity (FLOP per byte of memory traffic)", ylabel=f"FLOP/s of a chip in {dtype}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if len(chips) > 1:
        axes.legend(frameon=False, loc="upper left", fontsize=9)


def operations_on_roof(axes: Axes, work: Workload, chip: Chip) -> None:
    """Draw the operations of a step under the roofline of a chip; the area grows with the time. The longest are
    labelled on the right, operations without products last."""
    scope_points = points(work, chip)
    products = [point for point in scope_points if point.flops]
    rooflines(axes, [chip], work.dtype, (point.intensity for point in products))
    ridge, peak, bandwidth = chip.intensity(work.dtype), chip.peak(work.dtype), chip.memory_bytes_per_s
    low = min(point.flops_per_s for point in products)
    axes.set_ylim(bottom=min(axes.get_ylim()[0], low * (low / peak) / 100))  # room for labels below the lowest
    axes.axvline(ridge, color=_PALE, lw=0.8, ls=":", zorder=0)
    said = f"{chip.id}: {peak / 1e12:,.4g} TFLOP/s, {bandwidth / 1e12:.3g} TB/s, ridge at {ridge:,.0f} FLOP per byte"
    axes.set_title(said, loc="left", fontsize=10, color=_INK)
    for bound, color in (("compute", "#4c78a8"), ("memory", "#e4572e")):
        mine = [point for point in products if point.bound_by == bound]
        xs, ys = [point.intensity for point in mine], [point.flops_per_s for point in mine]
        axes.scatter(xs, ys, [20 + 900 * point.share for point in mine], color, alpha=0.6, lw=0, zorder=3)
        axes.scatter([], [], 60, color, alpha=0.6, lw=0, label=f"bound by {bound}")
    axes.legend(handles=axes.collections[1::2], frameon=False, loc="upper left", fontsize=9)
    _name(axes, [point for point in scope_points if point.share >= _LEAST_SHARE][:_NAMED])


def _name(axes: Axes, named: Sequence[Point]) -> None:
    """Draw the labels in a column right of the axes, the highest operation on top, each no higher than its operation:
    labels do not overlap and their lines do not cross."""
    low, high = axes.get_ylim()
    say = {"textcoords": "axes fraction", "va": "center", "fontsize": 9, "color": _INK, "annotation_clip": False}
    line = {"arrowstyle": "-", "color": _PALE, "lw": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
    axes.annotate("share of the least time", (0, 0), (1.03, 1.0), **say | {"color": _PALE})
    at = 1.0
    for point in sorted(named, key=lambda point: (point.flops_per_s, point.intensity), reverse=True):
        text = f"{_short(point.scope)}  {point.share:.1%}"
        if point.flops:
            at = min(at - 0.062, math.log(point.flops_per_s / low) / math.log(high / low))
            axes.annotate(text, (point.intensity, point.flops_per_s), (1.03, at), arrowprops=line, **say)
        else:
            at -= 0.062
            axes.annotate(f"{text}, no products", (0, 0), (1.03, at), **say)


def _short(scope: str) -> str:
    return scope.split("/", 1)[-1]


def waterfall(axes: Axes, time: StepTime) -> None:
    """Draw the time of a step from that at published peaks to the expected one, reason by reason, the largest first;
    a line across the last bar is the bracket."""
    reasons = [reason for reason in time.reasons if abs(reason.share) >= _LEAST_REASON]
    others = sum(reason.seconds for reason in time.reasons) - sum(reason.seconds for reason in reasons)
    steps = [("at published peaks", time.ideal), *((reason.name, reason.seconds) for reason in reasons)]
    if others > 0:
        steps.append(("others", others))
    at = 0.0
    for row, (_, seconds) in enumerate(steps):
        axes.barh(row, seconds, left=at, height=0.7, color=_WATERFALL[row > 0])
        at += seconds
        axes.annotate(f" {units.seconds(seconds)}  {seconds / time.expected:.0%}", (at, row), va="center", fontsize=9)
    last = len(steps)
    axes.barh(last, time.expected, height=0.7, color=_WATERFALL[2])
    axes.plot([time.low, time.upper_bound], [last, last], color=_INK, lw=2, marker="|", ms=9)
    bracket = f"{units.seconds(time.low)} to {units.seconds(time.upper_bound)}"
    said = f"  {units.seconds(time.expected)}, within {bracket}"
    axes.annotate(said, (time.upper_bound, last), va="center", fontsize=9)
    axes.set_yticks(range(last + 1), [*(name for name, _ in steps), "expected"], fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step", xlim=(0, 1.35 * time.upper_bound))
    axes.spines[["top", "right"]].set_visible(False)


def memory_bars(axes: Axes, plans: dict[str, Plan]) -> None:
    """Draw the memory of one device as a bar for each named plan; a line marks the capacity."""
    widest = max(max(plan.memory.total, plan.capacity) for plan in plans.values()) / GIB
    for row, plan in enumerate(plans.values()):
        left = 0.0
        for part, size in plan.memory._asdict().items():
            axes.barh(row, size / GIB, left=left, height=0.6, color=_PARTS[part])
            left += size / GIB
        capacity = plan.capacity / GIB
        axes.plot([capacity, capacity], [row - 0.42, row + 0.42], color=_INK, lw=2)
        over = left - capacity
        verdict = "fits" if plan.fits else f"{over:.2f} GiB too much"
        axes.annotate(
            f"{left:.2f} of {capacity:.2f} GiB: {verdict}",
            (max(left, capacity) + widest / 100, row),
            va="center",
            fontsize=9,
            color=_INK if plan.fits else "#b3261e",
        )
    axes.set_yticks(range(len(plans)), list(plans))
    axes.invert_yaxis()
    axes.set(xlabel="GiB of memory", xlim=(0, 1.35 * widest))
    axes.spines[["top", "right"]].set_visible(False)
    _say_parts(axes, list(plans.values()))


def _say_parts(axes: Axes, plans: list[Plan]) -> None:
    """Draw a legend above the bars, with sizes if there is only one bar."""
    from matplotlib.patches import Patch

    parts = {part: [getattr(plan.memory, part) for plan in plans] for part in Memory._fields}
    handles = [
        Patch(color=_PARTS[part], label=part.replace("_", " ") + (f" {gib(sizes[0])}" if len(sizes) == 1 else ""))
        for part, sizes in parts.items()
        if any(sizes)
    ]
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": len(handles)}
    axes.legend(handles=handles, frameon=False, fontsize=9, columnspacing=1.2, handlelength=1.0, **place)
