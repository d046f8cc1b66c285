"""Search for the best mesh, microbatches and rematerialisation that fit."""

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxlm.config import divided_by_mesh, may_serve
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import resolved
from jaxlm.costs.plan import HEADROOM, Plan, plan
from jaxlm.costs.plan_order import FASTEST, PlanOrder
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.stack_memory import least_memory, stack_memory
from jaxlm.costs.workload import Workload
from jaxlm.parallel import layout_choice
from jaxlm.parallel.layout import Layout, can_cross

# The settings that a search varies, by their keys.
VARIED = {"microbatches": "training.microbatches", "remat": "execution.remat"}


# Meshes with stages or with shared sequences are searched around so many of the best.
_FRONTIER = 2


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
    """Return plans of a workload that leave `HEADROOM`, the best first. Where none leaves it, return those that fit at
    all.

    On each mesh there are the plans of its `_worthwhile` variants. All meshes without stages and shared sequences are
    looked at. In training the search goes on from the best, step by step: a prime factor of one axis moves to another,
    until all neighbours of the best meshes were looked at.

    Args:
      staged: whether a run can have stages.
    """
    capacity = target.chip.device_capacity()
    for limit in ((1 - HEADROOM) * capacity, capacity):
        looked = _Search(work, target, fixed, order, stack, staged, limit).looked()
        if plans := [plan for each in looked for plan in each.plans]:
            return order.ordered(plans)
    return []


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

    def looked(self) -> Collection[_Looked]:
        """Return what there is on each of the layouts that were looked at."""
        stages = self.stack.pipeline.stages
        flat = list(_flat(self.work, self.target.part(stages).devices))
        looked = {layout: self._look(layout) for layout in flat}
        axes = layout_choice.distinct_axes(self.work.rules, _axes(self.work))
        while self.work.kind == "train" and stages == 1:
            best = sorted(looked, key=lambda layout: looked[layout].rank)[:_FRONTIER]
            near = dict.fromkeys(other for layout in best for other in layout_choice.neighbours(layout, axes))
            if not (new := [layout for layout in near if layout not in looked]):
                break
            for layout in new:
                looked[layout] = _NOTHING
                if self.staged or layout.over(self.work.rules.over("layers")) == 1:
                    # Some models have no stages, or pass on states along a sequence.
                    with contextlib.suppress(InputError):
                        looked[layout] = self._look(layout)
        return looked.values()

    def _look(self, layout: Layout) -> _Looked:
        work = replace(self.work.on(self.target.chip), layout=layout)
        if not _may_run(work, self.target.slices, layout):
            return _NOTHING._replace(rank=(max(1.0, work.batch_shards / work.batch), math.inf))
        if work.kind == "train" and (state := least_memory(work, self.stack)).total > self.limit:
            return _Looked([], (1.0, state.total), state)
        by_remat = [list(same) for _, same in itertools.groupby(variants(work, self.fixed), lambda each: each.remat)]
        if not by_remat:
            return _NOTHING
        # The last rematerialisation keeps least.
        needed = min((self._memory(by_remat[-1][i]) for i in (0, -1)), key=lambda memory: memory.total)
        if needed.total > self.limit:
            return _Looked([], (1.0, needed.total), needed)
        plans = list(self._worthwhile(by_remat))
        return _Looked(plans, (0.0, min(map(self.order.value, plans))), needed)

    def _worthwhile(self, by_remat: list[list[Workload]]) -> Iterator[Plan]:
        """Yield the plans of the variants on a mesh that no other outdoes: of each rematerialisation that with the
        fewest microbatches that fit and, where its layers are in a loop, that with the fewest for which they are not.
        In a pipeline more microbatches shorten the bubble, as long as they do.
        """
        fewest = None
        for counts in by_remat:
            fitting = _from_the_first(counts, self._fits)
            if not fitting:
                continue
            if fewest is not None and fitting[0].microbatches >= fewest:
                continue  # computes more again, in as many microbatches
            fewest = fitting[0].microbatches
            if fitting[0].stages == 1:
                yield self._plan(fitting[0])
                if self._in_loop(fitting[0]):
                    yield from map(self._plan, _from_the_first(fitting, lambda each: not self._in_loop(each))[:1])
            else:
                yield from self._while_faster(fitting)

    def _while_faster(self, counts: Sequence[Workload]) -> Iterator[Plan]:
        last = math.inf
        for each in counts:
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
    if holds(counts[0]):
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
    looked = _Search(work, target, fixed, FASTEST, stack, staged, target.chip.device_capacity()).looked()
    sizes = [each.needed for each in looked if each.needed is not None]
    return min(sizes, key=lambda size: size.total, default=None)


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
