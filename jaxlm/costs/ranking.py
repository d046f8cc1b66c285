"""An experiment's step planned on one target, on the meshes that fit, or on every chip of the catalog."""

import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from jaxlm.config import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.schema import COUNT
from jaxlm.costs.hardware.catalog import catalog
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.placement import batch_shards, check_cache, layout_on, on_mesh, with_batch
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.search import VARIED, search
from jaxlm.costs.workload import Workload
from jaxlm.parallel.rules import Kind

# The mesh that asks for a search.
AUTO = "auto"


class Ranking(NamedTuple):
    """Plans, the best first, and the reason why each of the other chips of the catalog has none."""

    plans: list[Plan]
    refused: dict[str, str]

    @property
    def best(self) -> Plan:
        return self.plans[0]


def rank(experiment: Experiment, on: str, mesh: str | None, kind: Kind, fixed: Collection[str]) -> Ranking:
    """Plan a step on chips, or on every chip of the catalog (`all:8`); see `jaxlm.api.plan`."""
    if mesh != AUTO:
        experiment = on_mesh(experiment, mesh)
    request = PlanRequest(mesh == AUTO, kind, fixed)
    name, _, count = on.partition(":")
    if name == "all":
        return request.on_every_chip(experiment, on, count)
    target = Target.parse(on)
    experiment = with_batch(experiment, request.parts(experiment, target), kind)
    return Ranking(request.on(experiment, target), {})


class PlanRequest(NamedTuple):
    """A request for plans of one kind of step: on meshes that are `searched`, or on the experiment's mesh.

    `fixed`: the settings that a search leaves as they are.
    """

    searched: bool
    kind: Kind
    fixed: Collection[str]

    def on_every_chip(self, experiment: Experiment, on: str, count: str) -> Ranking:
        """Plan on this number of chips of each kind in the catalog: the best plan of each, and why others have none."""
        if not re.fullmatch(COUNT, count or "1"):
            raise InputError(f"all:{count} names no number of chips; write one up to 999999, such as all:8")
        refused: dict[str, str] = {}

        def each(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
            done = []
            for item in items:
                try:
                    done.append(function(item))
                except InputError as error:  # no such number of chips, or a figure, the dtype or memory is missing
                    refused[str(item)] = str(error)
            return done

        targets = each(Target.parse, [f"{id}:{count or 1}" for id in catalog()])
        # One batch for all chips: times compare only at equal tokens.
        parts = math.lcm(*each(lambda target: self.parts(experiment, target), targets))
        experiment = with_batch(experiment, parts, self.kind)
        plans = each(lambda target: self.on(experiment, target)[0], targets)
        if not plans:
            first = str(targets[0]) if targets else next(iter(refused))
            raise InputError(f"no chip of the catalog can run this as {on}; the first, {first}: {refused[first]}")
        return Ranking(sorted(plans, key=lambda plan: (not plan.fits, plan.time.expected)), refused)

    def parts(self, experiment: Experiment, target: Target) -> int:
        """Return the number of shards of the batch on these chips; in a search, the most that a mesh may have."""
        return target.devices if self.searched else batch_shards(experiment, target, self.kind)

    def on(self, experiment: Experiment, target: Target) -> list[Plan]:
        """Return the plan on the experiment's mesh, or those on all meshes that fit, the best first."""
        if not self.searched:
            layout = layout_on(experiment, target, self.kind)
            only = plan(Workload.of(experiment, layout, self.kind), target)
            check_cache(experiment, only.work)
            return [only]
        work = Workload.of(experiment, kind=self.kind)
        plans = search(work, target, self.fixed)
        if not plans:
            free = "".join(f", or leave out {VARIED[name]}" for name in self.fixed)
            raise InputError(
                f"no mesh of {target} holds this {self.kind} step with a batch of {work.batch} × {work.sequence} "
                f"tokens; give more chips, or a batch that more meshes divide{free}"
            )
        check_cache(experiment, plans[0].work)
        return plans
