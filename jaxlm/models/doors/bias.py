"""Biases: what they are added as, and what that costs."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.models.doors.cost import Loop

BIAS = Loop(0, 0, 2), Loop(0, 0, 2)  # its FLOPs are in those of what it is fused into


def broadcast_bias(bias: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast a bias [*outputs] to the shape and dtype of an array [..., *outputs].

    It goes through float32, in which its gradient is then accumulated: XLA for GPUs and CPUs would round each sum of
    two to bfloat16.
    """
    wide = bias.astype(np.promote_types(bias.dtype, jnp.float32))
    return jnp.broadcast_to(wide, like.shape).astype(like.dtype)
