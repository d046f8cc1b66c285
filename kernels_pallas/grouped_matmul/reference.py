"""A grouped product in plain JAX: every row times every matrix, of which the row's own is kept."""

import jax
import jax.numpy as jnp
import numpy as np


def grouped_matmul(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """See `kernels_pallas.grouped_matmul`."""
    wide = np.promote_types(x.dtype, jnp.float32)
    end = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])[:, None]

    def add(total: jax.Array, group: tuple) -> tuple[jax.Array, None]:
        matrix, begin, end = group
        is_own = (begin <= row) & (row < end)
        # Rows of other groups are left out of both the product and its gradient, also where they are NaN.
        own = jnp.where(is_own, x, 0)
        y = jnp.matmul(own, matrix.T if transposed else matrix, preferred_element_type=wide)
        return total + jnp.where(is_own, y, 0), None

    begins = jnp.zeros((x.shape[0], matrices.shape[1 if transposed else 2]), wide)
    total, _ = jax.lax.scan(add, begins, (matrices, end - sizes, end))
    return total.astype(x.dtype)
