"""The napkin rung of the ladder: textbook formulas of a step, from the numbers of parameters and tokens alone."""

import math
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.costs import local_shapes
from jaxlm.costs.counted.flops import active_share, napkin_flops
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.workload import Workload

# Float32 parameter and gradient, and Adam's two moments (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1).
_TRAINED_BYTES = 16


class Napkin(NamedTuple):
    """A napkin estimate of a step.

    `flops`: over the whole job. `memory_bytes`: on one device, 16 per parameter in training, and the size of the dtype
    in inference and for parameters that adapters leave untrained, of quantised ones their own.
    `step_s`: the FLOPs at the chips' peak, or in
    decoding one read of `memory_bytes` at the memory bandwidth, of experts those that the tokens may be expected to
    choose; None if the chips or their peak are unknown.
    """

    flops: int
    step_s: float | None
    memory_bytes: int


def napkin(work: Workload, target: Target | None) -> Napkin:
    """Estimate a workload. A matrix lies on devices as it is counted to, whole where the mesh does not divide it; gains
    and biases, which are small, as if each mesh axis that shards some parameter sharded them too."""
    each = _TRAINED_BYTES if work.kind == "train" else work.itemsize
    shards = work.layout.over(work.rules.of_parameters)
    stored, unread = 0, 0.0  # on so many devices together
    for path, d in work.parameters.items():
        numbers = shards * local_shapes.stored(work, d.axes, d.shape) if d.inputs else math.prod(d.shape)
        stored += numbers * (work.itemsize_of(d) if path in work.base or d.dtype else each)
        if work.kind == "decode" and d.of_experts:
            unread += numbers * each * float(1 - active_share(work, path)) ** work.slots
    flops, size = napkin_flops(work), stored // shards
    if target is None:
        return Napkin(flops, None, size)
    if work.kind == "decode":
        read = (stored - unread) / shards
        return Napkin(flops, read * target.chip.devices_per_chip / target.chip.memory_bytes_per_s, size)
    try:
        return Napkin(flops, flops / (target.chips * target.chip.peak(work.dtype)), size)
    except InputError:  # the chip has no published peak
        return Napkin(flops, None, size)
