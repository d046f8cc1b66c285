"""Search for the fastest mesh, microbatches and rematerialisation that fit."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from jaxlm.config import divided_by_mesh, divides_heads
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import resolved
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.workload import Workload
from jaxlm.parallel import layout_choice
from jaxlm.parallel.layout import Layout

# The settings that a search varies, by their keys.
VARIED = {"microbatches": "training.microbatches", "remat": "execution.remat"}


def layouts(work: Workload, devices: int) -> Iterator[Layout]:
    """Yield the layouts of a number of devices that divide the heads, and in training the model and the batch."""
    sizes = divided_by_mesh(work.model)

    def fits(layout: Layout) -> bool:
        rows = layout.over(work.rules.over("batch"))
        if work.kind != "train":
            return divides_heads(layout, work.model)
        return work.batch % rows == 0 and layout_choice.divides(layout, work.rules, sizes)

    return layout_choice.layouts(devices, work.rules, fits)


def search(work: Workload, target: Target, fixed: Collection[str] = ()) -> list[Plan]:
    """Return the plans of a workload that fit, the fastest first; in training those of all `variants` on each mesh."""
    plans = []
    for layout in layouts(work, target.devices):
        for candidate in variants(replace(work.on(target.chip), layout=layout), fixed):
            if memory(resolved(candidate, target.chip.device_capacity())).total <= target.chip.device_capacity():
                plans.append(plan(candidate, target))
    return sorted(plans, key=lambda p: p.time.expected)


def variants(work: Workload, fixed: Collection[str] = ()) -> Iterator[Workload]:
    """Yield a workload with other `microbatches` and `remat` on its mesh; settings named in `fixed` do not vary."""
    if work.kind != "train":
        yield work
        return
    named = dict.fromkeys(device_step(work).recording.names.values())
    names = tuple(name for name in named if name != "attention")  # its kernel keeps more than its result
    rows = work.batch // work.batch_shards
    parts = (work.microbatches,) if "microbatches" in fixed else [2**n for n in range(rows.bit_length())]
    remats = (work.remat,) if "remat" in fixed else ("none", names, "full")
    for microbatches in parts:
        for remat in remats if rows % microbatches == 0 else ():
            yield replace(work.with_execution(remat=remat), microbatches=microbatches)
