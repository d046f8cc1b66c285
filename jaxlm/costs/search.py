"""Search for the best mesh, microbatches and rematerialisation that fit."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from jaxlm.config import divided_by_mesh, divides_heads
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import resolved
from jaxlm.costs.plan import HEADROOM, Plan, plan
from jaxlm.costs.plan_order import FASTEST, PlanOrder
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.stack_memory import least_memory, stack_memory
from jaxlm.costs.workload import Workload
from jaxlm.parallel import layout_choice
from jaxlm.parallel.layout import Layout, can_cross

# The settings that a search varies, by their keys.
VARIED = {"microbatches": "training.microbatches", "remat": "execution.remat"}


def layouts(work: Workload, devices: int, slices: int = 1) -> Iterator[Layout]:
    """Yield the layouts of a number of devices that divide the heads, and in training the model and the batch, and that
    may lie on several slices (`can_cross`). None has several devices on the axes of layers or of the sequence."""
    sizes = divided_by_mesh(work.model)

    def fits(layout: Layout) -> bool:
        if not can_cross(layout, slices) or (work.local_sgd and layout.over(work.rules.replicas) == 1):
            return False
        rows = layout.over(work.rules.over("batch"))
        if layout.over([axis for name in ("layers", "sequence") for axis in work.rules.over(name)]) > 1:
            return False
        if work.kind != "train":
            return all(divides_heads(layout, model) for model in work.models)
        return work.batch % rows == 0 and layout_choice.divides(layout, work.rules, sizes)

    axes = {axis for d in work.parameters.values() for axis in d.axes}
    return layout_choice.layouts(devices, work.rules, fits, axes)


def search(
    work: Workload, target: Target, fixed: Collection[str] = (), order: PlanOrder = FASTEST, stack: Stack = JAXLM
) -> list[Plan]:
    """Return the plans of a workload that leave `HEADROOM`, the best first; in training those of all `variants` on each
    mesh. Where none leaves it, return those that fit at all."""
    capacity = target.chip.device_capacity()
    tight, roomy = [], []
    for layout in layouts(work, target.part(stack.pipeline.stages).devices, target.slices):
        on_mesh = replace(work.on(target.chip), layout=layout)
        if work.kind == "train" and least_memory(on_mesh, stack).total > capacity:
            continue
        for candidate in variants(on_mesh, fixed):
            total = stack_memory(resolved(candidate, capacity, stack), stack).total
            if total <= capacity:
                (roomy if total <= (1 - HEADROOM) * capacity else tight).append(candidate)
    return order.ordered(plan(candidate, target, stack) for candidate in roomy or tight)


def smallest(work: Workload, target: Target, fixed: Collection[str] = (), stack: Stack = JAXLM) -> Memory | None:
    """Return the memory of the smallest plan that `search` considers; None where no mesh divides the workload. Where
    parameters, gradients and optimizer state alone are too much for a device, it is that of these."""
    sizes, capacity = [], target.chip.device_capacity()
    for layout in layouts(work, target.part(stack.pipeline.stages).devices, target.slices):
        on_mesh = replace(work.on(target.chip), layout=layout)
        if work.kind == "train" and (state := least_memory(on_mesh, stack)).total > capacity:
            sizes.append(state)
            continue
        sizes += (stack_memory(resolved(each, capacity, stack), stack) for each in variants(on_mesh, fixed))
    return min(sizes, key=lambda size: size.total, default=None)


def variants(work: Workload, fixed: Collection[str] = ()) -> Iterator[Workload]:
    """Yield a workload with other `microbatches` and `remat` on its mesh; settings named in `fixed` do not vary.

    `remat` keeps everything, all named activations, those alone that others are made of, nothing, and the activations
    that the workload itself lists.
    """
    if work.kind != "train":
        yield work
        return
    named = dict.fromkeys(device_step(work).recording.names.values())
    names = tuple(name for name in named if name != "attention")  # its kernel keeps more than its result
    sources = tuple(name for name in names if name in work.model.activation_sources)
    rows = work.batch // work.batch_shards
    parts = (work.microbatches,) if "microbatches" in fixed else [2**n for n in range(rows.bit_length())]
    own = [work.remat] if "remat" in fixed or isinstance(work.remat, tuple) else []
    remats = own if "remat" in fixed else dict.fromkeys(["none", names, *[sources] * bool(sources), *own, "full"])
    for microbatches in parts:
        for remat in remats if rows % microbatches == 0 else ():
            yield replace(work.with_execution(remat=remat), microbatches=microbatches)
