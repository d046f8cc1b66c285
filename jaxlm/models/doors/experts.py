"""Products of tokens with the matrices of the experts that they chose, without padding or dropping.

Devices that share out the experts gather each other's tokens. Each device sorts the rows of these tokens, one for each
expert of a token, its own experts' first, and walks over the experts that have rows (`kernels_pallas.grouped_matmul`).
Devices that have parts of the experts, or of their hidden channels, send the sums over these.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import kernels
from jaxlm.models.doors.bias import BIAS
from jaxlm.models.doors.cost import (
    DoorCost,
    DoorProduct,
    Exchange,
    Local,
    LocalArray,
    Loop,
    Product,
    ProductKernel,
    Saved,
    Workspace,
    loop,
)
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.quantized_linear import parts_of, served_by
from jaxlm.models.logical_axes import EXPERT_HIDDEN, EXPERT_TOKENS, GATHERED, RESIDUAL, Axes
from jaxlm.models.parameters import axes_of
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.parallel.collectives import Gathers, axes_over, on_each_device, placement
from jaxlm.parallel.partition import constrain, shards_of
from jaxlm.parallel.rules import GROUPS
from kernels_pallas import grouped_matmul, quantized_grouped_matmul
from kernels_pallas.core import target
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.core.quantized.formats import KINDS
from kernels_pallas.grouped_matmul import computed_rows, costs, quantized
from kernels_pallas.paged_attention.costs import SectionReads

_TOKENS: Axes = EXPERT_TOKENS[:2]
_CHOICES: Axes = (*_TOKENS, None)
_OWN: Axes = (*GATHERED[:2], None)  # of a device's own tokens
_ROWS: Axes = EXPERT_HIDDEN[:3]
_SIZES: Axes = (None, None, "act_experts")
# The logical axes of which devices have a part each: of the experts, and of an expert's hidden channels.
_PARTS = ("act_experts", "act_feed_forward")

Experts = nnx.Param | QuantizedMatrix  # [E, outputs, inputs], or values and scales, whose inputs stand first


class ExpertRows(NamedTuple):
    """The rows of a mixture: each token once for each expert that it chose, sorted by expert on each device.

    P: the groups of devices that have tokens of their own. X: the devices of a group, which share out the experts. R:
    the rows on one of them.

    Attributes:
      order_PXR: int32, of each row the choice that it is, an index into the group's [tokens · choices].
      place_PXR: int32, of each choice its row.
      sizes_PXE: int32, the rows of each of the device's experts. Those of others, and of padding, follow after them.
    """

    order_PXR: jax.Array
    place_PXR: jax.Array
    sizes_PXE: jax.Array


def sort_by_expert(index_BTk: jax.Array, is_token_BT: jax.Array, num_experts: int) -> ExpertRows:
    """Return the rows of tokens that chose these experts, int32 [B, T, k]. Padding (`is_token_BT` false) has none."""
    return ExpertRows(*_sort(index_BTk, is_token_BT, num_experts))


def _sort_signature(index_BTk: jax.Array, is_token_BT: jax.Array, num_experts: int) -> Signature:
    B, T, k = index_BTk.shape
    shapes = (B, 1, T * k), (B, 1, T * k), (1, 1, num_experts)
    results = [
        (jax.ShapeDtypeStruct(shape, jnp.int32), axes)
        for shape, axes in zip(shapes, (_ROWS, _ROWS, _SIZES), strict=True)
    ]
    return Signature([(index_BTk, _CHOICES), (is_token_BT, _TOKENS)], results, {"num_experts": num_experts})


_SORT = Loop(0, 8, 0), Loop(0, 0, 0)  # a radix sort of ids with their places, in four passes


def _declare_sort(local: Local) -> DoorCost:
    exchanges = _gathered(local, 0, _OWN), _gathered(local, 1, _OWN[:2])
    passes = (loop(_SORT, local.operands[0], "sort"),)
    return DoorCost(passes=passes, saved=Saved(results=(0, 1, 2)), exchanges=exchanges)


def _gathered(local: Local, operand: int, before: Axes) -> Exchange:
    """Return the gathering of an operand of the tokens of all devices that share out the experts."""
    return Exchange(operand, before, "all-gather", local.operands[operand].bytes, forward=1, of="routes")


@door(
    _sort_signature,
    _declare_sort,
    name="sort_by_expert",
)
def _sort(index_BTk: jax.Array, is_token_BT: jax.Array, num_experts: int) -> tuple[jax.Array, ...]:
    def local(index_BTk: jax.Array, is_token_BT: jax.Array, own_E: jax.Array) -> tuple[jax.Array, ...]:
        own_BTk = index_BTk - own_E[0]
        is_own_BTk = is_token_BT[..., None] & (own_BTk >= 0) & (own_BTk < len(own_E))
        expert_R = jnp.where(is_own_BTk, own_BTk, len(own_E)).reshape(-1)
        order_R = jnp.argsort(expert_R, stable=True).astype(jnp.int32)
        counts = jnp.arange(len(expert_R), dtype=jnp.int32)
        place_R = jnp.zeros_like(order_R).at[order_R].set(counts, unique_indices=True)
        ends_E = jnp.sum(expert_R[None] <= jnp.arange(len(own_E))[:, None], axis=1).astype(jnp.int32)
        return order_R[None, None], place_R[None, None], jnp.diff(ends_E, prepend=0)[None, None]

    own_E = jnp.arange(num_experts)
    operands = (index_BTk, _CHOICES), (is_token_BT, _TOKENS), (own_E, _PARTS[:1])
    return on_each_device(local, *operands, results=[_ROWS] * 3)


@jax.custom_vjp
def _spread(x_ND: jax.Array, token_R: jax.Array, place_Nk: jax.Array) -> jax.Array:
    """Return the row of each choice's token, [R, D]. The gradient is `_collect`: in a fixed order, and no scatter."""
    return x_ND[token_R]


@jax.custom_vjp
def _collect(y_RD: jax.Array, token_R: jax.Array, place_Nk: jax.Array) -> jax.Array:
    """Return the sum of each token's rows in the order of its choices, computed in float32, [N, D] in y's dtype."""
    return jnp.sum(y_RD[place_Nk].astype(jnp.float32), axis=1).astype(y_RD.dtype)


_spread.defvjp(lambda x, token, place: (x[token], (token, place)), lambda saved, d: (_collect(d, *saved), None, None))
_collect.defvjp(
    lambda y, token, place: (_collect(y, token, place), (token, place)),
    lambda saved, d: (_spread(d, *saved), None, None),
)


def to_experts(
    x_BTD: jax.Array,
    rows: ExpertRows,
    *matrices: Experts,
    biases: Sequence[nnx.Param | None] = (),
    names: Sequence[str] = (),
) -> tuple[jax.Array, ...]:
    """Return x · matrix (+ bias [E, F]) of each expert's rows for each matrix [E, F, D], [P, X, R, F] in x's dtype.
    Matrices may be quantised.

    Args:
      x_BTD: of all devices that share out the experts.
      biases: one for each matrix, or None; none has one where this is empty.
      names: of the results, for rematerialisation.
    """
    axes = (*_TOKENS, f"act_{matrices[0].inputs[0]}")
    # Each device that has a part of the experts has the rows to itself, so that their gradients, which are parts of
    # sums, are added before they are sent.
    parts = tuple(map(shards_of, _PARTS, (_experts(matrices[0]), _outputs(matrices[0]))))
    of_parts = None
    if max(parts) > 1:
        of_parts = constrain(jnp.broadcast_to(x_BTD[None, None], (*parts, *x_BTD.shape)), *_PARTS, *axes)
    results = []
    for i, matrix in enumerate(matrices):
        bias = biases[i] if biases else None
        y = _to_experts(x_BTD, rows, matrix, bias, axes, of_parts)
        results.append(checkpoint_name(y, names[i]) if names else y)
    return tuple(results)


def _experts(matrix: Experts) -> int:
    """Return the number of experts."""
    return _parts_of(matrix)[0][...].shape[0]


def _outputs(matrix: Experts) -> int:
    """Return the number of outputs of an expert."""
    return matrix.values[...].shape[2] if isinstance(matrix, QuantizedMatrix) else matrix[...].shape[1]


def _parts_of(matrix: Experts) -> tuple[nnx.Param, ...]:
    """Return the arrays of a matrix: itself, or values and scales."""
    return (matrix.values, matrix.scales) if isinstance(matrix, QuantizedMatrix) else (matrix,)


def _to_signature(
    x_BTD: jax.Array, rows: ExpertRows, matrix: Experts, bias: nnx.Param | None, axes: Axes, of_parts: Any
) -> Signature:
    weights = _weights(matrix, bias)
    y = jax.ShapeDtypeStruct((*rows.order_PXR.shape, _outputs(matrix)), x_BTD.dtype)
    operands = [(x_BTD, axes), weights[0], *_row_operands(rows), *weights[1:]]
    return Signature(operands, [(y, EXPERT_HIDDEN)], _options(matrix, bias), of=matrix)


def _options(matrix: Experts, bias: nnx.Param | None) -> dict[str, Any]:
    kind = matrix.kind if isinstance(matrix, QuantizedMatrix) else None
    return {"is_biased": bias is not None, "kind": kind, "num_experts": _experts(matrix)}


def _row_operands(rows: ExpertRows) -> list[tuple[jax.Array, Axes]]:
    return [(rows.order_PXR, _ROWS), (rows.place_PXR, _ROWS), (rows.sizes_PXE, _SIZES)]


_SPREAD = Loop(0, 0, 2), Loop(1, 0, 2)
_SCALED = Loop(1, 0, 2), Loop(3, 0, 4)


def _declare_to(local: Local) -> DoorCost:
    x, matrix, order, *_ = local.operands
    (y,) = local.results
    rows, width = order.numbers, x.shape[-1]
    passes = [loop(_SPREAD, x, "rows", rows * width)]
    passes += [loop(BIAS, y, "bias", kind="bias")] * local.options["is_biased"]
    parts = _local_parts(local, 5)
    tokens = x.numbers // width
    cost = _product_cost(local, tokens, rows // tokens, x, parts, Product(1, _own(local, rows), width, y.shape[-1]))
    saved = Saved((0,) if matrix.is_trained else ())
    workspace = Workspace(beside=rows * width * x.itemsize)
    return cost._replace(passes=tuple(passes), saved=saved, workspace=workspace)


def _own(local: Local, rows: int) -> int:
    """Return the rows of a device's own experts among those of all of them: an expectation, with every choice as
    likely."""
    return rows * local.operands[1].shape[0] // local.options["num_experts"]


def _local_parts(local: Local, further: int) -> tuple[LocalArray, ...]:
    """Return the arrays of the matrices of experts: scales are the operand of index `further`, where there are any."""
    return local.operands[1], *(() if local.options["kind"] is None else (local.operands[further],))


def _product_cost(
    local: Local, tokens: int, choices: int, x: LocalArray, parts: Sequence[LocalArray], product: Product
) -> DoorCost:
    """Return the cost of a product of the rows of so many tokens, padding included, each of which makes so many
    choices. The matrices of experts that no token chooses are not read: how many these are is an expectation, with
    every choice as likely."""
    (matrix, *_), kind = parts, local.options["kind"]
    experts, (_, m, k, n) = matrix.shape[0], product
    padding = sum(each.padding / each.steps for each in local.sections if isinstance(each, SectionReads))
    of_all = local.options["num_experts"]
    unread = (1 - choices / of_all) ** (tokens - padding)
    stored = sum(each.bytes for each in parts)
    name, choosing = _kernel(local, parts), round(tokens - padding)
    tiles = None
    if choosing:
        tiles = computed_rows(choosing, choices, of_all, x.abstract.dtype, name or "xla", multiplied=experts)
    of_product = DoorProduct(product, 0, weight=1, groups=experts, tiles=tiles)
    if name is not None:
        rows, sizes = x._replace(shape=(m, k)), LocalArray((experts,), "int32", (False,))
        operands = [each.abstract for each in (rows, *parts, sizes)]
        of_kernel = costs(*operands, transposed=True) if kind is None else quantized.costs(*operands, kind=kind)
        declared = of_kernel.forward._replace(bytes=of_kernel.forward.bytes - round(unread * stored))
        wanted = x.is_trained, matrix.is_trained
        backward = KernelCost(sum(wanted) * declared.flops, 0, sum(wanted) * declared.bytes)
        if kind is not None:
            backward = of_kernel.backward if x.is_trained else KernelCost(0, 0, 0)
        kernel = ProductKernel(name, KernelCosts(declared, backward), (), (wanted,))
        return DoorCost(products=(of_product,), kernel=kernel)
    moved = x.itemsize * m * (k + n) + round((1 - unread) * stored)
    dtype = "int8" if kind is not None and KINDS[kind].rounds_rows else None
    unfused = 0
    if kind is not None and local.platform != "cpu" and dtype is None:  # a tile's matrix is written in the dtype of x
        unfused = round(2 * (1 - unread) * experts * k * n * x.itemsize)
    return DoorCost(products=(of_product._replace(bytes=moved, unfused=unfused, dtype=dtype),))


def _kernel(local: Local, parts: Sequence[LocalArray]) -> str | None:
    """Return the kernel that multiplies, or None where XLA does."""
    if local.options["kind"] is not None:
        values, scales = parts
        return served_by(local, values.shape[1], scales.shape[1])
    if not local.kernels:
        return None
    return "mosaic_tpu" if local.platform == "tpu" else "triton"


@door(_to_signature, _declare_to, name="to_experts", pinned=True)
def _to_experts(
    x_BTD: jax.Array,
    rows: ExpertRows,
    matrix: Experts,
    bias: nnx.Param | None,
    axes: Axes,
    of_parts: jax.Array | None,
) -> jax.Array:
    multiply, gathers = _multiplied(matrix), _gathers(_weights(matrix, bias))
    parts = len(_parts_of(matrix))

    def local(x: jax.Array, order: jax.Array, place: jax.Array, sizes: jax.Array, *weights: jax.Array) -> tuple:
        x_ND, place_Nk = x.reshape(-1, x.shape[-1]), place.reshape(x.size // x.shape[-1], -1)
        token_R = order[0, 0] // place_Nk.shape[1]

        # The rows are taken again for the gradient of the matrix: kept, they would be as many times x as choices.
        @jax.checkpoint
        def product(x_ND: jax.Array, *weights: jax.Array) -> jax.Array:
            whole = [gather(each) for gather, each in zip(gathers, weights, strict=True)]
            y_RF = multiply(_spread(x_ND, token_R, place_Nk), sizes[0, 0], *whole[:parts])
            for bias_EF in whole[parts:]:
                y_RF += _of_rows(bias_EF.astype(y_RF.dtype), sizes[0, 0], len(y_RF))
            return y_RF

        return (product(x_ND, *weights)[None, None],)

    x = (x_BTD, axes) if of_parts is None else (of_parts, (*_PARTS, *axes))
    (y,) = on_each_device(local, x, *_on_devices(rows), *_weights(matrix, bias), results=[EXPERT_HIDDEN])
    return y


def from_experts(
    hidden_PXRF: jax.Array, rows: ExpertRows, weights_BTk: jax.Array, matrix: Experts, bias: nnx.Param | None = None
) -> jax.Array:
    """Return for each token the weighted sum over its experts of hidden · matrix [E, D, F] (+ bias [E, D]).

    The result is [B, T, D] in hidden's dtype. The matrix may be quantised.

    Weights multiply the hidden numbers, which the backward pass reads anyway, so that no product of each row is kept.
    """
    output = _output_axis(matrix)
    axes = RESIDUAL if output == "embed" else (*GATHERED[:2], f"act_{output}")
    return _from_experts(hidden_PXRF, rows, weights_BTk, matrix, bias, axes)


def _output_axis(matrix: Experts) -> str:
    (output,) = matrix.outputs if isinstance(matrix, QuantizedMatrix) else matrix.axes[-2:-1]
    return output


def _from_signature(
    hidden_PXRF: jax.Array,
    rows: ExpertRows,
    weights_BTk: jax.Array,
    matrix: Experts,
    bias: nnx.Param | None,
    axes: Axes,
) -> Signature:
    weights = _weights(matrix, bias)
    y = jax.ShapeDtypeStruct((*weights_BTk.shape[:2], _outputs(matrix)), hidden_PXRF.dtype)
    operands = [(hidden_PXRF, EXPERT_HIDDEN), weights[0], *_row_operands(rows), (weights_BTk, _CHOICES), *weights[1:]]
    return Signature(operands, [(y, axes)], _options(matrix, bias), of=matrix)


def _declare_from(local: Local) -> DoorCost:
    hidden, _, order, *_ = local.operands
    (y,) = local.results
    parts, is_quantized = _local_parts(local, 6), local.options["kind"] is not None
    rows, channels = order.numbers, parts[0].shape[2 if is_quantized else 1]
    passes = [loop(_SCALED, hidden, "weights"), loop(_SPREAD, y, "sum", rows * channels)]
    passes += [loop(BIAS, y, "bias", rows * channels, kind="bias")] * local.options["is_biased"]
    choices = local.operands[5].shape[-1]
    product = Product(1, _own(local, rows), hidden.shape[-1], channels)
    cost = _product_cost(local, rows // choices, choices, hidden, parts, product)
    # The hidden numbers times their weights, and the product's rows.
    workspace = Workspace(beside=hidden.bytes + rows * channels * hidden.itemsize)
    saved = Saved((0, 5) if hidden.is_trained else ())
    contracted = 1, (0, 1 if is_quantized else 2)
    weights = _gathered(local, 5, _OWN)
    exchanges = weights, weights._replace(kind="reduce-scatter", forward=0, backward=1)
    return cost._replace(
        passes=tuple(passes),
        saved=saved,
        workspace=workspace,
        contracted=contracted,
        contracted_rows=EXPERT_TOKENS,
        exchanges=exchanges,
    )


@door(_from_signature, _declare_from, name="from_experts", pinned=True)
def _from_experts(
    hidden_PXRF: jax.Array,
    rows: ExpertRows,
    weights_BTk: jax.Array,
    matrix: Experts,
    bias: nnx.Param | None,
    axes: Axes,
) -> jax.Array:
    multiply, (*_, hidden_size) = _multiplied(matrix), hidden_PXRF.shape
    if isinstance(matrix, QuantizedMatrix):
        devices = parts_of(matrix.kind, _PARTS[1], hidden_size, matrix.scales[...].shape[1])
    else:
        devices = shards_of(_PARTS[1], hidden_size)
    over = _PARTS[1] if devices > 1 else None
    # Where the mesh divides no groups of inputs, each device has all of them.
    whole = () if devices > 1 else ("feed_forward", "feed_forward" + GROUPS)
    gathers, parts = _gathers(_weights(matrix, bias), whole), len(_parts_of(matrix))
    sizes = *weights_BTk.shape[:2], _outputs(matrix)
    by_expert = axes_over(_PARTS[0], _experts(matrix))
    # A batch that the mesh does not divide lies whole on each device.
    lies = _OWN if shards_of(_OWN[0], sizes[0]) > 1 else _CHOICES
    own = Gathers.of(sizes, lies, _CHOICES)

    def local(hidden, order, place, sizes, weights_BTk, *weights) -> tuple[jax.Array]:
        place_Nk = place.reshape(-1, weights_BTk.shape[-1])
        token_R = order[0, 0] // place_Nk.shape[1]

        @jax.checkpoint
        def product(hidden_RF: jax.Array, weights_BTk: jax.Array, *stored: jax.Array) -> jax.Array:
            matrices = [gather(each) for gather, each in zip(gathers, stored, strict=True)]
            weight_R1 = _spread(weights_BTk.reshape(-1, 1), order[0, 0], place.reshape(-1, 1))
            scaled_RF = (hidden_RF.astype(jnp.float32) * weight_R1).astype(hidden_RF.dtype)
            y_RD = multiply(scaled_RF, sizes[0, 0], *matrices[:parts])
            for bias_ED in matrices[parts:]:  # each device adds as much of it
                y_RD += _of_rows(bias_ED.astype(y_RD.dtype), sizes[0, 0], len(y_RD)) * (weight_R1 / devices).astype(
                    y_RD.dtype
                )
            return y_RD

        y_ND = _collect(product(hidden[0, 0], weights_BTk, *weights), token_R, place_Nk)
        y_BTD = y_ND.reshape(*weights_BTk.shape[:2], -1)
        return (own.scattered_sum(y_BTD, by_expert)[None],)

    hidden = hidden_PXRF, (*_ROWS, over)
    operands = hidden, *_on_devices(rows), (weights_BTk, _CHOICES), *_weights(matrix, bias)
    (of_parts,) = on_each_device(local, *operands, results=[placement((over, *lies), (devices, *sizes))])
    return jax.lax.reduce(of_parts, jnp.zeros((), of_parts.dtype), jax.lax.add, (0,))


def _on_devices(rows: ExpertRows) -> list[tuple[jax.Array, Axes]]:
    return [(each, _ROWS) for each in rows]


def _weights(matrix: Experts, bias: nnx.Param | None) -> list[tuple[jax.Array, Axes]]:
    """Return the arrays of a matrix and a bias as they are stored."""
    return [(p[...], axes_of(p)) for p in (*_parts_of(matrix), bias) if p is not None]


def _gathers(weights: Sequence[tuple[jax.Array, Axes]], whole: Sequence[str] = ()) -> list[Gathers]:
    """Return how stored parameters are gathered for layers to compute with them, over the axes `whole` too; what has
    the axis "channels" is small, and whole."""

    def computing(axis: str | None) -> str | None:
        return None if axis in ("channels", *whole) else f"act_{axis}"

    return [Gathers.of(x.shape, axes, tuple(map(computing, axes))) for x, axes in weights]


def _multiplied(matrix: Experts) -> Callable[..., jax.Array]:
    """Return the product of rows, sorted by expert, and sizes with the arrays of the experts' matrices."""
    implementation = kernels.implementation()
    if not isinstance(matrix, QuantizedMatrix):

        def multiply(rows_RD: jax.Array, sizes_E: jax.Array, matrices: jax.Array) -> jax.Array:
            return grouped_matmul(rows_RD, matrices, sizes_E, transposed=True, implementation=implementation)

        return multiply
    by_outputs = Quantization(matrix.kind).by_outputs(target.platform())
    product = partial(quantized_grouped_matmul, kind=matrix.kind, by_outputs=by_outputs, implementation=implementation)

    def multiply_quantized(rows_RD: jax.Array, sizes_E: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        values, scales = (each.swapaxes(1, 2) if by_outputs else each for each in (values, scales))
        return product(rows_RD, values, scales, sizes_E)

    return multiply_quantized


def _of_rows(each_EF: jax.Array, sizes_E: jax.Array, rows: int) -> jax.Array:
    """Return the vector of each row's expert, [R, F], and zeros of rows past the last expert's."""
    expert_R = jnp.repeat(jnp.arange(len(sizes_E)), sizes_E, total_repeat_length=rows)
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes_E), each_EF[expert_R], 0)
