"""The loss of a linear layer's logits in plain JAX, which holds them all."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.linear_cross_entropy.results import reduced


def linear_cross_entropy(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    transposed: bool = False,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "none",
    return_log_z: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.linear_cross_entropy`."""
    table = "VD" if transposed else "DV"
    wide = np.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum(f"...D,{table}->...V", hidden, unembedding, preferred_element_type=wide)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    V = logits.shape[-1]
    is_target = jnp.arange(V).reshape((1,) * targets.ndim + (V,)) == targets[..., None]
    at_target = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    options = dict(z_loss=z_loss, reduction=reduction, return_log_z=return_log_z)
    return reduced(log_z - at_target, log_z, targets, weights, V, **options)
