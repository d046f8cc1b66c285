"""The copies that a loop over layers makes of what its layers keep for the backward pass.

A loop keeps the values of all its layers in stacks. On a GPU their makers and readers are kernels and products, which
work on arrays of their own: each value is copied into its stack and out of it again. Without an option that jaxlm sets
for GPUs (`jaxlm.parallel.compiler_options`) the stacks are filled with zeros first. Slices of parameters and stacks of
their gradients are not counted: written-out layers copy them too.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.layer_memory import kept_by_layer
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.memoized import memoized
from jaxlm.parallel.compiler_options import NO_ZERO_FILL, options


class StackCopies(NamedTuple):
    """Bytes that the loops over layers read and write in one pass, beyond what written-out layers do.

    `filled`: zeros, before the loops. `into`, `out_of`: copies in the forward and in the backward pass.
    """

    filled: int
    into: int
    out_of: int


# Passes over a kept byte: zeros written; a copy into a stack, read and written; a copy out of it, for a kernel or a
# product (XLA's own element-wise code reads a stack in place). As JAX 0.10.2 and 0.11.2 compile for an H100, read on
# 27 November 2026. Products on a TPU write and read a stack in place (libtpu 0.0.42.1): of what is copied there, the
# results of kernels, nothing is counted. A CPU's passes are not counted either.
_PASSES = {"gpu": StackCopies(1, 2, 2)}


@memoized
def stack_copies(device: DeviceStep) -> StackCopies:
    """Return what the loops over layers of a training step copy in each microbatch; nothing where layers are written
    out, or keep nothing."""
    work, recording = device.work, device.recording
    passes = _PASSES.get(work.platform)
    if passes is None or work.kind != "train" or not work.execution.in_loop:
        return StackCopies(0, 0, 0)
    stacked = copied_out = 0
    for layer, kept in enumerate(kept_by_layer(device)):
        uses = recording.by_layer[layer]
        if (times := uses[0].times) > 1:
            stacked += times * kept.total
            copied_out += times * sum(device.bytes[value] for value in kept.values & _read_by_kernels(device, uses))
    filled = 0 if _leaves_stacks_unfilled(device) else passes.filled * stacked
    return StackCopies(filled, passes.into * stacked, passes.out_of * copied_out)


def _read_by_kernels(device: DeviceStep, uses: Sequence[RecordedOp]) -> set[int]:
    """Return the values that kernels and products of a layer's backward pass read: those of doors whose gradient needs
    them, and of doors that run again."""
    values: set[int] = set()
    for use in uses:
        cost = device.cost(use)
        if cost.products or cost.traced or any(each.kernel for each in cost.passes):
            values.update(map(device.same, device.saved(use)))
            if device.work.remat != "none":
                values.update(map(device.same, use.operands))
    return values


def _leaves_stacks_unfilled(device: DeviceStep) -> bool:
    work = device.work
    return bool(options(work.platform, work.layout.size, work.execution.compiler_options).get(NO_ZERO_FILL))
