"""The selection of the rows after which tokens are drawn."""

import jax

from jaxlm.models.doors.cost import DoorCost
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import DRAWS, RESIDUAL


def _signature(x_R1D: jax.Array, row_Q: jax.Array) -> Signature:
    selected_Q1D = jax.ShapeDtypeStruct((*row_Q.shape, *x_R1D.shape[1:]), x_R1D.dtype)
    return Signature([(x_R1D, RESIDUAL), (row_Q, DRAWS[:1])], [(selected_Q1D, DRAWS)])


@door(_signature, lambda local: DoorCost())
def select(x_R1D: jax.Array, row_Q: jax.Array) -> jax.Array:
    """Return the rows of x [R, 1, D] at int32 indices [Q], as [Q, 1, D]."""
    return x_R1D[row_Q]
