"""Products of each head with a matrix of its own."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, Product
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import HEADS
from jaxlm.models.parameters import axes_of
from jaxlm.models.quantized_matrix import QuantizedMatrix
from kernels_pallas.core import target

_ROWS = 2  # of a single row XLA for CPUs adds up the products in another order


Matrix = nnx.Param | QuantizedMatrix


def _axes(matrix: Matrix) -> tuple[str, ...]:
    return (*matrix.inputs, *matrix.outputs) if isinstance(matrix, QuantizedMatrix) else axes_of(matrix)


def _signature(x_BTNI: jax.Array, matrix: Matrix, inputs: str) -> Signature:
    if isinstance(matrix, QuantizedMatrix):
        parts, sizes = (matrix.values, matrix.scales), (*matrix.input_sizes, *matrix.values[...].shape[1:])
    else:
        parts, sizes = (matrix,), matrix[...].shape
    ((outputs, size),) = (each for each in zip(_axes(matrix), sizes, strict=True) if each[0] not in ("heads", inputs))
    y_BTNO = jax.ShapeDtypeStruct((*x_BTNI.shape[:3], size), x_BTNI.dtype)
    operands = [(x_BTNI, (*HEADS[:3], f"act_{inputs}")), *((each[...], axes_of(each)) for each in parts)]
    return Signature(operands, [(y_BTNO, (*HEADS[:3], f"act_{outputs}"))], of=matrix)


def _declare(local: Local) -> DoorCost:
    (x, *matrix), (y,) = local.operands, local.results
    rows, heads = _padded(math.prod(x.shape[:2]), local.platform), x.shape[2]
    product = Product(heads, rows, x.shape[3], y.shape[3])
    moved = sum(each.bytes for each in matrix) + rows * heads * (x.shape[3] * x.itemsize + y.shape[3] * y.itemsize)
    unfused = 2 * x.itemsize * heads * product.k * product.n if len(matrix) > 1 else 0  # written in the dtype of x
    return DoorCost(products=(DoorProduct(product, moved, unfused, weight=1),))


def _padded(rows: int, platform: str | None) -> int:
    return max(rows, _ROWS) if platform in ("cpu", None) else rows


@door(_signature, _declare, pinned=True)
def by_head(x_BTNI: jax.Array, matrix: Matrix, inputs: str) -> jax.Array:
    """Return x [B, T, N, I] · matrix [N, I, O] of each head, [B, T, N, O], in x's dtype; for a step without gradients.

    On a CPU each row is computed in one way, however many there are, where the matrix lies as [N, I, O].

    Args:
      matrix: of three axes in any order, of which one is "heads"; a quantised one is widened to x's dtype.
      inputs: the axis of it that is summed over.
    """
    axes = _axes(matrix)
    (outputs,) = (axis for axis in axes if axis not in ("heads", inputs))
    stored = matrix.widened().astype(x_BTNI.dtype) if isinstance(matrix, QuantizedMatrix) else matrix[...]
    weights_NIO = jnp.transpose(stored, [axes.index(axis) for axis in ("heads", inputs, outputs)])
    if isinstance(matrix, QuantizedMatrix) and target.platform() == "cpu":
        weights_NIO = jax.lax.optimization_barrier(weights_NIO)  # or it would lie in another order
    B, T, N, I = x_BTNI.shape  # noqa: E741
    x_RNI = x_BTNI.reshape(B * T, N, I)
    x_RNI = jnp.pad(x_RNI, [(0, _padded(B * T, target.platform()) - B * T), (0, 0), (0, 0)])
    y_RNO = jnp.einsum("rni,nio->rno", x_RNI, weights_NIO)
    return y_RNO[: B * T].reshape(B, T, N, -1)
