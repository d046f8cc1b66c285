"""Products with quantised matrices: how numbers are rounded and stored, what a row depends on, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import drawn

from kernels_pallas import quantized_matmul
from kernels_pallas.quantized_matmul import dequantize, quantize

# Kinds with their groups: all inputs of an output, some inputs, and blocks of inputs and outputs.
STORED = [
    ("int8", None),
    ("int8", 32),
    ("int4", None),
    ("int4", 32),
    ("fp8", None),
    ("fp8", (64, 8)),
    ("mxfp4", None),
]


def stored(kind, group, K=128, N=40):
    """Return the parts of a random matrix whose products have unit scale."""
    (matrix,) = drawn((K, N))
    return quantize(matrix * K**-0.5, kind, group)


@pytest.mark.parametrize("kind, group", STORED)
@pytest.mark.parametrize("by_outputs", [False, True])
def test_a_product_is_that_of_the_dequantised_matrix(kind, group, by_outputs):
    """Against NumPy in float64, forward and backward; sums of 128 products in float32."""
    values, scales = stored(kind, group)
    matrix = np.asarray(dequantize(values, scales, kind), np.float64)
    parts = (values.T, scales.T) if by_outputs else (values, scales)
    np.testing.assert_array_equal(dequantize(*parts, kind, by_outputs=by_outputs), matrix.T if by_outputs else matrix)
    x, d_y = drawn((3, 5, 128), (3, 5, 40))
    for implementation in ("reference", "xla"):
        y, pull_back = jax.vjp(
            lambda x, name=implementation: quantized_matmul(
                x, *parts, kind=kind, by_outputs=by_outputs, implementation=name
            ),
            x,
        )
        for got, want in ((y, x @ matrix), (pull_back(d_y)[0], d_y @ matrix.T)):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
