"""The order of plans: what a search is to find best, the limits of a run, and the simplest plan in a tie."""

import itertools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.plan import Plan

Goal = Literal["throughput", "latency", "cost"]

# Plans of the same chips whose times differ by less are a tie. Most errors of an estimate (rates of products, of passes
# and of attention) are common to two meshes of the same chips and cancel. What is left is communication, a tenth to a
# fifth of a step, which is known to a tenth at best: a tenth of a fifth.
TIE = 0.02


class PlanOrder(NamedTuple):
    """An order of plans, and limits that a training run must keep.

    Attributes:
      goal: `throughput`: the most tokens a second. `latency`, of inference: the least time of a step. `cost`: the least
        USD per token, at published prices.
      budget: the most USD of the whole run; None: any.
      deadline: the most seconds of the whole run; None: any.
    """

    goal: Goal = "throughput"
    budget: float | None = None
    deadline: float | None = None

    @classmethod
    def of(cls, goal: str | None, budget: float | None, deadline: float | None, kind: str) -> "PlanOrder":
        """Return the order for a kind of step. A run with a deadline and no stated goal is to be the cheapest that
        keeps it; one with a budget alone the fastest. Raises InputError for what the kind of step does not have."""
        if goal is not None and goal not in get_args(Goal):
            raise InputError(f"there is no objective {goal!r}; choose one of {', '.join(get_args(Goal))}")
        if goal == "latency" and kind == "train":
            raise InputError("a training step has no latency to rank by: choose --objective throughput or cost")
        for name, limit in ("budget", budget), ("deadline", deadline):
            if limit is None:
                continue
            if kind != "train":
                raise InputError(f"--{name} is of a training run: leave it out, or plan --workload train")
            if not 0 < limit < math.inf:
                raise InputError(f"--{name} {limit:g} must be above 0")
        return cls(goal or ("throughput" if deadline is None else "cost"), budget, deadline)

    def value(self, plan: Plan) -> float:
        """Return what is to be least: seconds per token, or USD per million tokens; infinite without a price."""
        if self.goal == "cost":
            return math.inf if plan.usd_per_million_tokens is None else plan.usd_per_million_tokens
        return plan.time.expected / plan.work.tokens

    def refusal(self, plan: Plan) -> str | None:
        """Return why a plan is not among those to choose from; None for one that is."""
        priced = plan.usd_per_million_tokens is not None
        if not priced and (self.goal == "cost" or self.budget is not None):
            return f"{plan.target.chip.id} has no published price"
        if self.deadline is None and self.budget is None:
            return None
        if plan.run_s is None:
            return "the steps of training.epochs follow from the text; give training.steps=N for the time of the run"
        missed = []
        if self.deadline is not None and plan.run_s > self.deadline:
            missed.append(f"the deadline of {units.seconds(self.deadline)}")
        if self.budget is not None and plan.usd_per_run > self.budget:
            missed.append(f"the budget of ${self.budget:,.0f}")
        if not missed:
            return None
        paid = f" and costs ${plan.usd_per_run:,.0f}" if priced else ""
        return (
            f"the run of {plan.work.steps:,} steps takes {units.seconds(plan.run_s)} on {plan.target}{paid}, beyond "
            f"{' and '.join(missed)}"
        )

    def ordered(self, plans: Iterable[Plan]) -> list[Plan]:
        """Return plans of the same chips, the best first, and of those within `TIE` of the best the simplest."""
        plans = list(plans)
        left = sorted(zip(self._values(plans), map(simplicity, plans), plans, strict=True), key=lambda each: each[:2])
        order = []
        while left:
            tied = sum(1 for _ in itertools.takewhile(lambda each: each[0] <= left[0][0] * (1 + TIE), left))
            order.append(left.pop(min(range(tied), key=lambda at: left[at][1]))[2])
        return order

    def _values(self, plans: list[Plan]) -> list[float]:
        """Return the value of each plan; of one whose layers are divided over the network between domains the value at
        that end of the bracket where it is worse beside the best other plan.

        Such a plan waits for the network in each layer. Where communication is hidden, at the lower end, it may seem
        faster: the gain counts as far as it is there at the upper end too.
        """
        crossing = [divides_layers_over_network(plan) for plan in plans]
        others = [plan for plan, crosses in zip(plans, crossing, strict=True) if not crosses]
        values = [self.value(plan) for plan in plans]
        if not others or len(others) == len(plans):
            return values
        best = min(others, key=self.value).time
        spreads = (plan.time.upper_bound / plan.time.expected * best.expected / best.upper_bound for plan in plans)
        return [
            value * max(1.0, spread) if crosses else value
            for value, spread, crosses in zip(values, spreads, crossing, strict=True)
        ]


FASTEST = PlanOrder()


def simplicity(plan: Plan) -> tuple[int, int, bool, int, int, int]:
    """Return a key that is least for the simplest plan: with the fewest mesh axes, the fewest rounds of a pipeline,
    without matrices that stay gathered and with the fewest microbatches, then without rematerialisation before that of
    some activations and of all, then with the fewest devices in a layer."""
    work = plan.work
    axes = sum(size > 1 for size in work.layout.values())
    remat = {"none": 0, "full": 2}.get(work.remat, 1) if isinstance(work.remat, str) else 1
    return axes, work.rounds, work.gathers_once, work.microbatches, remat, work.layout.over(work.rules.of_layers)


def divides_layers_over_network(plan: Plan) -> bool:
    """Return whether the devices that compute a layer together are in several domains."""
    axes = [axis for axis in plan.work.layout if axis in plan.work.rules.of_layers and plan.work.layout[axis] > 1]
    if not axes:
        return False
    stage = plan.target.part(plan.stack.pipeline.stages)
    spans = Network(stage, plan.work.layout).spans(axes)
    return any(span.dimension.name == "network" for span in spans)
