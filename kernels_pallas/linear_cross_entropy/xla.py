"""The loss as XLA runs it fast where all logits are held, and its two halves: logits, and their cross-entropy."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.core.products import einsum_in_float32
from kernels_pallas.core.slopes import soft_capped
from kernels_pallas.linear_cross_entropy.results import reduced
from kernels_pallas.linear_cross_entropy.sharding import CrossEntropySharding

_ROWS = "BTEFGHIJKLMNOPQ"


def linear_cross_entropy(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    sharding: CrossEntropySharding,
    *,
    transposed: bool,
    soft_cap: float | None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.linear_cross_entropy`. XLA partitions it; logits are sharded as tokens and labels."""
    mesh = jax.sharding.get_abstract_mesh()
    apart = (*sharding.labels, *sharding.within_rows)
    flat = all(mesh.shape[axis] == 1 for axis in apart)
    logits_ = logits(hidden, unembedding, transposed, soft_cap, flat)
    if sharding.specs:
        logits_ = jax.lax.with_sharding_constraint(logits_, sharding.of_logits())
    return reduced(*cross_entropy(logits_, targets), targets, weights, logits_.shape[-1], **options)


def logits(
    hidden: jax.Array, unembedding: jax.Array, transposed: bool, soft_cap: float | None = None, flat: bool = True
) -> jax.Array:
    """Return the float32 logits [..., V] of hidden [..., D] and unembedding [D, V], or [V, D] where `transposed`.

    Args:
      soft_cap: logits stay between −cap and cap; None caps nothing.
      flat: multiply [R, D] × [D, V], for which XLA's CPU code is a third faster than for the batched form. False where
        rows of one sequence lie on several devices, before or after.
    """
    rows, table = "R" if flat else _ROWS[: hidden.ndim - 1], "VD" if transposed else "DV"
    x = hidden.reshape(-1, hidden.shape[-1]) if flat else hidden
    made = einsum_in_float32(f"{rows}D,{table}->{rows}V", x, unembedding)
    made = made.reshape(*hidden.shape[:-1], made.shape[-1])
    return made if soft_cap is None else soft_capped(made, soft_cap)


@jax.named_scope("loss")
def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (−log softmax(logits)[target], log Z) of logits [..., V], float32 [...] each, in nats; Z = Σ exp(logits).

    The target's logit is picked by a comparison and a sum, not by a gather: with the vocabulary sharded that is
    one sum of scalars between devices.
    """
    logits = logits.astype(jnp.float32)
    label = jnp.expand_dims(jnp.arange(logits.shape[-1]), range(targets.ndim))
    at_target = jnp.sum(jnp.where(label == targets[..., None], logits, 0.0), axis=-1)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z - at_target, log_z
