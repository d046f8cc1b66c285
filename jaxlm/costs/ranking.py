"""An experiment's step planned on one target, on the meshes that fit, or on every chip of the catalog."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from jaxlm.config.experiment import Experiment
from jaxlm.config.step_sizes import SIZE_KEYS
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.core.schema import COUNT
from jaxlm.costs.hardware.catalog import catalog
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.placement import batch_shards, check_cache, layout_on, may_have_stages, on_mesh, with_batch
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.plan_order import PlanOrder
from jaxlm.costs.search import VARIED, search, smallest
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.workload import Workload
from jaxlm.parallel.rules import Kind

T = TypeVar("T")

# The mesh that asks for a search.
AUTO = "auto"


class Ranking(NamedTuple):
    """Plans, the best first, and the reason why each of the other chips of the catalog has none."""

    plans: list[Plan]
    refused: dict[str, str]

    @property
    def best(self) -> Plan:
        return self.plans[0]


def rank(
    experiment: Experiment,
    on: str,
    mesh: str | None,
    kind: Kind,
    fixed: Collection[str],
    order: PlanOrder,
    chip: Mapping[str, Any] | None = None,
    stack: Stack = JAXLM,
) -> Ranking:
    """Plan a step on chips, or on every chip of the catalog (`all:8`); see `jaxlm.api.plan`."""
    if mesh != AUTO:
        experiment = on_mesh(experiment, mesh)
    request = PlanRequest(mesh == AUTO, kind, fixed, order, stack)
    if every := EveryChip.of(on, chip):
        return request.on_every_chip(experiment, every)
    target = Target.parse(on, chip)
    experiment = with_batch(experiment, request.parts(experiment, target), kind)
    return Ranking(request.on(experiment, target), {})


class EveryChip:
    """A number of chips of each kind in the catalog (`all:8`), and why some have no plan."""

    def __init__(self, on: str, count: int):
        self._on, self._refused = on, dict[str, str]()
        self._targets = self._attempted(Target.parse, [f"{id}:{count}" for id in catalog()])

    @classmethod
    def of(cls, on: str, chip: Mapping[str, Any] | None) -> "EveryChip | None":
        """Return the chips that `on` asks for; None where it names one kind. Raises InputError where the number is
        none, and for figures of one `chip`."""
        name, _, count = on.partition(":")
        if name != "all":
            return None
        if chip:
            raise InputError(
                f"{on} plans on every chip; the figure {next(iter(chip))} is one chip's: name that in --on"
            )
        if not re.fullmatch(COUNT, count or "1"):
            raise InputError(f"all:{count} names no number of chips; write one up to 999999, such as all:8")
        return cls(on, int(count or 1))

    def each(self, function: Callable[[Target], T]) -> list[T]:
        """Return the results for the chips that have one."""
        return self._attempted(function, self._targets)

    def planned(self, function: Callable[[Target], T]) -> tuple[list[T], dict[str, str]]:
        """Return the results for the chips that have one, and by chips why the others have none. Raises InputError if
        there is no result."""
        plans, refused = self.each(function), self._refused
        if not plans:
            first = str(self._targets[0]) if self._targets else next(iter(refused))
            raise InputError(f"no chip of the catalog can run this as {self._on}; the first, {first}: {refused[first]}")
        return plans, refused

    def _attempted(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        done = []
        for item in items:
            try:
                done.append(function(item))
            except InputError as error:  # no such number of chips, or a figure, the dtype or memory is missing
                self._refused[str(item)] = str(error)
        return done


class PlanRequest(NamedTuple):
    """A request for plans of one kind of step: on meshes that are `searched`, or on the experiment's mesh.

    `fixed`: the settings that a search leaves as they are. `stack`: the software of the step.
    """

    searched: bool
    kind: Kind
    fixed: Collection[str]
    order: PlanOrder
    stack: Stack = JAXLM

    def on_every_chip(self, experiment: Experiment, every: EveryChip) -> Ranking:
        """Plan on each kind of chips in the catalog: the best plan of each, and why others have none."""
        # One batch for all chips: times compare only at equal tokens.
        parts = math.lcm(*every.each(lambda target: self.parts(experiment, target)))
        experiment = with_batch(experiment, parts, self.kind)
        plans, refused = every.planned(lambda target: self.on(experiment, target)[0])
        ordered = sorted(plans, key=self.order.value)
        return Ranking(sorted(ordered, key=lambda plan: (not plan.fits, not plan.leaves_headroom)), refused)

    def parts(self, experiment: Experiment, target: Target) -> int:
        """Return the number of shards of the batch on these chips; in a search, the most that a mesh may have."""
        stage = target.part(self.stack.pipeline.stages)
        return stage.devices if self.searched else batch_shards(experiment, stage, self.kind)

    def on(self, experiment: Experiment, target: Target) -> list[Plan]:
        """Return the plan on the experiment's mesh, or those on all meshes that fit, the best first."""
        if not self.searched:
            layout = layout_on(experiment, target.part(self.stack.pipeline.stages), self.kind)
            only = plan(Workload.of(experiment, layout, self.kind), target, self.stack)
            check_cache(experiment, only.work)
            return self._allowed([only])
        work, staged = Workload.of(experiment, kind=self.kind), may_have_stages(experiment, target)
        plans = search(work, target, self.fixed, self.order, self.stack, staged)
        if not plans:
            raise InputError(
                f"no mesh of {target} holds this {self.kind} step with a batch of {work.batch} × {work.sequence} "
                f"tokens: {self._why_none_fits(work, target, staged)}"
            )
        check_cache(experiment, plans[0].work)
        return self._allowed(plans)

    def _why_none_fits(self, work: Workload, target: Target, staged: bool) -> str:
        """Return what is too large for a device on every mesh, and what would help."""
        size, key = smallest(work, target, self.fixed, self.stack, staged), SIZE_KEYS[self.kind]
        if size is None:
            devices = target.part(self.stack.pipeline.stages).devices
            return f"none divides both the model and the batch; take {key[0]} = {math.lcm(work.batch, devices)}"
        capacity, state = target.chip.device_capacity(), size.state
        helps = ["give more chips"]
        if state <= capacity:
            helps += [f"lower {key[1]}" if self.kind == "train" else f"lower {key[0]} or {key[1]}"]
            helps += [f"leave out {VARIED[name]}" for name in self.fixed]
        held = "parameters, gradients and optimizer state" if self.kind == "train" else "parameters"
        part = f" for {held}" if state == size.total else f", {units.memory(state)} of it for {held},"
        return (
            f"each device needs at least {units.memory(size.total)}{part} and has {units.memory(capacity)}; "
            f"{', or '.join(helps)}"
        )

    def _allowed(self, plans: list[Plan]) -> list[Plan]:
        """Return the plans that the order allows. Raises InputError with the refusal of the first if it allows
        none."""
        allowed = [plan for plan in plans if self.order.refusal(plan) is None]
        if not allowed:
            raise InputError(f"{self.order.refusal(plans[0])}")
        return allowed
