"""A product with a quantised matrix in plain JAX: the matrix as float32, and the product at the highest precision."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.quantized.formats import KINDS, dequantize
from kernels_pallas.core.rounding import with_rounded_rows


def quantized_matmul(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, by_outputs: bool = False
) -> jax.Array:
    """See `kernels_pallas.quantized_matmul`."""
    matrix = jax.lax.stop_gradient(dequantize(values, scales, kind, by_outputs=by_outputs))
    wide = np.promote_types(x.dtype, jnp.float32)
    rows = x.astype(wide)
    rows = with_rounded_rows(rows) if KINDS[kind].rounds_rows else rows
    y = jnp.matmul(rows, matrix.T if by_outputs else matrix, precision=jax.lax.Precision.HIGHEST)
    return y.astype(x.dtype)
