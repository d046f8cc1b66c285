"""The copies that a loop over layers makes of what its layers keep for the backward pass.

A loop keeps the values of all its layers in stacks. On a GPU their makers and readers are kernels and products, which
work on arrays of their own: each value is copied into its stack, and out of it again, and the stacks are filled with
zeros first. Slices of the parameters and the stacks of their gradients are not counted: written-out layers copy them too.
"""

from typing import NamedTuple

from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.layer_memory import kept_by_layer
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import memoized


class StackCopies(NamedTuple):
    """Bytes that the loops over layers read and write in one pass, beyond what written-out layers do.

    `filled`: zeros, before the loops. `into`, `out_of`: copies in the forward and in the backward pass.
    """

    filled: int
    into: int
    out_of: int


# The passes over a kept byte: zeros written; read and written into a stack; read and written out of it for a kernel or a
# product (XLA's own element-wise code reads a stack in place). As JAX 0.10.2 and 0.11.2 compile for an H100, read on
# 27 November 2026. Products on a TPU write and read a stack in place (libtpu 0.0.42.1): of what is copied there, the
# results of kernels, nothing is counted. A CPU's passes are not counted either.
_PASSES = {"gpu": StackCopies(1, 2, 2)}
_NOTHING = StackCopies(0, 0, 0)


@memoized
def stack_copies(device: DeviceStep) -> StackCopies:
    """Return what the loops over layers of a training step copy in each microbatch; nothing where layers are written
    out, or keep nothing."""
    work, recording = device.work, device.recording
    passes = _PASSES.get(work.platform, _NOTHING) if work.kind == "train" and work.execution.in_loop else _NOTHING
    stacked = read = 0
    for layer, kept in enumerate(kept_by_layer(device)):
        uses = recording.by_layer[layer]
        if (times := uses[0].times) > 1:
            stacked += times * kept.total
            read += times * sum(device.bytes[value] for value in kept.values if _is_copied(device, uses, value))
    return StackCopies(passes.filled * stacked, passes.into * stacked, passes.out_of * read)


def _is_copied(device: DeviceStep, uses: list[RecordedOp], value: int) -> bool:
    """Return whether a kernel or a product of the backward pass reads a kept value: one of a door whose gradient needs
    it, or which runs again."""
    runs_again = device.work.remat != "none"
    for use in uses:
        cost = device.cost(use)
        if cost.products or cost.traced or any(each.kernel for each in cost.passes):
            reads = (*device.saved(use), *(use.operands if runs_again else ()))
            if value in {device.same(each) for each in reads}:
                return True
    return False
