"""Suggest settings that make a step fit in memory, by the counted effect of each."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from jaxlm.config.step_sizes import SIZE_KEYS
from jaxlm.core import units
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.plan import Plan
from jaxlm.costs.workload import Workload

_SHOWN = 4


def suggest(plan: Plan, needed: int) -> list[str]:
    """Return changes that make a step fit, each with the memory that the step would need then.

    `needed` is in bytes on one device and shrinks in proportion to the count. Single changes come first; only if none
    suffices, combinations of two or three; empty if these do not suffice either.
    """
    now = memory(plan.work).total
    for together in (1, 2, 3):
        suggestions = []
        for combination in itertools.combinations(_CHANGES, together):
            work, settings = plan.work, []
            for change in combination:
                changed = change(work)
                if changed is None:
                    break
                setting, work = changed
                settings.append(setting)
            else:
                size = round(needed * memory(work).total / now)
                if size <= plan.capacity:
                    suggestions.append(f"{' and '.join(settings)} ({units.memory(size)})")
        if suggestions:
            return suggestions[:_SHOWN]
    return []


# A setting to suggest and the workload with it; None if the setting cannot go further.
Change = tuple[str, Workload] | None


def _remat(work: Workload) -> Change:
    if work.kind != "train" or work.remat == "full":
        return None
    return "execution.remat=full", work.with_execution(remat="full")


def _microbatches(work: Workload) -> Change:
    if work.kind != "train" or work.rows() == 1:
        return None
    work = replace(work, microbatches=work.microbatches * work.rows())
    return f"training.microbatches={work.microbatches}", work


def _chips(times: int) -> Callable[[Workload], Change]:
    def change(work: Workload) -> Change:
        # The innermost axis of the batch: it shards parameters too, wherever one does.
        axis = work.rules.over("batch")[-1]
        layout = work.layout.replace(**{axis: work.layout[axis] * times})
        if work.model.d_model % layout.over(work.rules.over("embed")):
            return None
        # Training keeps the rows per device; inference keeps the total.
        batch = work.batch * times if work.kind == "train" else work.batch
        wider = replace(work, batch=batch, layout=layout)
        return f"{times} times the chips, on {axis}", wider

    return change


def _batch(work: Workload) -> Change:
    least = work.batch_shards * work.microbatches
    if work.batch <= least:
        return None
    return f"{SIZE_KEYS[work.kind][0]}={least}", replace(work, batch=least)


def _sequence(work: Workload) -> Change:
    if work.sequence < 1024 or work.sequence % 4:
        return None
    shorter = work.sequence // 4
    return f"{SIZE_KEYS[work.kind][1]}={shorter}", replace(work, sequence=shorter)


# Changes that affect training least come first.
_CHANGES: tuple[Callable[[Workload], Change], ...] = (_remat, _microbatches, _chips(2), _chips(8), _batch, _sequence)
