"""A grouped product in plain JAX: every row times every matrix, of which the row's own is kept."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.quantized.formats import KINDS, dequantize
from kernels_pallas.core.rounding import with_rounded_rows


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


def quantized_grouped_matmul(
    x: jax.Array, values: jax.Array, scales: jax.Array, sizes: jax.Array, *, kind: str, by_outputs: bool = False
) -> jax.Array:
    """See `kernels_pallas.quantized_grouped_matmul`: all matrices as float32, and products at the highest precision."""

    def of_one(values: jax.Array, scales: jax.Array) -> jax.Array:
        return dequantize(values, scales, kind, by_outputs=by_outputs)

    matrices = jax.lax.stop_gradient(jax.vmap(of_one)(values, scales))
    rows = x.astype(np.promote_types(x.dtype, jnp.float32))
    rows = with_rounded_rows(rows) if KINDS[kind].rounds_rows else rows
    with jax.default_matmul_precision("highest"):
        return grouped_matmul(rows, matrices, sizes, transposed=by_outputs).astype(x.dtype)
