"""One engine of a deployment: its memory, and the load that requests are for it."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from jaxlm.config import mesh_layout
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.demand import Demand
from jaxlm.costs.engine_steps import EngineSteps, decode_steps, mixed_steps
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.memoized import memoized
from jaxlm.costs.plan import HEADROOM
from jaxlm.costs.queueing import EngineLoad, StepSeconds
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.stack_memory import stack_memory
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload
from jaxlm.inference.step_shapes import TILE
from jaxlm.parallel.layout_choice import with_shards
from jaxlm.parallel.rules import ENGINE

MOST_SLOTS = 4096


class _Loads(NamedTuple):
    """The load of one replica: at the lower bound of its steps, and at the three points of their bracket."""

    bound: EngineLoad
    low: EngineLoad
    expected: EngineLoad
    high: EngineLoad


@dataclass(frozen=True)
class Replica:
    """An engine with any number of slots, whose devices share each layer."""

    base: Workload
    target: Target
    demand: Demand
    stack: Stack = JAXLM

    @cached_property
    def answers(self) -> dict[tuple, Any]:
        """The results of memoized methods, by method and arguments: a search comes back to a number of slots."""
        return {}

    @classmethod
    def of(cls, work: Workload, target: Target, demand: Demand, stack: Stack = JAXLM) -> "Replica | None":
        """Return the engine that decodes as `work` says, on all devices of a target; None where they do not divide a
        layer."""
        layout = with_shards(ENGINE, heads=target.devices)
        if not all(mesh_layout.may_serve(layout, model) for model in work.models):
            return None
        halfway = demand.prompt + (demand.output + 1) // 2
        return cls(replace(work, layout=layout, sequence=halfway).on(target.chip), target, demand, stack)

    def with_slots(self, slots: int) -> Workload:
        """Return the decoding step of all slots."""
        return replace(self.base, batch=slots)

    @memoized
    def memory(self, slots: int) -> Memory:
        """Return the memory of a device in the largest step, with all slots at the end of their output."""
        work = replace(self.with_slots(slots), sequence=self.demand.prompt + self.demand.output)
        largest = max(self._mixed(work), key=lambda steps: steps.shape.rows)
        return stack_memory(replace(work, engine_steps=largest), self.stack)

    def holds(self, slots: int, cache_bytes: int | None) -> bool:
        """Return whether the memory of a device holds so many slots, and `cache_bytes`, where there is such a limit,
        their keys and values."""
        size = self.memory(slots)
        if cache_bytes is not None and size.kv_cache > cache_bytes:
            return False
        return size.total <= (1 - HEADROOM) * self.target.chip.device_capacity()

    def most_slots(self) -> int:
        """Return the most slots that memory holds; 0 if it holds none."""
        slots, beyond = 0, 1
        while self.holds(beyond, None) and beyond < MOST_SLOTS:
            slots, beyond = beyond, 2 * beyond
        while beyond - slots > 1:
            middle = (slots + beyond) // 2
            slots, beyond = (middle, beyond) if self.holds(middle, None) else (slots, middle)
        return slots

    @memoized
    def loads(self, slots: int) -> _Loads:
        """Return the load that the requests are for this engine."""
        work = self.with_slots(slots)
        rows = work.without_drafts()
        (full,) = decode_steps(rows.shapes, rows.sequence, rows.page, work.windows)
        steps = self._mixed(work)
        count = sum(each.times for each in steps)
        decode, empty = (self._bracket(work, each) for each in (full, _without_reads(full)))
        reading = [self._bracket(work, each) for each in steps]
        tiles = sum(each.shape.tiles * each.times for each in steps)
        work_steps = math.ceil(self.demand.prompt / TILE) / tiles * count

        def load(end: int) -> EngineLoad:
            each = max(0.0, decode[end] - empty[end]) / slots
            mixed = sum(seconds[end] for seconds in reading) / count - each * slots
            seconds = StepSeconds(empty[end], max(mixed, empty[end]), each)
            return EngineLoad(slots, seconds, count, work_steps, self.demand.output, work.tokens_per_sequence)

        return _Loads(*map(load, range(4)))

    def _bracket(self, work: Workload, steps: EngineSteps) -> tuple[float, ...]:
        """Return the seconds of all these steps: the lower bound, low, expected and high."""
        time = step_time(replace(work, engine_steps=steps), self.target, self.stack)
        return time.lower_bound, time.low, time.expected, time.upper_bound

    def _mixed(self, work: Workload) -> tuple[EngineSteps, ...]:
        rows = work.without_drafts()
        return mixed_steps(rows.shapes, self.demand.prompt, rows.sequence, rows.page, work.windows)


def _without_reads(steps: EngineSteps) -> EngineSteps:
    """Return steps whose rows are all padding."""
    sections = (
        each._replace(pages=tuple((window, 0) for window, _ in each.pages), loops=None) for each in steps.sections
    )
    return steps._replace(sections=tuple(sections))
