"""Products of tokens with the matrices of the experts that they chose, without padding or dropping.

Each device walks over those of its experts that have rows (`kernels_pallas.grouped_matmul`), of rows that
`sort_by_expert` has sorted. The tokens are those of all devices that share out the experts, which sum what their own
experts give; or rows that were sent to the devices of their experts (`jaxlm.models.doors.sent_rows`), and go home.
Devices that have parts of the experts' hidden channels send the sums over these.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

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
from jaxlm.models.doors.expert_matrices import (
    Experts,
    PlacedArray,
    arrays_of,
    for_parts,
    num_experts,
    output_axis,
    outputs_of,
)
from jaxlm.models.doors.expert_rows import OWN_CHOICES, PARTS, SPREAD, ExpertRows, collect, gathered, spread
from jaxlm.models.doors.quantized_linear import input_shards, served_by
from jaxlm.models.doors.sent_rows import SentRows, exchanged, home_operands, sent_home, sent_rows
from jaxlm.models.expert_parallel import ROOM
from jaxlm.models.logical_axes import EXPERT_TOKENS, GATHERED, RESIDUAL, Axes
from jaxlm.models.parameters import axes_of
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.parallel.collectives import Gathers, axes_over, on_each_device, placement
from jaxlm.parallel.partition import shards_of
from jaxlm.parallel.rules import GROUPS
from kernels_pallas import grouped_matmul, quantized_grouped_matmul
from kernels_pallas.core import target
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.core.quantized.formats import KINDS
from kernels_pallas.grouped_matmul import computed_rows, costs, quantized
from kernels_pallas.paged_attention.costs import SectionReads


def to_experts(
    x_BTD: jax.Array,
    rows: ExpertRows,
    *matrices: Experts,
    biases: Sequence[nnx.Param | None] = (),
    names: Sequence[str] = (),
    of_parts: PlacedArray | None = None,
) -> tuple[jax.Array, ...]:
    """Return x · matrix (+ bias [E, F]) of each expert's rows for each matrix [E, F, D], [P, X, R, F] in x's dtype.
    Matrices may be quantised.

    Args:
      x_BTD: of all devices that share out the experts, or rows that were sent to those of their experts.
      of_parts: `for_parts` of rows that were sent, made before they were.
      biases: one for each matrix, or None; none has one where this is empty.
      names: of the results, for rematerialisation.
    """
    axes = (*rows.tokens, f"act_{matrices[0].inputs[0]}")
    if not rows.is_sent:
        of_parts = for_parts(x_BTD, axes, matrices[0], PARTS)
    results = []
    for i, matrix in enumerate(matrices):
        bias = biases[i] if biases else None
        y = _to_experts(x_BTD, rows, matrix, bias, axes, of_parts)
        results.append(checkpoint_name(y, names[i]) if names else y)
    return tuple(results)


def _to_signature(
    x_BTD: jax.Array, rows: ExpertRows, matrix: Experts, bias: nnx.Param | None, axes: Axes, of_parts: Any
) -> Signature:
    weights = _weights(matrix, bias)
    y = jax.ShapeDtypeStruct((*rows.order_PXR.shape, outputs_of(matrix)), x_BTD.dtype)
    operands = [(x_BTD, axes), weights[0], *rows.operands, *weights[1:]]
    return Signature(operands, [(y, rows.hidden)], _options(matrix, bias, rows), of=matrix)


def _options(matrix: Experts, bias: nnx.Param | None, rows: ExpertRows) -> dict[str, Any]:
    kind = matrix.kind if isinstance(matrix, QuantizedMatrix) else None
    return {"is_biased": bias is not None, "kind": kind, "num_experts": num_experts(matrix), "is_sent": rows.is_sent}


_SCALED = Loop(1, 0, 2), Loop(3, 0, 4)


def _declare_to(local: Local) -> DoorCost:
    x, matrix, order, *_ = local.operands
    (y,) = local.results
    rows, width = order.numbers, x.shape[-1]
    passes = [loop(SPREAD, x, "rows", rows * width)]
    passes += [loop(BIAS, y, "bias", kind="bias")] * local.options["is_biased"]
    parts = _local_parts(local, 5)
    choices = rows * width // x.numbers
    cost = _product_cost(local, order, choices, x, parts, Product(1, _own(local, order), width, y.shape[-1]))
    saved = Saved((0,) if matrix.is_trained else ())
    workspace = Workspace(beside=rows * width * x.itemsize, of_passes=_of_passes(local))
    return cost._replace(passes=tuple(passes), saved=saved, workspace=workspace, gathers=True)


def _own(local: Local, order: LocalArray) -> int:
    """Return the rows of a device's own experts, of those that there is room for: an expectation, with every choice as
    likely. Where there are fewer choices than devices, it is the row of a device that has one."""
    if local.options["is_sent"]:
        return sent_rows(order)
    mean = order.numbers * local.operands[1].shape[0] // local.options["num_experts"]
    return max(mean, min(1, order.numbers))


def _of_passes(local: Local) -> int:
    """Return the bytes of the gradients of a matrix of which further passes make their part, and of their sum."""
    matrix = local.operands[1]
    return 2 * matrix.bytes * (local.options["is_sent"] and matrix.is_trained)


def _local_parts(local: Local, further: int) -> tuple[LocalArray, ...]:
    """Return the arrays of the matrices of experts: scales are the operand of index `further`, where there are any."""
    return local.operands[1], *(() if local.options["kind"] is None else (local.operands[further],))


def _product_cost(
    local: Local, order: LocalArray, choices: int, x: LocalArray, parts: Sequence[LocalArray], product: Product
) -> DoorCost:
    """Return the cost of a product of rows in this order, those of padding included, of tokens each of which makes so
    many choices. The matrices of experts that no token chooses are not read: how many these are is an expectation, with
    every choice as likely."""
    (matrix, *_), kind = parts, local.options["kind"]
    experts, (_, m, k, n) = matrix.shape[0], product
    padding = sum(each.padding / each.steps for each in local.sections if isinstance(each, SectionReads))
    # A row that was sent to the device of its expert is a token that chooses among the experts there.
    is_sent = local.options["is_sent"]
    tokens, of_all = (m, experts) if is_sent else (order.numbers // choices, local.options["num_experts"])
    unread = (1 - choices / of_all) ** (tokens - padding)
    stored = sum(each.bytes for each in parts)
    name, choosing = _kernel(local, parts), round(tokens - padding)
    tiles = None
    if choosing:
        room = order.numbers if is_sent else None
        how = x.abstract.dtype, name or "xla", local.platform
        tiles = computed_rows(choosing, choices, of_all, *how, multiplied=experts, room=room)
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
    of_parts: PlacedArray | None,
) -> jax.Array:
    multiply, gathers = _multiplied(matrix, rows), _gathers(_weights(matrix, bias))
    parts = len(arrays_of(matrix))

    def local(x: jax.Array, order: jax.Array, place: jax.Array, sizes: jax.Array, *weights: jax.Array) -> tuple:
        x_ND, place_Nk = x.reshape(-1, x.shape[-1]), place.reshape(x.size // x.shape[-1], -1)
        token_R = order[0, 0] // place_Nk.shape[1]

        # The rows are taken again for the gradient of the matrix: kept, they would be as many times x as choices.
        @jax.checkpoint
        def product(x_ND: jax.Array, *weights: jax.Array) -> jax.Array:
            whole = [gather(each) for gather, each in zip(gathers, weights, strict=True)]
            y_RF = multiply(spread(x_ND, token_R, place_Nk), sizes[0, 0], *whole[:parts])
            for bias_EF in whole[parts:]:
                y_RF += _of_rows(bias_EF.astype(y_RF.dtype), sizes[0, 0], len(y_RF))
            return y_RF

        return (product(x_ND, *weights)[None, None],)

    x = of_parts or (x_BTD, axes)
    (y,) = on_each_device(local, x, *rows.on_devices, *_weights(matrix, bias), results=[rows.hidden])
    return y


def from_experts(
    hidden_PXRF: jax.Array,
    rows: ExpertRows,
    weights_BTk: jax.Array,
    matrix: Experts,
    bias: nnx.Param | None = None,
    sent: SentRows | None = None,
) -> jax.Array:
    """Return for each token the weighted sum over its experts of hidden · matrix [E, D, F] (+ bias [E, D]).

    The result is [B, T, D] in hidden's dtype. The matrix may be quantised.

    Weights multiply the hidden numbers, which the backward pass reads anyway, so that no product of each row is kept.

    Args:
      sent: where tokens are rows that were sent to the devices of their experts: what they give goes home.
    """
    output = output_axis(matrix)
    axes = RESIDUAL if output == "embed" else (*GATHERED[:2], f"act_{output}")
    return _from_experts(hidden_PXRF, rows, weights_BTk, matrix, bias, sent, axes)


def _from_signature(
    hidden_PXRF: jax.Array,
    rows: ExpertRows,
    weights_BTk: jax.Array,
    matrix: Experts,
    bias: nnx.Param | None,
    sent: SentRows | None,
    axes: Axes,
) -> Signature:
    weights, choices = _weights(matrix, bias), weights_BTk if sent is None else sent.slot_BTk
    y = jax.ShapeDtypeStruct((*choices.shape[:2], outputs_of(matrix)), hidden_PXRF.dtype)
    of_tokens = weights_BTk, (*rows.tokens, None)
    operands = [(hidden_PXRF, rows.hidden), weights[0], *rows.operands, of_tokens, *weights[1:]]
    return Signature(operands + home_operands(sent), [(y, axes)], _options(matrix, bias, rows), of=matrix)


def _declare_from(local: Local) -> DoorCost:
    hidden, _, order, *_ = local.operands
    (y,) = local.results
    parts, is_quantized = _local_parts(local, 6), local.options["kind"] is not None
    rows, channels = order.numbers, parts[0].shape[2 if is_quantized else 1]
    of_rows = rows * channels
    passes = [loop(_SCALED, hidden, "weights"), loop(SPREAD, y, "sum", of_rows)]
    passes += [loop(BIAS, y, "bias", of_rows, kind="bias")] * local.options["is_biased"]
    choices, is_sent = local.operands[5].shape[-1], local.options["is_sent"]
    product = Product(1, _own(local, order), hidden.shape[-1], channels)
    cost = _product_cost(local, order, choices, hidden, parts, product)
    # The hidden numbers times their weights, and the product's rows.
    workspace = Workspace(beside=hidden.bytes + of_rows * hidden.itemsize, of_passes=_of_passes(local))
    saved = Saved((0, 5) if hidden.is_trained else ())
    channel = 1 if is_quantized else 2
    if is_sent:
        passes.append(loop(SPREAD, y, "home", of_rows))
        exchanges: tuple[Exchange, ...] = (exchanged(of_rows * hidden.itemsize, "rows", backward=1),)
    else:
        weights = gathered(local, 5, OWN_CHOICES)
        exchanges = weights, weights._replace(kind="reduce-scatter", forward=0, backward=1)
    return cost._replace(
        passes=tuple(passes),
        saved=saved,
        workspace=workspace,
        contracted=(1, (channel,) if is_sent else (0, channel)),
        contracted_rows=GATHERED if is_sent else EXPERT_TOKENS,
        exchanges=exchanges,
        gathers=True,
    )


@door(_from_signature, _declare_from, name="from_experts", pinned=True)
def _from_experts(
    hidden_PXRF: jax.Array,
    rows: ExpertRows,
    weights_BTk: jax.Array,
    matrix: Experts,
    bias: nnx.Param | None,
    sent: SentRows | None,
    axes: Axes,
) -> jax.Array:
    multiply, (*_, hidden_size) = _multiplied(matrix, rows), hidden_PXRF.shape
    of_experts = PARTS[0], num_experts(matrix)
    if isinstance(matrix, QuantizedMatrix):
        devices = input_shards(matrix.kind, PARTS[1], hidden_size, matrix.scales[...].shape[1], after=(of_experts,))
    else:
        devices = shards_of(PARTS[1], hidden_size, after=(of_experts,))
    over = PARTS[1] if devices > 1 else None
    # Where the mesh divides no groups of inputs, each device has all of them.
    whole = () if devices > 1 else ("feed_forward", "feed_forward" + GROUPS)
    gathers, parts = _gathers(_weights(matrix, bias), whole), len(arrays_of(matrix))
    choices = (*rows.tokens, None)
    sizes = *(weights_BTk if sent is None else sent.slot_BTk).shape[:2], outputs_of(matrix)
    by_expert = axes_over(PARTS[0], num_experts(matrix))
    # A batch that the mesh does not divide lies whole on each device.
    lies = OWN_CHOICES if shards_of(OWN_CHOICES[0], sizes[0]) > 1 else choices
    own = Gathers.of(sizes, lies, choices)
    of_sent = home_operands(sent)

    def local(hidden, order, place, sizes, weights_BTk, *weights_and_sent) -> tuple[jax.Array]:
        weights, at_home = weights_and_sent[: len(gathers)], weights_and_sent[len(gathers) :]
        place_Nk = place.reshape(-1, weights_BTk.shape[-1])
        token_R = order[0, 0] // place_Nk.shape[1]

        @jax.checkpoint
        def product(hidden_RF: jax.Array, weights_BTk: jax.Array, *stored: jax.Array) -> jax.Array:
            matrices = [gather(each) for gather, each in zip(gathers, stored, strict=True)]
            weight_R1 = spread(weights_BTk.reshape(-1, 1), order[0, 0], place.reshape(-1, 1))
            scaled_RF = (hidden_RF.astype(jnp.float32) * weight_R1).astype(hidden_RF.dtype)
            y_RD = multiply(scaled_RF, sizes[0, 0], *matrices[:parts])
            for bias_ED in matrices[parts:]:  # each device adds as much of it
                y_RD += _of_rows(bias_ED.astype(y_RD.dtype), sizes[0, 0], len(y_RD)) * (weight_R1 / devices).astype(
                    y_RD.dtype
                )
            return y_RD

        y_ND = collect(product(hidden[0, 0], weights_BTk, *weights), token_R, place_Nk)
        if at_home:
            choice_BR, slot_BTk = at_home
            return (sent_home(y_ND, choice_BR, slot_BTk, by_expert)[None],)
        y_BTD = y_ND.reshape(*weights_BTk.shape[:2], -1)
        return (own.scattered_sum(y_BTD, by_expert)[None],)

    hidden = hidden_PXRF, (*rows.hidden[:3], over)
    operands = hidden, *rows.on_devices, (weights_BTk, choices), *_weights(matrix, bias), *of_sent
    # Parts of the hidden channels are on the devices that the experts leave.
    by_part = tuple(placement((PARTS[0], over), (num_experts(matrix), devices)))[1:]
    result = PartitionSpec(*by_part, *placement(lies, sizes))
    (of_parts,) = on_each_device(local, *operands, results=[result])
    return jax.lax.reduce(of_parts, jnp.zeros((), of_parts.dtype), jax.lax.add, (0,))


def _weights(matrix: Experts, bias: nnx.Param | None) -> list[tuple[jax.Array, Axes]]:
    """Return the arrays of a matrix and a bias as they are stored."""
    return [(p[...], axes_of(p)) for p in (*arrays_of(matrix), bias) if p is not None]


def _gathers(weights: Sequence[tuple[jax.Array, Axes]], whole: Sequence[str] = ()) -> list[Gathers]:
    """Return how stored parameters are gathered for layers to compute with them, over the axes `whole` too; what has
    the axis "channels" is small, and whole."""

    def computing(axis: str | None) -> str | None:
        return None if axis in ("channels", *whole) else f"act_{axis}"

    return [Gathers.of(x.shape, axes, tuple(map(computing, axes))) for x, axes in weights]


def _multiplied(matrix: Experts, rows: ExpertRows) -> Callable[..., jax.Array]:
    """Return the product of rows, sorted by expert, and sizes with the arrays of the experts' matrices."""
    implementation, experts = kernels.implementation(), num_experts(matrix)

    def expected(rows_RD: jax.Array, sizes_E: jax.Array) -> int:
        return len(rows_RD) // ROOM if rows.is_sent else len(rows_RD) * len(sizes_E) // experts

    if not isinstance(matrix, QuantizedMatrix):

        def multiply(rows_RD: jax.Array, sizes_E: jax.Array, matrices: jax.Array) -> jax.Array:
            options = {"transposed": True, "expected": expected(rows_RD, sizes_E), "implementation": implementation}
            return grouped_matmul(rows_RD, matrices, sizes_E, **options)

        return multiply
    by_outputs = Quantization(matrix.kind).by_outputs(target.platform())
    product = partial(quantized_grouped_matmul, kind=matrix.kind, by_outputs=by_outputs, implementation=implementation)

    def multiply_quantized(rows_RD: jax.Array, sizes_E: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        values, scales = (each.swapaxes(1, 2) if by_outputs else each for each in (values, scales))
        return product(rows_RD, values, scales, sizes_E, expected=expected(rows_RD, sizes_E))

    return multiply_quantized


def _of_rows(each_EF: jax.Array, sizes_E: jax.Array, rows: int) -> jax.Array:
    """Return the vector of each row's expert, [R, F], and zeros of rows past the last expert's."""
    expert_R = jnp.repeat(jnp.arange(len(sizes_E)), sizes_E, total_repeat_length=rows)
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes_E), each_EF[expert_R], 0)
