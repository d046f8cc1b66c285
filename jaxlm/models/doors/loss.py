"""The cross-entropy of targets, without their logits in memory where kernels run."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.gather import gather
from jaxlm.models.doors.logits import is_tied
from jaxlm.models.logical_axes import GATHERED
from jaxlm.parallel.partition import mesh_around, partition, rules_around
from kernels_pallas import linear_cross_entropy


def cross_entropy(
    hidden_BTD: jax.Array,
    table: nnx.Param,
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
    hidden_BTD = gather(hidden_BTD)
    total, log_z_BT = _cross_entropy(hidden_BTD, table, targets_BT, counted_BT, soft_cap, z_loss, "sum")
    z = jnp.sum(jnp.where(counted_BT, z_loss * jnp.square(log_z_BT), 0.0)) if z_loss else jnp.zeros_like(total)
    return {"loss": total - z if z_loss else total, "z_loss": z}


def token_losses(
    hidden_BTD: jax.Array, table: nnx.Param, targets_BT: jax.Array, counted_BT: jax.Array, soft_cap: float | None
) -> jax.Array:
    """Return the cross-entropy of each target in nats, float32 [B, T], 0 for those that do not count. The arguments are
    those of `cross_entropy`, which costs less where their sum is all that is asked for."""
    return _cross_entropy(gather(hidden_BTD), table, targets_BT, counted_BT, soft_cap, 0.0, "none")


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
    return Signature(operands, results, {"soft_cap": soft_cap}, of=table)


@door(_signature, name="cross_entropy")
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
