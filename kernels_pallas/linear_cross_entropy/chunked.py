"""Statistics and gradients of a chunk's logits as XLA fuses them, on any platform."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.linear_cross_entropy import block


def statistics(logits_CV: jax.Array, at_C: jax.Array, labels: int, soft_cap: float | None) -> block.LogitStatistics:
    """Return the statistics of the first `labels` logits of each row, [C] each; `at` is the target's column, or −1."""
    like = jnp.zeros_like(logits_CV[:, :1])
    found = block.add(
        block.nothing(like), logits_CV, _column(logits_CV) == at_C[:, None], soft_cap, _inside(logits_CV, labels)
    )
    return block.LogitStatistics(*(x[:, 0] for x in found))


def gradient(
    logits_CV: jax.Array,
    at_C: jax.Array,
    log_z_C: jax.Array,
    of_z_C: jax.Array,
    of_target_C: jax.Array,
    labels: int,
    soft_cap: float | None,
    dtype: Any,
) -> jax.Array:
    """Return the logits' cotangent [C, V] in this dtype: see `block.gradient`."""
    rows = (x[:, None] for x in (log_z_C, of_z_C, of_target_C))
    return block.gradient(
        logits_CV, _column(logits_CV) == at_C[:, None], *rows, soft_cap, _inside(logits_CV, labels)
    ).astype(dtype)


def _column(logits_CV: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)


def _inside(logits_CV: jax.Array, labels: int) -> jax.Array | None:
    return _column(logits_CV) < labels if labels < logits_CV.shape[1] else None
