"""Sums, factors and dropout: what a model computes number by number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import RESIDUAL, Axes


@door(lambda x_BTD, y_BTD: Signature([(x_BTD, RESIDUAL), (y_BTD, RESIDUAL)], [(x_BTD, RESIDUAL)]))
def add(x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
    """Return the sum of the residual and what a block adds to it."""
    return x_BTD + y_BTD


def scale(x: jax.Array, factor: float, axes: Axes = RESIDUAL) -> jax.Array:
    """Return an array with these logical axes times a number, computed in float32; x itself for 1."""
    return x if factor == 1.0 else _scaled(x, factor, axes)


@door(lambda x, factor, axes: Signature([(x, axes)], [(x, axes)]), name="scale")
def _scaled(x: jax.Array, factor: float, axes: Axes) -> jax.Array:
    return (x.astype(np.promote_types(x.dtype, jnp.float32)) * factor).astype(x.dtype)


class Dropout(NamedTuple):
    """Inverted dropout (Srivastava et al. 2014); a `key` of None drops nothing, as in evaluation."""

    rate: float = 0.0
    key: jax.Array | None = None

    def __call__(self, x_BTD: jax.Array, site: int) -> jax.Array:
        """Zero each element of x with probability `rate`, another mask per site."""
        if self.key is None or self.rate == 0.0:
            return x_BTD
        return _dropped(x_BTD, self.key, site, self.rate)

    def at(self, layer: jax.Array | int) -> "Dropout":
        """Return the dropout of one layer."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, layer))


@door(lambda x_BTD, key, site, rate: Signature([(x_BTD, RESIDUAL)], [(x_BTD, RESIDUAL)]), name="dropout")
def _dropped(x_BTD: jax.Array, key: jax.Array, site: int, rate: float) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x_BTD.shape)
    return jnp.where(keep, x_BTD / (1.0 - rate), jnp.zeros_like(x_BTD))
