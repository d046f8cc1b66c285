"""RMSNorm of rows, as both kernels compute it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RMSNormBody:
    """A body that returns x / √(mean(x²) + ε) · (scale or 1 + scale); the scale is optional."""

    width: int
    epsilon: float
    plus_one: bool

    name = "rms_norm"
    elementwise = False
    flops = (4, 14)
    transcendentals = (0, 0)

    def __call__(self, inside: Any, rows: tuple, vectors: tuple) -> tuple:
        (x,) = rows  # zeros outside add nothing to the sum of squares
        mean_square = jnp.sum(x * x, axis=1, keepdims=True) * (1 / self.width)
        y = x * jax.lax.rsqrt(mean_square + self.epsilon)
        for scale in vectors:
            y = y * (scale + 1.0 if self.plus_one else scale)
        return (y,)
