"""A scan over the chunks of tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def scan_chunks(step: Callable[..., tuple[Any, jax.Array]], states: Any, arrays: Any, size: int) -> tuple[Any, Any]:
    """Return the states after T tokens, and the outputs [B, T, …].

    Where there are several chunks the backward pass keeps the states between them alone, and computes each again.

    Args:
      step: takes states and arrays [B, C, …] of at most `size` tokens; returns states, and outputs [B, C, …].
      arrays: a tree of arrays [B, T, …]. Zeros fill the last chunk, which must change no state.
    """
    B, T = jax.tree.leaves(arrays)[0].shape[:2]
    if size >= T:
        return step(states, arrays)

    def in_chunks(x: jax.Array) -> jax.Array:
        """[B, T, …] → [chunks, B, C, …]."""
        x = jnp.pad(x, [(0, 0), (0, -T % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(B, -1, size, *x.shape[2:]), 0, 1)

    states, outputs = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), states, jax.tree.map(in_chunks, arrays))
    return states, jnp.swapaxes(outputs, 0, 1).reshape(B, -1, *outputs.shape[3:])[:, :T]
