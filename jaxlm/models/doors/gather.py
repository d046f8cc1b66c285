"""The gathering of rows in front of a block."""

import jax

from jaxlm.models.doors.cost import DoorCost
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import GATHERED, RESIDUAL, Axes
from jaxlm.parallel.partition import constrain


def _signature(x_BTD: jax.Array, before: Axes = RESIDUAL, after: Axes = GATHERED) -> Signature:
    return Signature([(x_BTD, before)], [(x_BTD, after)])


@door(_signature, lambda local: DoorCost(relays=True), pinned=True)
def gather(x_BTD: jax.Array, before: Axes = RESIDUAL, after: Axes = GATHERED) -> jax.Array:
    """Return the normalised residual [B, T, D], or what was made of it token by token, gathered in its present dtype
    from where it lies by the logical axes `before` to where it lies by `after`."""
    # Without this constraint the partitioner gathers before the cast from float32.
    return constrain(x_BTD, *before)
