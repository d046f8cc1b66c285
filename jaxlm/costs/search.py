"""Search for the fastest mesh, microbatches and rematerialisation that fit."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from jaxlm.config import divided_by_mesh, divisors
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import AXES, Layout


def layouts(work: Workload, devices: int) -> Iterator[Layout]:
    """Yield the layouts of a number of devices: in training those that divide the model and the batch."""
    for layout in _factorings(devices, AXES):
        if work.kind == "train":
            fits = all(size % layout[axis] == 0 for axis, _, size in divided_by_mesh(work.model))
            fits = fits and work.batch % layout.over(work.rules.over("batch")) == 0
        else:  # an axis that shards sequences alone is `data`, whatever its name
            fits = layout["fsdp"] == 1 or "fsdp" in work.rules.over("embed")
        if fits:
            yield layout


def _factorings(devices: int, axes: Sequence[str]) -> Iterator[Layout]:
    """Yield every layout of a number of devices over some axes, the innermost growing last."""
    outermost, *others = axes
    if not others:
        yield Layout({outermost: devices})
        return
    innermost = others[-1]
    for size in divisors(devices):
        for rest in _factorings(devices // size, axes[:-1]):
            yield rest.replace(**{innermost: size})


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
    named = dict.fromkeys(device_step(work).found.names.values())
    names = tuple(name for name in named if name != "attention")  # its kernel keeps more than that
    rows = work.batch // work.batch_shards
    parts = (work.microbatches,) if "microbatches" in held else [2**n for n in range(rows.bit_length())]
    remats = (work.remat,) if "remat" in held else ("none", names, "full")
    for microbatches in parts:
        for remat in remats if rows % microbatches == 0 else ():
            yield work.with_training(microbatches=microbatches, remat=remat)
