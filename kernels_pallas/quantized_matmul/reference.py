"""A product with a quantised matrix in plain JAX: the matrix as float32, and the product at the highest precision."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.rounding import rounded_rows
from kernels_pallas.quantized_matmul.formats import KINDS, dequantize


def quantized_matmul(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, by_outputs: bool = False
) -> jax.Array:
    """See `kernels_pallas.quantized_matmul`."""
    matrix = jax.lax.stop_gradient(dequantize(values, scales, kind, by_outputs=by_outputs))
    wide = np.promote_types(x.dtype, jnp.float32)
    rows = x.astype(wide)
    if KINDS[kind].rounds_rows:  # the gradient is that of rows that are not rounded
        numbers, of_row = rounded_rows(rows)
        rows = rows + jax.lax.stop_gradient(numbers * of_row - rows)
    y = jnp.matmul(rows, matrix.T if by_outputs else matrix, precision=jax.lax.Precision.HIGHEST)
    return y.astype(x.dtype)
