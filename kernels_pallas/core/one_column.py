"""A product with a matrix of one column."""

import jax
import jax.numpy as jnp


def times_column(x: jax.Array, column: jax.Array) -> jax.Array:
    """Return x [..., K] · column [K] as [..., 1], each row as a product of its own.

    For a float32 matrix of one column XLA's code on a CPU sums a row in an order that depends on the number of rows;
    here the order is one, so that a row's bits do not depend on what is beside it.
    """
    return jnp.einsum("...k,...k->...", x, jnp.broadcast_to(column, x.shape))[..., None]
