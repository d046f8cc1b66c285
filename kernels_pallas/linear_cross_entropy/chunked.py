"""Statistics and gradients of a chunk's logits as XLA fuses them, on any platform."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.linear_cross_entropy import block


def statistics(logits_CV: jax.Array, at_C: jax.Array, soft_cap: float | None, interpret: bool) -> block.Statistics:
    """Of each row, [C] each; `at` is where in it the target stands, if it does."""
    like = jnp.zeros_like(logits_CV[:, :1])
    found = block.add(block.nothing(like), logits_CV, _is_target(logits_CV, at_C), soft_cap)
    return block.Statistics(*(x[:, 0] for x in found))


def gradient(
    logits_CV: jax.Array,
    at_C: jax.Array,
    log_z_C: jax.Array,
    of_z_C: jax.Array,
    of_target_C: jax.Array,
    soft_cap: float | None,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """The logits' cotangent [C, V] in this dtype: see `block.gradient`."""
    rows = (x[:, None] for x in (log_z_C, of_z_C, of_target_C))
    return block.gradient(logits_CV, _is_target(logits_CV, at_C), *rows, soft_cap).astype(dtype)


def _is_target(logits_CV: jax.Array, at_C: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1) == at_C[:, None]
