"""The look-up of a table's rows."""

import jax
from flax import nnx

from jaxlm.models.doors.door import Signature, door
from jaxlm.models.embedding import looked_up
from jaxlm.models.logical_axes import GATHERED, RESIDUAL
from jaxlm.parallel.partition import by_shards, constrain


def _signature(table: nnx.Param, index_BT: jax.Array) -> Signature:
    x_BTD = jax.ShapeDtypeStruct((*index_BT.shape, table.shape[1]), table[...].dtype)
    return Signature([(table[...], table.axes), (index_BT, GATHERED[:2])], [(x_BTD, RESIDUAL)], of=table)


@door(_signature, pinned=True)
def look_up(table: nnx.Param, index_BT: jax.Array) -> jax.Array:
    """Return the rows of a table [rows, D] at these indices, as [B, T, D].

    The table is gathered in D first: left to itself, the partitioner gathers the ids and then moves the activations
    instead. The sequence is sharded only after the look-up: otherwise the rows would be gathered.
    """
    rows_PRD = by_shards(constrain(table[...], table.axes[0], "act_embed"), table.axes[0])
    return constrain(looked_up(rows_PRD, index_BT), *GATHERED)
