"""Softmax and log-softmax of rows, as both kernels compute them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


def _weights(z: jax.Array, unmasked: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return exp(z) where unmasked and 0 elsewhere, and its sum in each row, 1 for a fully masked row.

    NaN stays NaN, even if the row's maximum (Triton's) has ignored it.
    """
    weights = jnp.exp(z)
    if unmasked is not None:
        weights = jnp.where(unmasked, weights, jnp.zeros_like(weights))
    total = jnp.sum(weights, axis=1, keepdims=True)
    return weights, jnp.where(total == 0, jnp.ones_like(total), total)


@dataclasses.dataclass(frozen=True)
class SoftmaxBody:
    """A body that returns exp(z) / Σ exp(z), z = cap(x) / temperature; a second operand is 0 where x is masked."""

    temperature: float
    soft_cap: float | None

    name = "softmax"
    elementwise = False
    flops = (6, 13)
    transcendentals = (1, 1)

    def __call__(self, inside: Any, rows: tuple, vectors: tuple) -> tuple:
        z, unmasked = self.logits(inside, rows)
        weights, total = _weights(z, unmasked)
        return (weights / total,)

    def logits(self, inside: Any, rows: tuple) -> tuple[jax.Array, jax.Array | None]:
        """Return z less the row's largest, 0 where masked; and what is unmasked, None where all is."""
        x, *masks = rows
        if self.soft_cap is not None:  # a masked number may be NaN, and so would be the derivative of tanh
            for mask in masks:
                x = jnp.where(mask != 0, x, jnp.zeros_like(x))
        z = x if self.soft_cap is None else self.soft_cap * jnp.tanh(x * (1 / self.soft_cap))
        z = z * (1 / self.temperature)
        unmasked, largest = None, z
        for mask in masks:
            unmasked = mask != 0
            largest = jnp.where(unmasked, largest, jnp.full_like(z, jnp.finfo(jnp.float32).min))
        if inside is not None:  # beyond the row there is no number at all: the maximum of a row of −∞ stays −∞
            unmasked = jnp.broadcast_to(inside, x.shape) if unmasked is None else unmasked & inside
            largest = jnp.where(inside, largest, jnp.full_like(z, -jnp.inf))
        z = z - jax.lax.stop_gradient(jnp.max(largest, axis=1, keepdims=True))
        return (z if unmasked is None else jnp.where(unmasked, z, jnp.zeros_like(z))), unmasked


@dataclasses.dataclass(frozen=True)
class LogSoftmaxBody(SoftmaxBody):
    """A body that returns the logarithm of the softmax: −∞ where masked."""

    name = "log_softmax"
    flops = (6, 11)

    def __call__(self, inside: Any, rows: tuple, vectors: tuple) -> tuple:
        z, unmasked = self.logits(inside, rows)
        _, total = _weights(z, unmasked)
        y = z - jnp.log(total)
        return (y if unmasked is None else jnp.where(unmasked, y, jnp.full_like(y, -jnp.inf)),)
