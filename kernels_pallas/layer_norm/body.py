"""LayerNorm of rows, as both kernels compute it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LayerNormBody:
    """A body that returns (x − mean) / √(variance + ε) · (scale or 1 + scale) + bias; scale and bias are optional."""

    width: int
    epsilon: float
    plus_one: bool
    scaled: bool
    biased: bool

    name = "layer_norm"
    elementwise = False
    flops = (7, 22)
    transcendentals = (0, 0)

    def __call__(self, inside: Any, rows: tuple, vectors: tuple) -> tuple:
        (x,), left = rows, iter(vectors)
        centred = x - jnp.sum(x, axis=1, keepdims=True) * (1 / self.width)
        if inside is not None:  # after the subtraction the zeros outside are no longer zeros
            centred = jnp.where(inside, centred, jnp.zeros_like(centred))
        variance = jnp.sum(centred * centred, axis=1, keepdims=True) * (1 / self.width)
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        if self.scaled:
            scale = next(left)
            y = y * (scale + 1.0 if self.plus_one else scale)
        return (y + next(left) if self.biased else y,)
