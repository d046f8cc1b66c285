"""The fastest training step that fits, by asking the compiler."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.search import variants
from jaxlm.costs.step.memory import memory
from jaxlm.costs.workload import Workload

# How far the compiler may differ from what the compilations before it made of the count.
_DOUBT = 1.05


class Tried(NamedTuple):
    """A variant that was compiled, and the bytes on one device that it needs."""

    work: Workload
    needed: int


def fit(
    work: Workload,
    target: Target,
    needed: Callable[[Workload], int],
    say: Callable[[str], None],
    held: Collection[str] = (),
) -> tuple[Workload | None, list[Tried]]:
    """The variant of a workload on its mesh that has the largest microbatch and the cheapest rematerialisation, by
    counted time, of those that fit; None where none does; and all that were compiled.

    `needed` compiles a variant; `held` names settings that `variants` leaves as they are. Those are left out of which
    the count, corrected by what was compiled so far, says that they cannot fit by far, and those that are slower than
    one that fits.
    """
    capacity, work = target.chip.device_capacity(), work.on(target.chip)

    def counted(work: Workload) -> int:
        return memory(work, target.chip.kind).total

    waiting = sorted(variants(work, held), key=lambda w: plan(w, target).time.expected)
    tried: list[Tried] = []
    best: Workload | None = None
    while chosen := _next(waiting, tried, capacity, counted):
        say(f"compiling {chosen.overrides()}")
        tried.append(Tried(chosen, needed(chosen)))
        at = waiting.index(chosen)
        if tried[-1].needed <= capacity:
            best, waiting = chosen, waiting[:at]
        else:
            waiting.remove(chosen)
    return best, tried


def _next(
    waiting: list[Workload], tried: list[Tried], capacity: int, counted: Callable[[Workload], int]
) -> Workload | None:
    """The fastest that may fit, or, before anything fits, the one that needs least if none is thought to."""
    ratio = min((t.needed / counted(t.work) for t in tried), default=1.0)
    hopeful = [w for w in waiting if counted(w) * ratio <= capacity * (_DOUBT if tried else 1.0)]
    if hopeful:
        return hopeful[0]
    if waiting and not any(t.needed <= capacity for t in tried):
        least = min(waiting, key=counted)
        return least if not tried or counted(least) * ratio <= capacity * 2 else None
    return None
