"""A token's loss from its cross-entropy: z-loss, weights, ignored and invalid targets; and the sum over tokens."""

import jax
import jax.numpy as jnp


def finish(
    cross_entropy: jax.Array,
    log_z: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    vocabulary: int,
    z_loss: float,
) -> jax.Array:
    """Return weight · (cross-entropy + z_loss · log² Z); 0 where the target is negative, NaN where it is no label."""
    losses = cross_entropy + z_loss * jnp.square(log_z) if z_loss else cross_entropy
    if weights is not None:
        # An ignored token's weight may be NaN, and 0 · NaN would reach its gradient.
        losses = losses * jnp.where(targets < 0, 0.0, weights).astype(losses.dtype)
    return jnp.where(targets < 0, 0.0, jnp.where(targets < vocabulary, losses, jnp.nan))


def reduced(
    cross_entropy: jax.Array,
    log_z: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    vocabulary: int,
    *,
    z_loss: float,
    reduction: str,
    return_log_z: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return what `linear_cross_entropy` returns of each token's cross-entropy and log Z."""
    losses = finish(cross_entropy, log_z, targets, weights, vocabulary, z_loss)
    result = jnp.sum(losses) if reduction == "sum" else losses
    log_z = jax.lax.stop_gradient(log_z) if reduction == "sum" else log_z
    return (result, log_z) if return_log_z else result
