"""A token's loss from its cross-entropy: z-loss, weights, ignored and invalid targets."""

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
