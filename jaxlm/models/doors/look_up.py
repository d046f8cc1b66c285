"""The look-up of a table's rows."""

import jax
from flax import nnx

from jaxlm.models.doors.cost import DoorCost, Local, Loop, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.embedding import looked_up
from jaxlm.models.logical_axes import GATHERED, RESIDUAL
from jaxlm.parallel.partition import by_shards, constrain

_LOOK_UP = Loop(0, 0, 2), Loop(1, 0, 3)


def _signature(table: nnx.Param, index_BT: jax.Array) -> Signature:
    x_BTD = jax.ShapeDtypeStruct((*index_BT.shape, table.shape[1]), table[...].dtype)
    operands, by_token = [(table[...], table.axes), (index_BT, GATHERED[:2])], "vocab" in table.axes
    return Signature(operands, [(x_BTD, RESIDUAL)], {"by_token": by_token}, of=table)


def _declare(local: Local) -> DoorCost:
    (_, index), (x,) = local.operands, local.results
    numbers = index.numbers * x.shape[-1]  # of the whole sequence
    # What is looked up once for all rows, as positions are, XLA fuses into what reads it.
    passes = (loop(_LOOK_UP, x, "look-up", numbers),) if local.options["by_token"] else ()
    return DoorCost(passes=passes, contracted=(0, range(1)))


@door(_signature, _declare, pinned=True)
def look_up(table: nnx.Param, index_BT: jax.Array) -> jax.Array:
    """Return the rows of a table [rows, D] at these indices, as [B, T, D].

    The table is gathered in D first: left to itself, the partitioner gathers the ids and then moves the activations
    instead. The sequence is sharded only after the look-up: otherwise the rows would be gathered.
    """
    rows_PRD = by_shards(constrain(table[...], table.axes[0], "act_embed"), table.axes[0])
    return constrain(looked_up(rows_PRD, index_BT), *GATHERED)
