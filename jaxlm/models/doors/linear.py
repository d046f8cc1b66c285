"""Products with matrices, with the biases and the adapters that they have."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models.adapted_matrix import AdaptedMatrix
from jaxlm.models.doors.bias import BIAS, broadcast_bias
from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, Product, Saved, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.elementwise import scale
from jaxlm.models.doors.gather import gather
from jaxlm.models.doors.heads import kv_heads, repeat_heads
from jaxlm.models.doors.quantized_linear import quantized_product
from jaxlm.models.logical_axes import GATHERED, RESIDUAL, Axes
from jaxlm.models.multi_adapted_matrix import MultiAdaptedMatrix
from jaxlm.models.parameters import RANK, axes_of
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.parallel.partition import constrain, is_sharded
from kernels_pallas.core import target
from kernels_pallas.core.one_column import times_column


def linear(
    x: jax.Array,
    *matrices: nnx.Param | QuantizedMatrix | AdaptedMatrix,
    biases: Sequence[nnx.Param | None] = (),
    names: Sequence[str] = (),
    num_query_heads: int | None = None,
    gathers: bool = True,
) -> tuple[jax.Array, ...]:
    """Return x [B, T, *inputs] · matrix [*inputs, *outputs] (+ bias [*outputs]) of each matrix, in x's dtype; of one
    with an adapter x·W + scale · (x·A)·B. A matrix, with an adapter or without, may be quantised.

    The axes that a matrix declares say which are inputs, and how its result [B, T, *outputs] is sharded. The residual
    is gathered once for all matrices that read it, and what is added to the residual is scattered again.

    Args:
      biases: one for each matrix, or None; none has one where this is empty.
      names: of the results, for rematerialisation; none has one where this is empty.
      num_query_heads: query heads that read the key/value heads. Where devices hold fewer of those than they need, each
        is computed and kept by all devices whose query heads read it.
      gathers: False lets each device multiply its part of the residual, and results lie as this does.
    """
    bases = [matrix.base if isinstance(matrix, AdaptedMatrix) else matrix for matrix in matrices]
    if bases[0].inputs == ("embed",) and gathers:
        x = gather(x)
    query_heads = [num_query_heads if "kv_heads" in _outputs(matrix) else None for matrix in bases]
    # Adapters come first, so that the gradients of x by the other matrices follow one another: these are parts of sums
    # over devices, which are then added once.
    added = [
        _adapted(x, matrix, _result_axes(base, gathers), heads) if isinstance(matrix, AdaptedMatrix) else None
        for matrix, base, heads in zip(matrices, bases, query_heads, strict=True)
    ]
    results = []
    for i, (base, matrix) in enumerate(zip(bases, matrices, strict=True)):
        axes, of_adapter = _result_axes(base, gathers), added[i]
        with nullcontext() if matrix is base else jax.named_scope(matrix.name or ""):
            rows = GATHERED[:2] if gathers else axes[:2]
            further = biases[i] if biases else None, query_heads[i], axes, rows
            if isinstance(base, QuantizedMatrix):
                y = quantized_product(x, base, *further)
            else:
                y = _product(x, base, *further)
            if axes == RESIDUAL and is_sharded("sequence"):
                # Left to itself, the partitioner gathers tokens, or moves their gradients to the channels of matrices.
                y = constrain(y, *GATHERED)
            if names or axes == RESIDUAL or not gathers:
                y = constrain(y, *axes)
            if of_adapter is not None:
                y = matrix.added(y, of_adapter) if isinstance(matrix, MultiAdaptedMatrix) else y + of_adapter
        results.append(checkpoint_name(y, names[i]) if names else y)
    return tuple(results)


def _adapted(x: jax.Array, matrix: AdaptedMatrix, axes: Axes, num_query_heads: int | None) -> jax.Array:
    """Return scale · (x·A)·B, with these logical axes: each device computes its part of the residual from its part of
    x·A. Of several adapters it is that of each row's own."""
    rows = axes[:2]
    narrow = *rows, f"act_{RANK}"
    with jax.named_scope(matrix.name or ""):
        x_BTR = constrain(_product(x, matrix.a, None, axes=narrow), *narrow)
        x_BTR = matrix.own(x_BTR) if isinstance(matrix, MultiAdaptedMatrix) else scale(x_BTR, matrix.scale, narrow)
        return constrain(_product(x_BTR, matrix.b, None, num_query_heads, axes, rows), *axes)


def _outputs(matrix: nnx.Param | QuantizedMatrix) -> Axes:
    """Return the axes that a matrix makes."""
    return matrix.outputs if isinstance(matrix, QuantizedMatrix) else axes_of(matrix)[len(matrix.inputs) :]


def _result_axes(matrix: nnx.Param | QuantizedMatrix, gathers: bool) -> Axes:
    """Return the logical axes of a product with a matrix: what is as wide as the residual is added to it."""
    outputs, rows = _outputs(matrix), GATHERED[:2] if gathers else RESIDUAL[:2]
    return RESIDUAL if outputs == ("embed",) else (*rows, *(f"act_{axis}" for axis in outputs))


def _signature(
    x: jax.Array,
    matrix: nnx.Param,
    bias: nnx.Param | None,
    num_query_heads: int | None = None,
    axes: Axes = (),
    rows: Axes = GATHERED[:2],
) -> Signature:
    inputs = len(matrix.inputs)
    outputs = matrix[...].shape[inputs:]
    weights = [(p[...], axes_of(p)) for p in (matrix, bias) if p is not None]
    y = jax.ShapeDtypeStruct((*x.shape[: x.ndim - inputs], *outputs), x.dtype)
    operands = [(x, (*rows, *(f"act_{axis}" for axis in matrix.inputs))), *weights]
    return Signature(operands, [(y, axes)], {"num_query_heads": num_query_heads, "inputs": inputs}, of=matrix)


def _declare(local: Local) -> DoorCost:
    x, matrix, *bias = local.operands
    (y,) = local.results
    inputs = local.options["inputs"]
    rows, k, n = math.prod(x.shape[:-inputs]), math.prod(matrix.shape[:inputs]), math.prod(matrix.shape[inputs:])
    moved = x.itemsize * rows * k + matrix.itemsize * k * n + y.itemsize * rows * n
    return DoorCost(
        products=(DoorProduct(Product(1, rows, k, n), moved, weight=1),),
        passes=tuple(loop(BIAS, y, "bias", rows * n, kind="bias") for _ in bias),
        saved=Saved((0,) if matrix.is_trained else ()),
        contracted=(1, range(inputs)),
    )


@door(_signature, _declare, name="linear")
def _product(
    x: jax.Array,
    matrix: nnx.Param,
    bias: nnx.Param | None,
    num_query_heads: int | None = None,
    axes: Axes = (),
    rows: Axes = GATHERED[:2],
) -> jax.Array:
    """Return x · matrix (+ bias), where there are query heads with each key/value head as often as they need it.

    On a CPU it is one [B·T, I] × [I, O] product where T is not sharded: XLA's code for it is a third faster than for
    the batched form. On a GPU nothing is reshaped: what a loop over layers keeps for the backward pass is then x as
    other operations keep it, once, and the weights that it takes slices of, not a copy of them.

    Args:
      axes: the logical axes of the result.
      rows: the first logical axes of x.
    """
    contracted = len(matrix.inputs)
    sizes, inputs = x.shape[: x.ndim - contracted], math.prod(matrix.shape[:contracted])
    size = matrix[...].shape[contracted]
    copies = 1 if num_query_heads is None else kv_heads(size, num_query_heads) // size
    weights = repeat_heads(matrix, contracted, copies)
    outputs = weights.shape[contracted:]
    if target.platform() == "gpu" and axes_of(matrix)[contracted:] == ("heads",):
        # XLA merges products with one operand; beside a matrix as narrow as this by a copy of all their weights.
        x = jax.lax.optimization_barrier(x)
    if weights.size == inputs and x.dtype == jnp.float32 and target.platform() == "cpu":
        y = times_column(x.reshape(*sizes, inputs), weights.reshape(inputs)).reshape(*sizes, *outputs)
    elif is_sharded("residual") or target.platform() == "gpu":
        y = jnp.tensordot(x, weights, contracted)
    else:
        y = jnp.matmul(x.reshape(-1, inputs), weights.reshape(inputs, -1))
        y = y.reshape(*sizes, *outputs)
    return y if bias is None else y + broadcast_bias(repeat_heads(bias, 0, copies), y)
