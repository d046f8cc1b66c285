"""The cross-entropy of logits that are held."""

import jax
import jax.numpy as jnp


@jax.named_scope("loss")
def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(−log softmax(logits)[target], log Z) per token, float32 [B, T] each, in nats; Z = Σ exp(logits).

    The target's logit is picked by a comparison and a sum, not by a gather: with the vocabulary sharded that is
    one sum of scalars between devices.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target = jnp.arange(logits_BTV.shape[-1])[None, None] == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(is_target, logits_BTV, 0.0), axis=-1)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    return log_z_BT - target_BT, log_z_BT
