"""Deployments of a served model: the batch, and the size and number of replicas, that meet limits of latency cheapest.

A replica is an engine of its own, on devices that share each layer. Its steps are those of `jaxlm.inference`, counted
as any other step; what requests wait and get is the estimate of `jaxlm.costs.queueing`.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxlm.config.experiment import Experiment
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.demand import Demand
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import HEADROOM, check_drafts, check_width, speculation_row
from jaxlm.costs.plan_order import TIE, Goal
from jaxlm.costs.queueing import EngineLoad, Service, at_rate, with_clients
from jaxlm.costs.ranking import EveryChip
from jaxlm.costs.replica import MOST_SLOTS, Replica
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.workload import Workload
from jaxlm.inference.step_shapes import TILE
from jaxlm.parallel.layout_choice import divisors

# What a search may choose beside the batch and the size of a replica.
SEARCHED = ("quantize", "drafts")

# Widths of weights that a search chooses from, first what changes a model least. "fp8" has the bytes and, as it is
# counted, the times of "int8".
WIDTHS = ("none", "int8", "w8a8", "int4")


@dataclass(frozen=True)
class Deployment:
    """Replicas of an engine that serve a demand.

    Attributes:
      stack: the software of the engine.
      work: the decoding step of a replica whose slots all decode halfway through their output.
      target: the chips of one replica.
      memory: of a device, with all slots at the end of their output.
      service: of one replica, at the expected times of its steps.
      fast, slow: the same at the two ends of the bracket; `slow` is None where requests would queue without end.
    """

    demand: Demand
    work: Workload
    target: Target
    stack: Stack
    replicas: int
    memory: Memory
    service: Service
    fast: Service
    slow: Service | None

    @property
    def chips(self) -> int:
        return self.replicas * self.target.chips

    @property
    def chip_id(self) -> str:
        return self.target.chip.id

    @property
    def devices(self) -> int:
        """The devices of a replica."""
        return self.work.layout.size

    @property
    def slots(self) -> int:
        """The most sequences that are under way on a replica."""
        return self.work.batch

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens that all replicas draw in a second."""
        return self.replicas * self.service.rate * self.demand.output

    @property
    def request_s(self) -> float:
        """Mean seconds of a request."""
        return self.service.ttft + (self.demand.output - 1) * self.service.tpot

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """The price of a million drawn tokens, prompts included; None if no price is published."""
        price = self.target.chip.usd_per_hour
        return price and math.sqrt(price[0] * price[1]) * self.chips / 3600 / self.output_tokens_per_s * 1e6

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The price of a million tokens, read and drawn; None if no price is published."""
        usd = self.usd_per_million_output_tokens
        return usd and usd * self.demand.output / (self.demand.prompt + self.demand.output)

    def value(self, goal: Goal) -> float:
        """Return what is to be least: chips' seconds per token at their price, seconds per token, or those of a
        request."""
        if goal == "latency":
            return self.request_s
        if goal == "throughput":
            return 1 / self.output_tokens_per_s
        usd = self.usd_per_million_output_tokens
        return self.chips / self.output_tokens_per_s if usd is None else usd

    def row(self) -> dict[str, Any]:
        """Return the deployment as JSON."""
        service, demand = self.service, self.demand
        return {
            "target": str(self.target),
            "chips": self.chips,
            "replicas": self.replicas,
            "mesh": dict(self.work.layout),
            "workload": "serve",
            **({"stack": changes} if (changes := self.stack.changes()) else {}),
            "batch": self.slots,
            "quantize": self.work.execution.quantize,
            **speculation_row(self.work),
            "demand": demand._asdict(),
            "memory_bytes_per_device": {
                **self.memory._asdict(),
                "total": self.memory.total,
                "capacity": self.target.chip.device_capacity(),
            },
            "requests_per_s": self.replicas * service.rate,
            "output_tokens_per_s": self.output_tokens_per_s,
            "output_tokens_per_s_per_chip": self.output_tokens_per_s / self.chips,
            "time_to_first_token_s": self._bracketed("ttft"),
            "time_to_first_token_p90_s": self._bracketed("ttft_p90"),
            "time_per_token_s": self._bracketed("tpot"),
            "request_s": self.request_s,
            "decoding": service.decoding,
            "steps_with_prompts": service.mixed,
            "usd_per_million_output_tokens": self.usd_per_million_output_tokens,
            "usd_per_million_tokens": self.usd_per_million_tokens,
        }

    def _bracketed(self, name: str) -> dict[str, float | None]:
        """Return a figure of the service: expected, and at both ends of the bracket."""
        slow = None if self.slow is None else getattr(self.slow, name)
        return {"low": getattr(self.fast, name), "expected": getattr(self.service, name), "high": slow}


class DeploymentRanking(NamedTuple):
    """Deployments, the best first, and the reason why each of the other chips of the catalog has none."""

    deployments: list[Deployment]
    refused: dict[str, str]

    @property
    def best(self) -> Deployment:
        return self.deployments[0]


def engines(experiment: Experiment, searched: Collection[str] = ()) -> tuple[tuple[Workload, ...], ...]:
    """Return the decoding step of an experiment with each choice of what is `searched`. For each width of weights, of
    `WIDTHS`, there are the steps without drafts, and with 2, 4 and so on up to the number in `inference.speculate`.

    Raises InputError for what cannot be searched, and for drafts without a source.
    """
    if unknown := [name for name in searched if name not in SEARCHED]:
        raise InputError(f"{unknown[0]!r} is not searched for; choose among {', '.join(SEARCHED)}")
    if "drafts" in searched and experiment.inference.speculate is None:
        raise InputError("a search for drafts needs their source: give --speculate ngram:auto")
    own = Workload.of(experiment, kind="decode")
    plain = replace(own, drafts=0, acceptance=0.0, draft_model=None)
    widths = WIDTHS if "quantize" in searched else (own.execution.quantize,)
    drafts = [0, *(2**n for n in range(1, own.drafts.bit_length()))] if "drafts" in searched else [own.drafts]
    return tuple(
        tuple(
            replace(own.with_execution(quantize=width), drafts=n) if n else plain.with_execution(quantize=width)
            for n in drafts
        )
        for width in widths
    )


class ServingSearch(NamedTuple):
    """A search for deployments on some chips.

    Attributes:
      engines: the decoding steps to choose from: for each width of weights those with more and more drafts.
      slots: the sequences of each replica; None: the best number.
      cache_bytes: the most memory of keys and values on each device; None: any.
      stack: the software of the engine.
    """

    engines: tuple[tuple[Workload, ...], ...]
    demand: Demand
    goal: Goal
    slots: int | None
    cache_bytes: int | None
    stack: Stack = JAXLM

    def on(self, target: Target) -> list[Deployment]:
        """Return the best deployment for each size of a replica, the best first. Raises InputError where none meets the
        demand."""
        return self._ordered([*self._of_sizes(target)])

    def best_on(self, target: Target) -> Deployment:
        """Return the best deployment, without the sizes of a replica beyond one that is worse than a smaller one.
        Raises InputError as `on` does."""
        tried, least = [], math.inf
        for each in self._of_sizes(target):
            tried.append(each)
            if each.value(self.goal) > (1 + TIE) * least:
                break
            least = min(least, each.value(self.goal))
        return self._ordered(tried)[0]

    def _ordered(self, deployments: list[Deployment]) -> list[Deployment]:
        deployments.sort(key=lambda each: each.value(self.goal))
        first = self._first(deployments)
        return [first, *(each for each in deployments if each is not first)]

    def _of_sizes(self, target: Target) -> Iterator[Deployment]:
        """Yield the best deployment for each size of a replica that has one, the smallest first. Raises InputError
        where none has."""
        miss, has_one, start = "no mesh fits", False, 1
        for part in _parts(target):
            candidates: list[Deployment] = []
            try:
                for of_width in self.engines:
                    if of_width[0].execution.quantize == "w8a8" and "int8" not in target.chip.peak_flops:
                        continue
                    least = math.inf
                    for engine in of_width:
                        if (replica := Replica.of(engine, part, self.demand, self.stack)) is None:
                            break
                        best = self._best(replica, target.chips // part.chips, start)
                        if isinstance(best, str):
                            miss = best
                            continue
                        candidates.append(best)
                        if best.value(self.goal) >= least:  # nor are more drafts better: each gives fewer tokens
                            break
                        least, start = best.value(self.goal), 1 << max(0, best.slots.bit_length() - 2)
            except InputError as error:  # a figure that several devices need, such as that of a link, is not published
                miss = str(error)
            if candidates:
                has_one = True
                yield self._first(candidates)
        if not has_one:
            raise InputError(f"nothing on {target} serves {self.demand}: {miss}")

    def _first(self, deployments: list[Deployment]) -> Deployment:
        """Return the best of some deployments; in a tie the one of the simplest engine, and then of the fewest
        devices."""
        least = min(each.value(self.goal) for each in deployments) * (1 + TIE)
        tied = [each for each in deployments if each.value(self.goal) <= least]
        return min(tied, key=lambda each: (self._place(each.work), each.devices))

    def _place(self, work: Workload) -> int:
        """Return the place among `engines` of the one that decodes as `work` does."""
        chosen = [(each.execution.quantize, each.drafts) for of_width in self.engines for each in of_width]
        return chosen.index((work.execution.quantize, work.drafts))

    def _best(self, replica: Replica, most: int, start: int) -> Deployment | str:
        """Return the best deployment of at most so many of a replica, or why there is none; `start`: slots that are
        probably too few."""
        best = self._best_from(start, replica, most)
        if start > 1 and (isinstance(best, str) or best.slots == start):
            return self._best_from(1, replica, most)
        return best

    def _best_from(self, start: int, replica: Replica, most: int) -> Deployment | str:
        """Return the best deployment with `start` slots or more."""
        best, miss, beyond = None, "", None
        for slots in (
            (self.slots,) if self.slots else (2**n for n in range(start.bit_length() - 1, MOST_SLOTS.bit_length()))
        ):
            if not replica.holds(slots, self.cache_bytes):
                capacity = units.memory(replica.target.chip.device_capacity())
                miss = miss or f"{slots} sequences on {replica.target} need more than {1 - HEADROOM:.0%} of {capacity}"
                beyond = slots
                break
            deployment = self._with(replica, slots, most)
            if isinstance(deployment, str):
                miss, beyond = deployment, slots
                if self.demand.rate is None:  # more sequences are slower
                    break
            elif best is None or self._is_better(deployment, best):
                best = deployment
            else:  # nor are more
                break
        if best is None:
            return miss
        return self._refined(replica, best, beyond, most)

    def _refined(self, replica: Replica, best: Deployment, beyond: int | None, most: int) -> Deployment:
        """Return the best deployment with fewer than `beyond` slots, and no fewer than the best so far, if that
        has half as many."""
        low, high = best.slots, beyond
        if high is None or high > 2 * low:
            return best
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            deployment = self._with(replica, middle, most) if replica.holds(middle, self.cache_bytes) else ""
            if isinstance(deployment, str):
                high = middle
                continue
            low = middle
            if self._is_better(deployment, best):
                best = deployment
        return best

    def _is_better(self, deployment: Deployment, other: Deployment) -> bool:
        """Return whether a deployment is the better by more than a tie, or in a tie has the first token
        sooner by more than one."""
        ratio = deployment.value(self.goal) / other.value(self.goal)
        return ratio < 1 - TIE or (ratio < 1 + TIE and deployment.service.ttft < (1 - TIE) * other.service.ttft)

    def _with(self, replica: Replica, slots: int, most: int) -> Deployment | str:
        """Return the deployment of replicas with so many slots: with a rate and a goal of cost the fewest replicas that
        meet the demand, else all; or how the demand is missed."""
        loads = replica.loads(slots)
        if (service := _service(loads.expected, self.demand, most)) is None or not self.demand.is_met(service):
            return _missed(replica, slots, most, service)
        replicas = most
        if self.demand.rate is not None and self.goal == "cost":
            few = 0  # do not meet the demand
            while replicas - few > 1:
                middle = (replicas + few) // 2
                fewer = _service(loads.expected, self.demand, middle)
                replicas, few = (middle, few) if self.demand.is_met(fewer) else (replicas, middle)
        work, services = replica.with_slots(slots), (_service(load, self.demand, replicas) for load in loads[1:])
        low, expected, high = services
        size = replica.memory(slots)
        return Deployment(self.demand, work, replica.target, self.stack, replicas, size, expected, low, high)


def _service(load: EngineLoad, demand: Demand, replicas: int) -> Service | None:
    """Return the service of each of so many replicas."""
    return with_clients(load, load.slots) if demand.rate is None else at_rate(load, demand.rate / replicas)


def _missed(replica: Replica, slots: int, replicas: int, service: Service | None) -> str:
    """Return how replicas with so many slots miss the demand."""
    on = f"{slots} sequence{'s' * (slots > 1)} on {replica.target}"
    if service is None:
        return f"requests queue without end before {replicas} × {on}"
    ttft, tpot = units.seconds(service.ttft_p90), units.seconds(service.tpot)
    return f"with {on}, TTFT is {ttft} (90 % of requests) and TPOT {tpot}"


def _parts(target: Target) -> Iterator[Target]:
    """Yield the chips of one replica: each number that divides those of a target and comes as one domain or slice."""
    for chips in divisors(target.chips):
        try:
            part = Target.parse(f"{target.chip.id}:{chips}")
        except InputError:  # there is no such slice
            continue
        yield target if chips == target.chips else replace(part, chip=target.chip)


def deployments(
    experiment: Experiment,
    on: str,
    demand: Demand,
    goal: Goal,
    chip: Mapping[str, Any] | None = None,
    stack: Stack = JAXLM,
    searched: Collection[str] = (),
) -> DeploymentRanking:
    """Search for deployments on chips, or on every chip of the catalog (`all:8`); see `jaxlm.api.plan_serving`."""
    if stack.pipeline.stages > 1:
        raise InputError("a deployment has no pipeline: leave pipeline.stages out")
    if goal == "throughput" and demand.rate is not None:
        raise InputError("--rate states the throughput: choose --objective cost or latency")
    inference, demand = experiment.inference, demand.check(experiment)
    slots = inference.sequences if "sequences" in inference.model_fields_set else None
    choices, cache_bytes = engines(experiment, searched), inference.settings().cache_bytes
    for engine in itertools.chain(*choices):
        check_width(engine, stack)
        check_drafts(replace(engine, sequence=demand.prompt + demand.output))
    search = ServingSearch(choices, demand, goal, slots, cache_bytes, stack)
    every = EveryChip.of(on, chip)
    if every is None:
        return DeploymentRanking(search.on(Target.parse(on, chip)), {})

    def best(target: Target) -> Deployment:
        if goal == "cost" and target.chip.usd_per_hour is None:
            raise InputError(f"{target.chip.id} has no published price")
        return search.best_on(target)

    ranked, refused = every.planned(best)
    return DeploymentRanking(sorted(ranked, key=lambda each: each.value(goal)), refused)


class ServingRate(NamedTuple):
    """Output tokens a second of one engine: the bound that no program exceeds, and the bracket of the expected rate."""

    bound: float
    low: float
    expected: float
    high: float


def serving_throughput(
    work: Workload, target: Target, prompt: int, output: int, clients: int | None = None, stack: Stack = JAXLM
) -> ServingRate:
    """Return the output tokens a second of an engine whose clients send one request after the other.

    Args:
      work: a step of decoding on the engine's mesh, of any batch and length; its steps have at most `chunk_tokens` rows
        of prompts, and no padding: as many as come in a mean step.
      prompt, output: tokens of each request.
      clients: their number; None: as many as memory holds requests.
      stack: the software of the engine.

    Raises InputError where the memory does not hold one request.
    """
    halfway = replace(work, sequence=prompt + (output + 1) // 2).on(target.chip)
    replica = Replica(halfway, target, Demand(prompt, output), stack)
    slots = clients or replica.most_slots()
    if not slots:
        raise InputError(f"{target} does not hold one request of {prompt + output} tokens")
    rows = TILE * math.ceil(slots * prompt / output / TILE)
    replica = replace(replica, base=replace(halfway, chunk_tokens=min(rows, work.chunk_tokens)))
    bound, low, expected, high = (with_clients(load, slots).rate * output for load in replica.loads(slots))
    return ServingRate(bound, high, expected, low)
