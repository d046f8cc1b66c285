"""Which mesh, microbatches and rematerialisation are fastest of those that fit."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.step.memory import memory
from jaxlm.costs.workload import MeshShape, Workload, divided_by_mesh, divisors


def meshes(work: Workload, devices: int) -> Iterator[MeshShape]:
    """The factorings of a number of devices that divide the model and the batch."""
    for tensor in divisors(devices):
        for fsdp in divisors(devices // tensor):
            mesh = MeshShape(devices // tensor // fsdp, fsdp, tensor)
            fits = all(size % mesh.axes()[axis] == 0 for axis, _, size in divided_by_mesh(work.model))
            if fits and (work.kind != "train" or work.batch % (mesh.data * mesh.fsdp) == 0):
                yield mesh


def search(work: Workload, target: Target, held: Collection[str] = ()) -> list[Plan]:
    """Plans of a workload that fit, the fastest first; for training over the `variants` of each mesh."""
    found = []
    for mesh in meshes(work, target.devices):
        for candidate in variants(replace(work.on(target.chip), mesh=mesh), held):
            if memory(candidate, target.chip.kind).total <= target.chip.device_capacity():
                found.append(plan(candidate, target))
    return sorted(found, key=lambda p: p.time.expected)


def variants(work: Workload, held: Collection[str] = ()) -> Iterator[Workload]:
    """A workload over `microbatches` and `remat`, on its mesh; those of the two that are `held` stay as they are."""
    if work.kind != "train":
        yield work
        return
    names = ("query", "key", "value", "up") + (("gate",) if work.model.feed_forward.gated else ())
    rows = work.batch // (work.mesh.data * work.mesh.fsdp)
    parts = (work.microbatches,) if "microbatches" in held else [2**n for n in range(rows.bit_length())]
    remats = (work.remat,) if "remat" in held else ("none", names, "full")
    for microbatches in parts:
        for remat in remats if rows % microbatches == 0 else ():
            yield replace(work, microbatches=microbatches, remat=remat)
