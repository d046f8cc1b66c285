"""The gathering of the sequence in front of a block."""

import jax

from jaxlm.models.doors.cost import DoorCost
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import GATHERED, RESIDUAL
from jaxlm.parallel.partition import constrain


@door(
    lambda x_BTD: Signature([(x_BTD, RESIDUAL)], [(x_BTD, GATHERED)]), lambda local: DoorCost(relays=True), pinned=True
)
def gather(x_BTD: jax.Array) -> jax.Array:
    """Return the normalised residual [B, T, D], or what was made of it token by token, with all of T on each device,
    gathered in its present dtype."""
    # Without this constraint the partitioner gathers before the cast from float32.
    return constrain(x_BTD, *RESIDUAL)
