"""Elementwise functions as XLA runs them: arithmetic in float32, and one array kept for each operand, its slope."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core import activations, target


def activation(name: str, x: jax.Array) -> jax.Array:
    """Return the activation of this name (`kernels_pallas.core.activations`) of each number of x, in its dtype."""
    return with_slopes(activations.KERNEL[name], x)


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """Return cap · tanh(x / cap) of each number of x (arXiv:2408.00118, section 2), in its dtype."""
    return with_slopes(_SoftCap(cap), x)


class _SoftCap(NamedTuple):
    cap: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.cap * jnp.tanh(x / self.cap)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_slopes(function: Callable, *x: jax.Array) -> jax.Array:
    """Return an elementwise function of arrays of one shape and dtype: computed in float32, given in their dtype.

    The backward pass reads the slope of each operand, one array, where JAX would keep each step of the formula.
    """
    return function(*(each.astype(jnp.float32) for each in x)).astype(x[0].dtype)


@with_slopes.defjvp
def _with_slopes_jvp(function: Callable, x: tuple, tangents: tuple) -> tuple[jax.Array, Any]:
    value, pull_back = jax.vjp(function, *(each.astype(jnp.float32) for each in x))
    slopes = [slope.astype(x[0].dtype) for slope in pull_back(jnp.ones_like(value))]
    if target.platform() == "gpu":  # else XLA keeps float32 slopes, and rounds them where they are read
        slopes = [jax.lax.optimization_barrier(slope) for slope in slopes]
    return value.astype(x[0].dtype), sum(t * slope for t, slope in zip(tangents, slopes, strict=True))
