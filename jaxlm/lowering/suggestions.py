"""What to turn where a step does not fit, by what counting says of each dial."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from jaxlm.core.units import gib
from jaxlm.costs.plan import Plan
from jaxlm.costs.step.memory import memory
from jaxlm.costs.workload import Workload

_SHOWN = 4


def dials(plan: Plan, needed: int) -> list[str]:
    """What would make a step fit which needs this many bytes on a device, with what it would need then: as much less
    as counting says. Single dials where one is enough, else two or three together; none where these do not suffice."""
    kind = plan.target.chip.kind
    now = memory(plan.work, kind).total
    for together in (1, 2, 3):
        found = []
        for turned in itertools.combinations(_DIALS, together):
            work, said = plan.work, []
            for dial in turned:
                after = dial(work)
                if after is None:
                    break
                said.append(after[0])
                work = after[1]
            else:
                size = round(needed * memory(work, kind).total / now)
                if size <= plan.capacity:
                    found.append(f"{' and '.join(said)} ({gib(size, 1)} GiB)")
        if found:
            return found[:_SHOWN]
    return []


# What is said of a dial that was turned, and the workload then; None where it is at its end.
Turned = tuple[str, Workload] | None


def _remat(work: Workload) -> Turned:
    if work.kind != "train" or work.remat == "full":
        return None
    return "training.remat=full", replace(work, remat="full")


def _microbatches(work: Workload) -> Turned:
    if work.kind != "train" or work.rows() == 1:
        return None
    work = replace(work, microbatches=work.microbatches * work.rows())
    return f"training.microbatches={work.microbatches}", work


def _chips(times: int) -> Callable[[Workload], Turned]:
    def turn(work: Workload) -> Turned:
        fsdp = work.layout["fsdp"] * times
        if work.model.d_model % fsdp:
            return None
        # As many rows on each device in training; as many in all in inference, as far as they divide.
        batch = work.batch * times if work.kind == "train" else work.batch
        return f"{times} times the chips, on fsdp", replace(work, layout=work.layout.replace(fsdp=fsdp), batch=batch)

    return turn


def _batch(work: Workload) -> Turned:
    least = work.batch_shards * work.microbatches
    if work.batch <= least:
        return None
    return f"training.batch={least}", replace(work, batch=least)


def _sequence(work: Workload) -> Turned:
    if work.sequence < 1024 or work.sequence % 4:
        return None
    return f"training.sequence={work.sequence // 4}", replace(work, sequence=work.sequence // 4)


# What changes the result least comes first.
_DIALS: tuple[Callable[[Workload], Turned], ...] = (_remat, _microbatches, _chips(2), _chips(8), _batch, _sequence)
