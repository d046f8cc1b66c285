"""Search for the fastest mesh, microbatches and rematerialisation that fit."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from jaxlm.config import divided_by_mesh
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.workload import Workload
from jaxlm.parallel import layout_choice
from jaxlm.parallel.layout import Layout

# The settings that a search varies, by their keys.
VARIED = {"microbatches": "training.microbatches", "remat": "execution.remat"}


def layouts(work: Workload, devices: int) -> Iterator[Layout]:
    """Yield the layouts of a number of devices: in training those that divide the model and the batch."""
    sizes = divided_by_mesh(work.model)

    def fits(layout: Layout) -> bool:
        rows = layout.over(work.rules.over("batch"))
        return work.kind != "train" or (work.batch % rows == 0 and layout_choice.divides(layout, work.rules, sizes))

    return layout_choice.layouts(devices, work.rules, fits)


def search(work: Workload, target: Target, held: Collection[str] = ()) -> list[Plan]:
    """Plans of a workload that fit, the fastest first; for training over the `variants` of each mesh."""
    found = []
    for layout in layouts(work, target.devices):
        for candidate in variants(replace(work.on(target.chip), layout=layout), held):
            if memory(candidate).total <= target.chip.device_capacity():
                found.append(plan(candidate, target))
    return sorted(found, key=lambda p: p.time.expected)


def variants(work: Workload, held: Collection[str] = ()) -> Iterator[Workload]:
    """A workload over `microbatches` and `remat`, on its mesh; those of the two that are `held` stay as they are."""
    if work.kind != "train":
        yield work
        return
    named = dict.fromkeys(device_step(work).recording.names.values())
    names = tuple(name for name in named if name != "attention")  # its kernel keeps more than that
    rows = work.batch // work.batch_shards
    parts = (work.microbatches,) if "microbatches" in held else [2**n for n in range(rows.bit_length())]
    remats = (work.remat,) if "remat" in held else ("none", names, "full")
    for microbatches in parts:
        for remat in remats if rows % microbatches == 0 else ():
            yield replace(work.with_execution(remat=remat), microbatches=microbatches)
