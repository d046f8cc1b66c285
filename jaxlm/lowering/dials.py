"""What to turn where a step does not fit, by what counting says of each dial."""

from collections.abc import Iterator
from dataclasses import replace

from jaxlm.costs.memory import memory
from jaxlm.costs.plan import Plan
from jaxlm.costs.workload import Workload


def dials(plan: Plan, needed: int) -> list[str]:
    """Each dial that may make a step fit which needs this many bytes on a device, with what it would need then: as much
    less as counting says. All of them where none alone is enough; the cheapest first."""
    now = memory(plan.work).total
    turned = [(said, round(needed * memory(work).total / now)) for said, work in _turned(plan.work)]
    enough = [(said, size) for said, size in turned if size <= plan.capacity]
    less = [(said, size) for said, size in turned if size < needed]
    return [f"{said} ({size / 2**30:.1f} GiB)" for said, size in enough or less]


def _turned(work: Workload) -> Iterator[tuple[str, Workload]]:
    mesh = work.mesh
    if work.kind == "train":
        rows = work.rows()
        if work.remat != "full":
            yield "training.remat=full", replace(work, remat="full")
        if rows > 1:
            fewer = replace(work, microbatches=work.microbatches * rows)
            yield f"training.microbatches={fewer.microbatches}", fewer
            if work.remat != "full":
                yield f"both, training.microbatches={fewer.microbatches}", replace(fewer, remat="full")
    parts = mesh.data * mesh.fsdp
    if work.batch >= 2 * parts * work.microbatches:
        yield f"training.batch={parts * work.microbatches}", replace(work, batch=parts * work.microbatches)
    for times in (2, 4, 8):
        if work.model.width % (mesh.fsdp * times) == 0:
            more = replace(work, mesh=replace(mesh, fsdp=mesh.fsdp * times))
            if work.kind == "train":  # as many rows on each device
                more = replace(more, batch=work.batch * times)
            yield f"{times} times the chips on fsdp", more
    if work.sequence > 1024:
        yield f"training.sequence={work.sequence // 2}", replace(work, sequence=work.sequence // 2)
