"""Products with quantised matrices."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.bias import BIAS, broadcast_bias
from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, Product, ProductKernel, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.heads import kv_heads, repeat_heads
from jaxlm.models.logical_axes import Axes
from jaxlm.models.parameters import axes_of
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.partition import shards_of
from jaxlm.parallel.rules import GROUPS
from kernels_pallas.core import target
from kernels_pallas.core.quantized import serving
from kernels_pallas.quantized_matmul import KINDS, costs, quantized_matmul

_ROWS = 2  # on a CPU one row is multiplied with another beside it
_SUM_BYTES = 4  # of the sum of products of int8, which is int32


def _signature(
    x: jax.Array,
    matrix: QuantizedMatrix,
    bias: nnx.Param | None,
    num_query_heads: int | None,
    axes: Axes,
    rows: Axes,
) -> Signature:
    outputs = matrix.values[...].shape[1:]
    weights = [(p[...], axes_of(p)) for p in (matrix.values, matrix.scales, bias) if p is not None]
    y = jax.ShapeDtypeStruct((*x.shape[: x.ndim - len(matrix.inputs)], *outputs), x.dtype)
    operands = [(x, (*rows, *(f"act_{axis}" for axis in matrix.inputs))), *weights]
    options = {"num_query_heads": num_query_heads, "inputs": len(matrix.inputs), "kind": matrix.kind}
    return Signature(operands, [(y, axes)], options, of=matrix)


def declare(local: Local) -> DoorCost:
    """Return the cost of a product of rows with values and scales, and perhaps of adding a bias."""
    x, values, scales, *bias = local.operands
    (y,) = local.results
    inputs, kind = local.options["inputs"], local.options["kind"]
    rows, k, n = math.prod(x.shape[:-inputs]), math.prod(x.shape[-inputs:]), math.prod(values.shape[1:])
    product = Product(1, max(rows, _ROWS) if local.platform == "cpu" else rows, k, n)
    passes = tuple(loop(BIAS, y, "bias", rows * n, kind="bias") for _ in bias)
    contracted = 1, range(1)
    if (kernel := _kernel(local)) is not None:
        flat = x._replace(shape=(rows, k)), *(each._replace(shape=(each.shape[0], n)) for each in (values, scales))
        of_kernel = costs(*(each.abstract for each in flat), kind=kind)
        declared = ProductKernel(kernel, of_kernel, (), ((x.is_trained, False),))
        return DoorCost((DoorProduct(product, 0, weight=1),), declared, passes, contracted=contracted)
    moved = x.itemsize * rows * k + values.bytes + scales.bytes + y.itemsize * rows * n
    if KINDS[kind].rounds_rows:
        unfused, dtype = 2 * rows * k + 2 * _SUM_BYTES * rows * n, "int8"  # rounded rows and sums are written and read
    else:  # XLA may write the matrix in the dtype of x before it multiplies
        unfused, dtype = 0 if local.platform == "cpu" else 2 * x.itemsize * k * n, None
    products = (DoorProduct(product, moved, unfused, weight=1, dtype=dtype),)
    return DoorCost(products, passes=passes, contracted=contracted)


def _kernel(local: Local) -> str | None:
    """Return the kernel that multiplies, or None where XLA does."""
    _, values, scales, *_ = local.operands
    return served_by(local, values.shape[0], scales.shape[0])


def served_by(local: Local, stored: int, groups: int) -> str | None:
    """Return the kernel that multiplies with a quantised matrix, or with those of experts, of so many rows of values
    and groups of inputs; None where XLA does."""
    kind, name = local.options["kind"], "triton" if local.platform == "gpu" else "mosaic_tpu"
    if not local.kernels or local.platform == "cpu":
        return None
    return name if serving.unsupported_reason(name, kind, False, stored, groups) is None else None


@door(_signature, declare, name="quantized_linear")
def quantized_product(
    x: jax.Array,
    matrix: QuantizedMatrix,
    bias: nnx.Param | None,
    num_query_heads: int | None,
    axes: Axes,
    rows: Axes,
) -> jax.Array:
    """Return x · matrix (+ bias), as `linear` does with one that is not quantised."""
    size = matrix.values[...].shape[1]
    copies = 1 if num_query_heads is None else kv_heads(size, num_query_heads) // size
    y = multiplied(x, matrix, rows, copies)
    return y if bias is None else y + broadcast_bias(repeat_heads(bias, 0, copies), y)


def input_shards(kind: str, axis: str, size: int, groups: int, after: Sequence[tuple[str, int]] = ()) -> int:
    """Return how many devices have each a part of a matrix's inputs, of this size and logical axis: 1 where the mesh
    divides no groups of them, of which a byte may hold numbers of both halves. `after`: as in `shards_of`."""
    parts = shards_of(axis, size, after)
    is_whole = groups == 1 and not KINDS[kind].packed
    return parts if is_whole or parts == shards_of(axis + GROUPS, groups, after) else 1


def multiplied(x: jax.Array, matrix: QuantizedMatrix, rows: Axes, copies: int = 1) -> jax.Array:
    """Return x · matrix, outputs so often as there are copies, each device with its own part of the matrix.

    The matrix is multiplied by its outputs where the engine keeps it so. Where the mesh divides a matrix's
    inputs but not their groups, each device has all of both. Of "w8a8", where the mesh divides the inputs, each device
    rounds its own part of a row, by that part's scale.
    """
    kept = len(rows)
    values, scales = repeat_heads(matrix.values, 1, copies), repeat_heads(matrix.scales, 1, copies)
    contracted = f"act_{matrix.inputs[0]}"
    of_outputs = tuple(f"act_{axis}" for axis in matrix.outputs)
    groups = len(scales)
    parts = input_shards(matrix.kind, contracted, x.shape[kept], groups)
    first = contracted if parts > 1 else None
    by_outputs = Quantization(matrix.kind).by_outputs(target.platform())
    multiply = partial(
        quantized_matmul, kind=matrix.kind, by_outputs=by_outputs, implementation=kernels.implementation()
    )

    def local(x: jax.Array, values: jax.Array, scales: jax.Array) -> tuple[jax.Array]:
        sizes, own = x.shape[:kept], values.shape[1:]
        stored = [each.reshape(len(each), -1) for each in (values, scales)]
        y = multiply(x.reshape(*sizes, -1), *(each.T if by_outputs else each for each in stored))
        return (y.reshape(*sizes, *own)[None],)

    of_scales = None if first is None or groups == 1 else first + GROUPS
    operands = (
        (x, (*rows, first, *(f"act_{axis}" for axis in matrix.inputs[1:]))),
        (values, (first, *of_outputs)),
        (scales, (of_scales, *of_outputs)),
    )
    (y,) = on_each_device(local, *operands, results=[(first, *rows, *of_outputs)])
    return jax.lax.reduce(y, jnp.zeros((), y.dtype), jax.lax.add, (0,)) if parts > 1 else y[0]
