"""Rotary positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models import kernels
from jaxlm.models.doors.cost import DoorCost, InPlace, Local, Loop, Pass, launched, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import Axes
from kernels_pallas import rotary_embedding
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.rotary_embedding import costs


class RopeTable(NamedTuple):
    """cos and sin of the rotary angles, float32 [B, T, R/2]: the first R channels of each head rotate."""

    cos: jax.Array
    sin: jax.Array


def rope(x_BTNH: jax.Array, axes: Axes, table: RopeTable | None) -> jax.Array:
    """Rotate the pairs (x[i], x[i + R/2]) of x, which has these logical axes, by the table's angles; float32 inside.

    Channels from R on pass. Without a table it is x.
    """
    return x_BTNH if table is None else _rotate(x_BTNH, axes, table)


def _signature(x_BTNH: jax.Array, axes: Axes, table: RopeTable) -> Signature:
    angles = *axes[:2], None
    return Signature([(x_BTNH, axes), (table.cos, angles), (table.sin, angles)], [(x_BTNH, axes)])


_LOOP = Loop(0, 0, 2), Loop(0, 0, 2)  # its FLOPs are in those of the softmax


def _declare(local: Local) -> DoorCost:
    x = local.operands[0]
    if not local.kernels:
        return DoorCost(passes=(loop(_LOOP, x, "rope", kind="rope"),), in_place=InPlace(backward=True))
    angles = [each.abstract for each in local.operands[1:]]
    first = x._replace(shape=(*x.shape[:-1], 2 * angles[0].shape[-1]))
    passes = [launched(costs(first.abstract, *angles), "rope", kind="rope")]
    if first.numbers < x.numbers:  # the kernel's operand is cut out, and its result joined with the others
        moved = KernelCost(bytes=2 * (first.bytes + x.bytes))
        passes.append(Pass(moved, moved, "rope"))
    return DoorCost(passes=tuple(passes))


@door(_signature, _declare, name="rope")
def _rotate(x_BTNH: jax.Array, axes: Axes, table: RopeTable) -> jax.Array:
    width, angles = 2 * table.cos.shape[-1], (*axes[:2], None)
    first = x_BTNH if width == x_BTNH.shape[-1] else x_BTNH[..., :width]
    rotated = kernels.run(rotary_embedding, (first, axes), (table.cos, angles), (table.sin, angles))
    return rotated if first is x_BTNH else jnp.concatenate([rotated, x_BTNH[..., width:]], axis=-1)
