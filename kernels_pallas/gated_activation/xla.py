"""Gated activations as XLA runs them fast: two slopes are kept for the backward pass."""

from typing import NamedTuple

import jax

from kernels_pallas.core.activations import KERNEL
from kernels_pallas.core.slopes import with_slopes


def gated_activation(gate: jax.Array, up: jax.Array, *, activation: str = "silu") -> jax.Array:
    """See `kernels_pallas.gated_activation`."""
    return with_slopes(_Gated(activation), gate, up)


class _Gated(NamedTuple):
    activation: str

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return KERNEL[self.activation](gate) * up
