"""The arrays of a pipeline: what passes between its stages, what they keep of it, and weights that move to slots."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs import local_shapes
from jaxlm.costs.counted.collective import Collective
from jaxlm.costs.workload import Workload
from jaxlm.models.logical_axes import RESIDUAL


class SlotNumbers(NamedTuple):
    """Numbers on one device of the matrices that a step moves from where they are stored to the slots of its stage,
    before and after; none where they are stored there."""

    stored: int
    in_slots: int


def residual_bytes(work: Workload) -> int:
    """Return the bytes of the residual of a microbatch on one device, as it passes between stages."""
    return work.itemsize * math.prod(local_shapes.local_shape(work, RESIDUAL, (1, work.sequence, work.model.d_model)))


def kept_bytes(work: Workload) -> int:
    """Return the bytes that a stage keeps: inputs of microbatches for their backward pass, and what arrived from both
    neighbours and what enters the first stage next."""
    return 0 if work.stages == 1 else (work.ticks.kept + 3) * residual_bytes(work)


def slot_numbers(work: Workload) -> SlotNumbers:
    """Return the numbers of the matrices that move to slots."""
    staged = work.stage_layers
    if not staged.moves and not staged.exchanges:
        return SlotNumbers(0, 0)
    stored = in_slots = 0
    for path, d in work.parameters.items():
        if path.startswith(staged.path) and d.inputs and path not in work.base:
            slots = (staged.slots * work.stages * work.rounds, *d.shape[1:])
            stored += local_shapes.stored(work, d.axes, d.shape)
            in_slots += local_shapes.stored(work, d.axes, slots)
    return SlotNumbers(stored, in_slots)


def between_stages(work: Workload) -> Iterator[Collective]:
    """Yield what stages send one another: the residual to the next in each forward pass, its gradient to the one before
    in each backward pass; what the last stage gives to all, whose vocabulary is shared, and the gradient that the first
    one gives; and once in a step weights to their slots, and gradients back, where they are stored elsewhere.

    Behind the forward pass of a tick its backward pass runs.
    """
    over, size = work.several(work.rules.over("layers")), residual_bytes(work)
    passes, alone = work.stage_passes, work.ticks.alone if work.counts_idle else 0
    yield Collective("collective-permute", over, passes, size, "stages", "backward", alone)
    yield Collective("collective-permute", over, passes, size, "stages")
    yield Collective("all-reduce", over, work.microbatches, size, "stages")
    yield Collective("all-reduce", over, work.end_passes, size, "stages")
    staged, moved = work.stage_layers, slot_numbers(work).in_slots
    for itemsize in (work.itemsize, 4):
        chunk = itemsize * moved // work.rounds
        yield Collective("collective-permute", over, staged.exchanges, chunk, "slots")
        yield Collective("all-to-all", over, staged.moves, itemsize * moved, "slots")
