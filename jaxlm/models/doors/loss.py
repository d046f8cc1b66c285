"""The cross-entropy of targets, without their logits in memory where kernels run."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.cost import DoorCost, Local, Loop, LossWorkspace, Product, Statistics, launched, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.gather import gather
from jaxlm.models.doors.logits import is_tied, unembedding, with_traffic
from jaxlm.models.logical_axes import GATHERED
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.parallel.partition import mesh_around, partition, rules_around
from kernels_pallas import linear_cross_entropy
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.core.rounding import rounded_rows
from kernels_pallas.linear_cross_entropy import chunks
from kernels_pallas.linear_cross_entropy.costs import gradient_cost, statistics_cost


def cross_entropy(
    hidden_BTD: jax.Array,
    table: nnx.Param | QuantizedMatrix,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    soft_cap: float | None,
    z_loss: float = 0.0,
) -> dict[str, jax.Array]:
    """Return the terms of the objective, each summed over the targets that count, in nats: `loss`, the cross-entropy,
    and `z_loss`, that factor times log² Z. Their sum has the objective's gradient; each term alone has not.

    Logits are held or not, as the operation of `kernels_pallas` chooses.

    Args:
      hidden_BTD: the normalised residual.
      table: as in `logits`.
      targets_BT: int32 token ids.
      counted_BT: bool.
    """
    hidden_BTD, table = _as_numbers(gather(hidden_BTD), table)
    total, log_z_BT = _cross_entropy(hidden_BTD, table, targets_BT, counted_BT, soft_cap, z_loss, "sum")
    z = jnp.sum(jnp.where(counted_BT, z_loss * jnp.square(log_z_BT), 0.0)) if z_loss else jnp.zeros_like(total)
    return {"loss": total - z if z_loss else total, "z_loss": z}


def token_losses(
    hidden_BTD: jax.Array,
    table: nnx.Param | QuantizedMatrix,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    soft_cap: float | None,
) -> jax.Array:
    """Return the cross-entropy of each target in nats, float32 [B, T], 0 for those that do not count. The arguments are
    those of `cross_entropy`, which costs less where their sum is all that is asked for."""
    hidden_BTD, table = _as_numbers(gather(hidden_BTD), table)
    return _cross_entropy(hidden_BTD, table, targets_BT, counted_BT, soft_cap, 0.0, "none")


def _as_numbers(hidden_BTD: jax.Array, table: nnx.Param | QuantizedMatrix) -> tuple[jax.Array, nnx.Param]:
    """Return both in float32, rows rounded as the product with a quantised table rounds them; without one unchanged."""
    if isinstance(table, nnx.Param):
        return hidden_BTD, table
    numbers_BTD, scales_BT1 = rounded_rows(hidden_BTD)
    whole = nnx.Param(table.widened(), axes=table.axes, inputs=table.inputs, name=table.name)
    return numbers_BTD * scales_BT1, whole


def _signature(
    hidden_BTD: jax.Array,
    table: nnx.Param,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    soft_cap: float | None,
    z_loss: float,
    reduction: Literal["sum", "none"],
) -> Signature:
    rows = GATHERED[:2]
    of_tokens = jax.ShapeDtypeStruct(targets_BT.shape, jnp.float32), rows
    results = [(jax.ShapeDtypeStruct((), jnp.float32), ()), of_tokens] if reduction == "sum" else [of_tokens]
    operands = [(hidden_BTD, GATHERED), (table[...], table.axes), (targets_BT, rows)]
    return Signature(operands, results, {"soft_cap": soft_cap, "labels": table.axes.index("vocab")}, of=table)


_LOOP = Loop(5, 2, 0), Loop(2, 2, 0)
_SOFT_CAP = Loop(3, 1, 0), Loop(5, 1, 0)  # within the loop of what it caps, which keeps the slope


def _declare(local: Local) -> DoorCost:
    product, cap = unembedding(local), local.options["soft_cap"]
    _, tokens, _, labels = product
    # The maximum of each token's logits; then, sent together, their sum and the one at its target.
    over = range(local.options["labels"], local.options["labels"] + 1)
    statistics = tuple(Statistics(1, over, n * 4 * tokens, "loss") for n in (1, 2))
    if local.kernels and tokens * labels >= chunks.WORTHWHILE:
        return _in_chunks(local, product)._replace(statistics=statistics)
    hidden, table = local.operands[:2]
    passes = [loop(_LOOP, hidden, "loss", tokens * labels)]
    passes += [loop(_SOFT_CAP, hidden, "loss", tokens * labels)] * bool(cap)
    loss = LossWorkspace(
        4 * tokens * labels,
        hidden.itemsize * tokens * labels,
        is_array=local.platform != "tpu",
        waits=table.is_trained and hidden.dtype != "float32",
    )
    return DoorCost((with_traffic(product, local),), passes=tuple(passes), loss=loss, statistics=statistics)


def _in_chunks(local: Local, product: Product) -> DoorCost:
    """Return the cost of a loss in chunks of tokens, which makes its gradients in the forward pass; the last chunk is
    padded, and so are the labels."""
    hidden, table = local.operands[:2]
    _, all_tokens, width, all_labels = product
    (number, tokens), labels = chunks.chunk(all_tokens, all_labels), chunks.padded(all_labels)
    padded = with_traffic(Product(1, number * tokens, width, labels), local)._replace(gradients=(True, True))
    sizes = tokens, labels, local.options["soft_cap"]
    once = KernelCost(*map(sum, zip(statistics_cost(*sizes), gradient_cost(*sizes, hidden.dtype), strict=True)))
    loss = LossWorkspace(
        logits=4 * tokens * labels,
        gradient=hidden.itemsize * tokens * labels,
        gradients=2 * hidden.itemsize * all_tokens * width,
        # The gradient of one chunk is made when its logits are gone.
        table_sum=4 * labels * width if number > 1 and table.is_trained else 0,
        padded_table=table.itemsize * labels * width if labels > all_labels else 0,
    )
    passes = (launched(KernelCosts(once, KernelCost()), "loss", number),)
    return DoorCost((padded,), passes=passes, loss=loss, sums_gradients=True)


@door(_signature, _declare, name="cross_entropy")
def _cross_entropy(
    hidden_BTD: jax.Array,
    table: nnx.Param,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    soft_cap: float | None,
    z_loss: float,
    reduction: Literal["sum", "none"],
) -> Any:
    """Return the sum of the losses and log Z [B, T], or the losses [B, T] alone."""
    mesh, specs = mesh_around(), None
    if not mesh.empty:
        rules = rules_around()
        specs = partition(GATHERED, hidden_BTD.shape, mesh, rules), partition(table.axes, table.shape, mesh, rules)
    return linear_cross_entropy(
        hidden_BTD,
        table[...],
        jnp.where(counted_BT, targets_BT, -1),
        transposed=is_tied(table),
        soft_cap=soft_cap,
        partition=specs,
        z_loss=z_loss,
        reduction=reduction,
        return_log_z=reduction == "sum",
        implementation=kernels.implementation(),
    )
