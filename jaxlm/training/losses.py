"""The loss of a model's hidden states, whose logits are held or not, as the operation chooses."""

import jax
import jax.numpy as jnp

from jaxlm.models import kernels
from jaxlm.models.layers import all_gather_sequence
from jaxlm.models.parameters import scope
from jaxlm.models.transformer import Transformer
from jaxlm.parallel.partition import partition
from kernels_pallas import linear_cross_entropy


def summed(
    module: Transformer,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    z_loss: float,
) -> dict[str, jax.Array]:
    """Return the terms of the objective, each summed over the targets that count, in nats: `loss`, the cross-entropy,
    and `z_loss`, that factor times log² Z. Their sum has the objective's gradient; each term alone has not.

    Args:
      hidden_BTD: the normalised residual stream. targets_BT: int32 token ids. counted_BT: bool.
    """
    table, letters = module.unembedding_table()
    hidden_BTD = all_gather_sequence(hidden_BTD)
    mesh, specs = jax.sharding.get_abstract_mesh(), None
    if not mesh.empty:
        hidden_axes = "batch", "sequence", "act_model"
        specs = partition(hidden_axes, hidden_BTD.shape, mesh), partition(table.axes, table.shape, mesh)
    with scope(table):
        total, log_z_BT = linear_cross_entropy(
            hidden_BTD,
            table[...],
            jnp.where(counted_BT, targets_BT, -1),
            transposed=letters == "VD",
            soft_cap=module.model.logit_soft_cap,
            z_loss=z_loss,
            reduction="sum",
            return_log_z=True,
            partition=specs,
            implementation=kernels.implementation(),
        )
    z = jnp.sum(jnp.where(counted_BT, z_loss * jnp.square(log_z_BT), 0.0)) if z_loss else jnp.zeros_like(total)
    return {"loss": total - z, "z_loss": z}
