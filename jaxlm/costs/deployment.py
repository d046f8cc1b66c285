"""Deployments of a served model: the batch, and the size and number of replicas, that meet limits of latency cheapest.

A replica is an engine of its own, on devices that share each layer. Its steps are those of `jaxlm.inference`, counted
as any other step; what requests wait and get is the estimate of `jaxlm.costs.queueing`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.engine_steps import EngineSteps, decode_steps, mixed_steps
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import HEADROOM
from jaxlm.costs.plan_order import TIE, Goal
from jaxlm.costs.queueing import EngineLoad, Service, StepSeconds, at_rate, with_clients
from jaxlm.costs.ranking import EveryChip
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.stack_memory import stack_memory
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload
from jaxlm.inference.step_shapes import TILE
from jaxlm.parallel.layout_choice import divisors, with_shards
from jaxlm.parallel.rules import ENGINE

_MOST_SLOTS = 4096


class Demand(NamedTuple):
    """The requests that a deployment serves, and the limits that it is to keep.

    Attributes:
      prompt, output: tokens of each request.
      ttft: the most seconds until the first token, for nine of ten requests; None: any.
      tpot: the most seconds for each later token, on average; None: any.
      rate: requests a second, at random times; None: as many clients as there are slots, each of which sends a request
        as soon as the one before is answered.
    """

    prompt: int
    output: int
    ttft: float | None = None
    tpot: float | None = None
    rate: float | None = None

    def check(self, experiment: Experiment) -> "Demand":
        """Return the demand. Raises InputError for values without meaning, and for a text that the model or the engine
        does not hold."""
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)} must be 1 or more")
        for name in ("ttft", "tpot", "rate"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise InputError(f"--{name} {value:g} must be above 0")
        limits = {
            "model.context_length": experiment.model.context_length,
            "inference.context": experiment.inference.context,
        }
        for name, limit in limits.items():
            if limit is not None and self.prompt + self.output > limit:
                raise InputError(
                    f"--prompt {self.prompt} and --output {self.output} are {self.prompt + self.output} tokens, more "
                    f"than {name} = {limit}"
                )
        return self

    def is_met(self, service: Service | None) -> bool:
        """Return whether a service keeps the limits; None, an endless queue, keeps none."""
        if service is None:
            return False
        return (self.ttft is None or service.ttft_p90 <= self.ttft) and (self.tpot is None or service.tpot <= self.tpot)

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft, "TPOT": self.tpot}
        said = "".join(f", {name} within {units.seconds(limit)}" for name, limit in limits.items() if limit is not None)
        rate = "" if self.rate is None else f" at {self.rate:g} requests/s"
        return f"{self.prompt:,} tokens in, {self.output:,} out{rate}{said}"


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

    @classmethod
    def of(cls, experiment: Experiment, target: Target, demand: Demand, stack: Stack = JAXLM) -> "Replica | None":
        """Return the engine of an experiment on all devices of a target; None where they do not divide a layer."""
        layout = with_shards(ENGINE, heads=target.devices)
        if not config.divides_heads(layout, experiment.model):
            return None
        halfway = demand.prompt + (demand.output + 1) // 2
        work = replace(Workload.of(experiment, layout, "decode"), sequence=halfway)
        return cls(work.on(target.chip), target, demand, stack)

    def with_slots(self, slots: int) -> Workload:
        """Return the decoding step of all slots."""
        return replace(self.base, batch=slots)

    def memory(self, slots: int) -> Memory:
        """Return the memory of a device in the largest step, with all slots at the end of their output."""
        work = replace(self.with_slots(slots), sequence=self.demand.prompt + self.demand.output)
        largest = max(self._mixed(work), key=lambda steps: steps.shape.rows)
        return stack_memory(replace(work, engine_steps=largest), self.stack)

    def holds(self, slots: int, cache_bytes: int | None) -> bool:
        """Return whether the memory of a device holds so many slots, and `cache_bytes`, where there is such a limit,
        their keys and values."""
        work = replace(self.with_slots(slots), sequence=self.demand.prompt + self.demand.output)
        if cache_bytes is not None and kv_cache(work) * self.stack.cache_share(work.itemsize) > cache_bytes:
            return False
        return self.memory(slots).total <= (1 - HEADROOM) * self.target.chip.device_capacity()

    def most_slots(self) -> int:
        """Return the most slots that memory holds; 0 if it holds none."""
        slots, beyond = 0, 1
        while self.holds(beyond, None) and beyond < _MOST_SLOTS:
            slots, beyond = beyond, 2 * beyond
        while beyond - slots > 1:
            middle = (slots + beyond) // 2
            slots, beyond = (middle, beyond) if self.holds(middle, None) else (slots, middle)
        return slots

    def loads(self, slots: int) -> _Loads:
        """Return the load that the requests are for this engine."""
        work = self.with_slots(slots)
        (full,) = decode_steps(work.shapes, work.sequence, work.page, work.windows)
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
            return EngineLoad(slots, seconds, count, work_steps, self.demand.output)

        return _Loads(*map(load, range(4)))

    def _bracket(self, work: Workload, steps: EngineSteps) -> tuple[float, ...]:
        """Return the seconds of all these steps: the lower bound, low, expected and high."""
        time = step_time(replace(work, engine_steps=steps), self.target, self.stack)
        return time.lower_bound, time.low, time.expected, time.upper_bound

    def _mixed(self, work: Workload) -> tuple[EngineSteps, ...]:
        return mixed_steps(work.shapes, self.demand.prompt, work.sequence, work.page, work.windows)


def _without_reads(steps: EngineSteps) -> EngineSteps:
    """Return steps whose rows are all padding."""
    sections = (each._replace(pages=tuple((window, 0) for window, _ in each.pages)) for each in steps.sections)
    return steps._replace(sections=tuple(sections))


class ServingSearch(NamedTuple):
    """A search for deployments on some chips.

    Attributes:
      slots: the sequences of each replica; None: the best number.
      stack: the software of the engine.
    """

    experiment: Experiment
    demand: Demand
    goal: Goal
    slots: int | None
    stack: Stack = JAXLM

    def on(self, target: Target) -> list[Deployment]:
        """Return the best deployment for each size of a replica, the best first. Raises InputError where none meets the
        demand."""
        deployments, misses = [], []
        for part in _parts(target):
            replica = Replica.of(self.experiment, part, self.demand, self.stack)
            if replica is None:
                continue
            best = self._best(replica, target.chips // part.chips)
            if isinstance(best, str):
                misses.append(best)
            else:
                deployments.append(best)
        if not deployments:
            raise InputError(f"nothing on {target} serves {self.demand}: {misses[-1] if misses else 'no mesh fits'}")
        deployments.sort(key=lambda each: each.value(self.goal))
        least = deployments[0].value(self.goal) * (1 + TIE)
        tied = [each for each in deployments if each.value(self.goal) <= least]
        first = min(tied, key=lambda each: each.devices)
        return [first, *(each for each in deployments if each is not first)]

    def _best(self, replica: Replica, most: int) -> Deployment | str:
        """Return the best deployment of at most so many of a replica, or why there is none."""
        cache_bytes = self.experiment.inference.settings().cache_bytes
        best, miss, beyond = None, "", None
        for slots in (self.slots,) if self.slots else (2**n for n in range(_MOST_SLOTS.bit_length())):
            if not replica.holds(slots, cache_bytes):
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
        return self._refined(replica, best, beyond, most, cache_bytes)

    def _refined(
        self, replica: Replica, best: Deployment, beyond: int | None, most: int, cache_bytes: int | None
    ) -> Deployment:
        """Return the best deployment with fewer than `beyond` slots, and no fewer than the best so far, if that
        has half as many."""
        low, high = best.slots, beyond
        if high is None or high > 2 * low:
            return best
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            deployment = self._with(replica, middle, most) if replica.holds(middle, cache_bytes) else ""
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
) -> DeploymentRanking:
    """Search for deployments on chips, or on every chip of the catalog (`all:8`); see `jaxlm.api.plan_serving`."""
    if stack.pipeline.stages > 1:
        raise InputError("a deployment has no pipeline: leave pipeline.stages out")
    if goal == "throughput" and demand.rate is not None:
        raise InputError("--rate states the throughput: choose --objective cost or latency")
    inference = experiment.inference
    slots = inference.sequences if "sequences" in inference.model_fields_set else None
    search = ServingSearch(experiment, demand.check(experiment), goal, slots, stack)
    every = EveryChip.of(on, chip)
    if every is None:
        return DeploymentRanking(search.on(Target.parse(on, chip)), {})

    def best(target: Target) -> Deployment:
        if goal == "cost" and target.chip.usd_per_hour is None:
            raise InputError(f"{target.chip.id} has no published price")
        return search.on(target)[0]

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
