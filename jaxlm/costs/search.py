"""Search for the best mesh, microbatches and rematerialisation that fit."""

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxlm.config.mesh_layout import divided_by_mesh, may_serve
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.cache import state_bytes_per_sequence
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import resolved
from jaxlm.costs.plan import HEADROOM, Plan, plan
from jaxlm.costs.plan_order import FASTEST, TIE, PlanOrder, divides_layers_over_network
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.stack_memory import least_memory, stack_memory
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload
from jaxlm.parallel import layout_choice
from jaxlm.parallel.layout import Layout, can_cross

# The settings that a search varies, by their keys.
VARIED = {
    "microbatches": "training.microbatches",
    "remat": "execution.remat",
    "rounds": "execution.pipeline_rounds",
    "gather": "execution.pipeline_gather",
}

# Parts of the time of a step.
_BUBBLE, _GATHERING = "pipeline bubble", "exposed all-gather"

# Meshes with stages or with shared sequences are searched around so many of the best.
_FRONTIER = 2
# So many plans are found whatever their order; of slower ones some are left out.
BEST = 10


def layouts(work: Workload, devices: int, slices: int = 1) -> Iterator[Layout]:
    """Yield the layouts of a number of devices without stages and shared sequences that `_may_run`."""
    return filter(functools.partial(_may_run, work, slices), _flat(work, devices))


def _flat(work: Workload, devices: int) -> Iterator[Layout]:
    """Yield the layouts of a number of devices without stages and shared sequences."""
    deep = {axis for name in ("layers", "sequence") for axis in work.rules.over(name)}
    return layout_choice.layouts(devices, work.rules.without_mesh_axes(deep), _axes(work))


def _axes(work: Workload) -> frozenset[str]:
    """Return the logical axes of all parameters."""
    return frozenset(axis for d in work.parameters.values() for axis in d.axes)


def _may_run(work: Workload, slices: int, layout: Layout) -> bool:
    """Return whether a layout divides what inference needs, and in training the model, the batch and the sequence, and
    may lie on several slices (`can_cross`)."""
    if not can_cross(layout, slices) or (work.local_sgd and layout.over(work.rules.replicas) == 1):
        return False
    if work.kind != "train":
        # Rows that decode are not shared out, and states are read in order. More shards of the batch send less, while
        # it has sequences for them.
        shares, shards = layout.over(work.rules.over("tiles")) > 1, layout.over(work.rules.over("batch"))
        if shares and (work.kind == "decode" or state_bytes_per_sequence(work) or 2 * shards <= work.batch):
            return False
        return all(may_serve(layout, model) for model in work.models)
    parts = layout.over(work.rules.over("sequence"))
    if work.batch % layout.over(work.rules.over("batch")) or (parts > 1 and work.sequence % (2 * parts)):
        return False
    return layout_choice.divides(layout, work.rules, divided_by_mesh(work.model))


class _Looked(NamedTuple):
    """The plans on a layout, and what layouts are ordered by: where there are plans the value of the best, otherwise
    how many times too many shards of the batch there are, and the bytes of what is `needed` at least."""

    plans: list[Plan]
    rank: tuple[float, float]
    needed: Memory | None = None


_NOTHING = _Looked([], (math.inf, math.inf))


def search(
    work: Workload,
    target: Target,
    fixed: Collection[str] = (),
    order: PlanOrder = FASTEST,
    stack: Stack = JAXLM,
    staged: bool = True,
) -> list[Plan]:
    """Return plans of a workload that leave `HEADROOM`, the best first; the `BEST` of them, and others. Where none
    leaves it, return those that fit at all.

    On each mesh there are the plans of its `_worthwhile` variants. All meshes without stages and shared sequences are
    looked at, as far as they may be among the best. In training the search goes on from the best, step by step: a prime
    factor of one axis moves to another, until all neighbours of the best meshes were looked at.

    Args:
      staged: whether a run can have stages.
    """
    capacity = target.chip.device_capacity()
    for limit in ((1 - HEADROOM) * capacity, capacity):
        looked = _Search(work, target, fixed, order, stack, staged, limit).looked()
        if plans := [plan for each in looked for plan in each.plans]:
            return order.ordered(plans)
    return []


def best_on(layout: Layout, work: Workload, target: Target) -> Plan | None:
    """Return the fastest plan of a workload on one layout that leaves `HEADROOM`; None where there is none."""
    limit = (1 - HEADROOM) * target.chip.device_capacity()
    (looked,) = _Search(work, target, (), FASTEST, JAXLM, True, limit).look_at([layout]).values() or (_NOTHING,)
    return min(looked.plans, key=FASTEST.value, default=None)


@dataclass(frozen=True)
class _Search:
    """A search for plans that need no more than `limit` bytes on a device; the other fields are those of `search`."""

    work: Workload
    target: Target
    fixed: Collection[str]
    order: PlanOrder
    stack: Stack
    staged: bool
    limit: float
    found: list[float] = field(default_factory=list)  # the values of plans, the best first

    def looked(self) -> Collection[_Looked]:
        """Return what there is on each of the layouts that were looked at."""
        stages = self.stack.pipeline.stages
        flat = list(_flat(self.work, self.target.part(stages).devices))
        looked = self.look_at(flat)
        axes = layout_choice.distinct_axes(self.work.rules, _axes(self.work))
        while self.work.kind == "train" and stages == 1:
            best = sorted(looked, key=lambda layout: looked[layout].rank)[:_FRONTIER]
            near = dict.fromkeys(other for layout in best for other in layout_choice.neighbours(layout, axes))
            if not (new := [layout for layout in near if layout not in looked]):
                break
            looked |= dict.fromkeys(new, _NOTHING) | self.look_at(new)
        return looked.values()

    def look_at(self, layouts: Iterable[Layout]) -> dict[Layout, _Looked]:
        """Look at layouts, those first that may be best, and the less at others the more is found."""
        looked: dict[Layout, _Looked] = {}
        left: list[tuple[float, Layout, list[list[Workload]]]] = []
        for layout in layouts:
            # Some models have no stages, or pass on states along a sequence.
            with contextlib.suppress(InputError):
                if isinstance(first := self._settings(layout), _Looked):
                    looked[layout] = first
                else:
                    left.append((self._least_value(first), layout, first))
        for least, layout, by_remat in sorted(left, key=lambda each: each[0]):
            looked[layout] = self._look(by_remat) if self._may_be_among_best(least) else _NOTHING
        return looked

    def _may_be_among_best(self, least: float) -> bool:
        """Return whether a plan of at least this value may be among the `BEST`, where ties go to the simplest."""
        return len(self.found) < BEST or least <= self.found[BEST - 1] * (1 + TIE)

    def _settings(self, layout: Layout) -> _Looked | list[list[Workload]]:
        """Return the variants of a layout by rematerialisation; what it needs or lacks where it has no plans."""
        work = replace(self.work.on(self.target.chip), layout=layout)
        if "rounds" not in self.fixed:
            work = work.with_execution(pipeline_rounds=1)
        if "gather" not in self.fixed:
            work = work.with_execution(pipeline_gather="tick")
        if not _may_run(work, self.target.slices, layout):
            return _NOTHING._replace(rank=(max(1.0, work.batch_shards / work.batch), math.inf))
        if work.stages > 1 and not self.staged:
            return _NOTHING
        if work.kind == "train" and (state := least_memory(work, self.stack)).total > self.limit:
            return _Looked([], (1.0, state.total), state)
        varied = itertools.groupby(variants(work, self.fixed), lambda each: each.remat)
        return [list(same) for _, same in varied] or _NOTHING

    def _least_value(self, by_remat: list[list[Workload]]) -> float:
        """Return the value that no plan on a mesh is below: that of the first variant, whatever memory it needs. With
        stages the bubble gets shorter with more microbatches."""
        first = by_remat[0][0]
        if first.kind != "train" or first.stages > 1:
            return 0.0
        first = resolved(first, None, self.stack)
        time, least = step_time(first, self.target, self.stack), least_memory(first, self.stack)
        return self.order.value(Plan(first, self.target, flops(first), least, time, None, self.stack))

    def _look(self, by_remat: list[list[Workload]]) -> _Looked:
        # The last rematerialisation keeps least.
        needed = min((self._memory(by_remat[-1][i]) for i in (0, -1)), key=lambda memory: memory.total)
        if needed.total > self.limit:
            return _Looked([], (1.0, needed.total), needed)
        plans = list(self._worthwhile(by_remat))
        for each in plans:
            # The order sets others back, by as much as depends on all.
            if not divides_layers_over_network(each):
                bisect.insort(self.found, self.order.value(each))
        return _Looked(plans, (0.0, min(map(self.order.value, plans))), needed)

    def _worthwhile(self, by_remat: list[list[Workload]]) -> Iterator[Plan]:
        """Yield the plans of the variants on a mesh that no other outdoes: of each rematerialisation that with the
        fewest microbatches that fit and, where its layers are in a loop, that with the fewest for which they are not.
        In a pipeline more microbatches shorten the bubble, as long as they do, and so do more rounds; all of it once
        more with matrices that are gathered once a step, where these plans could then be among the best.
        """
        yield from (plans := list(self._of_each_remat(by_remat)))
        if not plans or plans[0].work.stages == 1 or "gather" in self.fixed:
            return
        least = min(self._value_without(plan, _BUBBLE, _GATHERING) for plan in plans)
        once = [[each.with_execution(pipeline_gather="step") for each in counts] for counts in by_remat]
        step = device_step(once[0][0])
        if self._may_be_among_best(least) and any(map(step.is_gathered_before, step.recording.uses)):
            yield from self._of_each_remat(once)

    def _of_each_remat(self, by_remat: list[list[Workload]]) -> Iterator[Plan]:
        """Yield the worthwhile plans of one way to gather matrices."""
        fewest = None
        for counts in by_remat:
            # What computes more again is worth it in fewer microbatches alone.
            fewer = [each for each in counts if fewest is None or each.microbatches < fewest]
            if not (fitting := _from_the_first(fewer, self._fits)):
                continue
            fitting = [*fitting, *counts[len(fewer) :]]
            fewest = fitting[0].microbatches
            if fitting[0].stages == 1:
                yield self._plan(fitting[0])
                if self._in_loop(fitting[0]):
                    yield from map(self._plan, _from_the_first(fitting, lambda each: not self._in_loop(each))[:1])
            else:
                plans = list(self._while_faster(fitting))
                yield from plans
                yield from self._with_rounds(plans, fitting)

    def _with_rounds(self, plans: list[Plan], counts: Sequence[Workload]) -> Iterator[Plan]:
        """Yield the plans with more and more chunks of layers on each stage, as long as they fit and are faster than
        the last of `plans`, where these could be among the best without any bubble. With a shorter bubble fewer
        microbatches may be faster: of the `counts` each number of chunks is tried with fewer and fewer."""
        best, divided = plans[-1], [each for each in counts if each.microbatches % each.stages == 0]
        if "rounds" in self.fixed or not divided:
            return
        if not self._may_be_among_best(min(self._value_without(plan, _BUBBLE) for plan in plans)):
            return
        for n in range(1, (best.work.model.num_layers // best.work.stages).bit_length()):
            fewer = [each for each in reversed(divided) if each.microbatches <= best.work.microbatches] or divided[:1]
            in_rounds = (each.with_execution(pipeline_rounds=2**n) for each in fewer)
            found = self._while_faster(itertools.takewhile(self._fits, in_rounds))
            faster = [each for each in found if self.order.value(each) < self.order.value(best)]
            if not faster:
                return
            yield from faster
            best = faster[-1]

    def _value_without(self, plan: Plan, *parts: str) -> float:
        """Return the value that a plan would have if these parts of its time, by the beginnings of their names, took
        none."""
        left = sum(part.seconds for name, part in plan.time.parts.items() if not name.startswith(parts))
        return self.order.value(plan) * left / plan.time.expected

    def _while_faster(self, variants: Iterable[Workload]) -> Iterator[Plan]:
        """Yield the plans of variants as long as each is faster than the one before it."""
        last = math.inf
        for each in variants:
            planned = self._plan(each)
            if self.order.value(planned) >= last:
                break
            last = self.order.value(planned)
            yield planned

    def _plan(self, work: Workload) -> Plan:
        return plan(work, self.target, self.stack)

    def _resolved(self, work: Workload) -> Workload:
        return resolved(work, self.target.chip.device_capacity(), self.stack)

    def _in_loop(self, work: Workload) -> bool:
        return self._resolved(work).execution.in_loop

    def _memory(self, work: Workload) -> Memory:
        return stack_memory(self._resolved(work), self.stack)

    def _fits(self, work: Workload) -> bool:
        return self._memory(work).total <= self.limit


def _from_the_first(counts: Sequence[Workload], holds: Callable[[Workload], bool]) -> Sequence[Workload]:
    """Return a workload in more and more microbatches from the first for which something holds that holds for all
    further ones too, but that may hold for one microbatch alone, which has no sums of gradients."""
    if not counts or holds(counts[0]):
        return counts
    if not holds(counts[-1]):
        return []
    return counts[bisect.bisect_left(counts, True, lo=1, key=holds) :]


def smallest(
    work: Workload,
    target: Target,
    fixed: Collection[str] = (),
    stack: Stack = JAXLM,
    staged: bool = True,
) -> Memory | None:
    """Return the memory of the smallest step that a `search` in vain looks at; None where no mesh divides the workload.
    Where parameters, gradients and optimizer state alone are too much for a device, it is that of these."""
    capacity = target.chip.device_capacity()
    looked = _Search(work, target, fixed, FASTEST, stack, staged, capacity).looked()
    sizes = [each.needed for each in looked if each.needed is not None]
    # Of a mesh on which these alone are too much nothing else was counted, so that its size compares with no other's.
    return min(sizes, key=lambda size: (size.state > capacity, size.total), default=None)


def variants(work: Workload, fixed: Collection[str] = ()) -> Iterator[Workload]:
    """Yield a workload with other `microbatches` and `remat` on its mesh; settings named in `fixed` do not vary.

    `remat` keeps everything, all named activations, those alone that others are made of, nothing, and the activations
    that the workload itself lists.
    """
    if work.kind != "train":
        yield work
        return
    named = dict.fromkeys(device_step(work).recording.names.values())
    names = tuple(name for name in named if name != "attention")  # its kernel keeps more than its result
    sources = tuple(name for name in names if name in work.model.activation_sources)
    rows = work.batch // work.batch_shards
    parts = (work.microbatches,) if "microbatches" in fixed else [2**n for n in range(rows.bit_length())]
    own = [work.remat] if "remat" in fixed or isinstance(work.remat, tuple) else []
    remats = own if "remat" in fixed else dict.fromkeys(["none", names, *[sources] * bool(sources), *own, "full"])
    for remat in remats:
        for microbatches in parts:
            if rows % microbatches == 0 and (work.rounds == 1 or microbatches % work.stages == 0):
                yield replace(work.with_execution(remat=remat), microbatches=microbatches)
