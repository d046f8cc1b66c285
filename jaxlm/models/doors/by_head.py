"""Products of each head with a matrix of its own."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, Product
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import HEADS
from jaxlm.models.parameters import axes_of
from kernels_pallas.core import target

_ROWS = 2  # of a single row XLA for CPUs adds up the products in another order


def _signature(x_BTNI: jax.Array, matrix: nnx.Param, inputs: str) -> Signature:
    (outputs,) = (i for i, axis in enumerate(axes_of(matrix)) if axis not in ("heads", inputs))
    y_BTNO = jax.ShapeDtypeStruct((*x_BTNI.shape[:3], matrix[...].shape[outputs]), x_BTNI.dtype)
    operands = [(x_BTNI, (*HEADS[:3], f"act_{inputs}")), (matrix[...], axes_of(matrix))]
    return Signature(operands, [(y_BTNO, (*HEADS[:3], f"act_{axes_of(matrix)[outputs]}"))], of=matrix)


def _declare(local: Local) -> DoorCost:
    (x, matrix), (y,) = local.operands, local.results
    rows, heads = _padded(math.prod(x.shape[:2]), local.platform), x.shape[2]
    moved = matrix.bytes + rows * heads * (x.shape[3] * x.itemsize + y.shape[3] * y.itemsize)
    return DoorCost(products=(DoorProduct(Product(heads, rows, x.shape[3], y.shape[3]), moved, weight=1),))


def _padded(rows: int, platform: str | None) -> int:
    return max(rows, _ROWS) if platform in ("cpu", None) else rows


@door(_signature, _declare, pinned=True)
def by_head(x_BTNI: jax.Array, matrix: nnx.Param, inputs: str) -> jax.Array:
    """Return x [B, T, N, I] · matrix [N, I, O] of each head, [B, T, N, O], in x's dtype; for a step without gradients.

    On a CPU each row is computed in one way, however many there are, where the matrix lies as [N, I, O].

    Args:
      matrix: of three axes in any order, of which one is "heads".
      inputs: the axis of it that is summed over.
    """
    axes = axes_of(matrix)
    (outputs,) = (axis for axis in axes if axis not in ("heads", inputs))
    weights_NIO = jnp.transpose(matrix[...], [axes.index(axis) for axis in ("heads", inputs, outputs)])
    B, T, N, I = x_BTNI.shape  # noqa: E741
    x_RNI = x_BTNI.reshape(B * T, N, I)
    x_RNI = jnp.pad(x_RNI, [(0, _padded(B * T, target.platform()) - B * T), (0, 0), (0, 0)])
    y_RNO = jnp.einsum("rni,nio->rno", x_RNI, weights_NIO)
    return y_RNO[: B * T].reshape(B, T, N, -1)
