"""Activations as kernels compute them, in float32, against their definitions in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.core.activations import KERNEL

X = np.linspace(-12, 12, 9601)
NORMAL, DENSITY = np.vectorize(lambda x: 0.5 * math.erfc(-x * 2**-0.5))(X), np.exp(-X * X / 2) / math.sqrt(2 * math.pi)
C, CUBE = math.sqrt(2 / math.pi), 0.044715
TANH = np.tanh(C * (X + CUBE * X**3))
SIGMOID = 1 / (1 + np.exp(-X))
# Values and derivatives.
EXACT = {
    "silu": (X * SIGMOID, SIGMOID + X * SIGMOID * (1 - SIGMOID)),
    "gelu": (X * NORMAL, NORMAL + X * DENSITY),
    "gelu_tanh": (
        0.5 * X * (1 + TANH),
        0.5 * (1 + TANH) + 0.5 * X * (1 - TANH**2) * C * (1 + 3 * CUBE * X**2),
    ),
    "relu": (np.maximum(X, 0), X > 0),
    "relu_squared": (np.maximum(X, 0) ** 2, 2 * np.maximum(X, 0)),
}


@pytest.mark.parametrize("name", KERNEL)
def test_values_and_derivatives_are_exact_in_float32(name):
    """The tolerance is eight units in the last place of numbers around 1, or of the value where it is larger.

    GELU by tanh cannot be more exact than XLA's tanh is near ±1, two units in the last place, times x and the slope of
    its argument: up to 100 where tanh is not yet clipped to ±1.
    """
    x = jnp.asarray(X, jnp.float32)
    value, derivative = jax.jit(lambda x: jax.jvp(KERNEL[name], (x,), (jnp.ones_like(x),)))(x)
    for got, wanted in zip((value, derivative), EXACT[name], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=2e-5 if name == "gelu_tanh" else 5e-7)


def test_the_tail_of_gelu_is_no_difference_of_ones():
    """At Φ = 10⁻⁶, 1 + erf has only one exact digit, and its gradient vanishes."""
    x = jnp.asarray([-5.0, -4.5, -4.0, -3.0], jnp.float32)
    wanted = [float(v) * 0.5 * math.erfc(-float(v) * 2**-0.5) for v in x]
    np.testing.assert_allclose(KERNEL["gelu"](x), wanted, rtol=3e-4)
    assert KERNEL["gelu"](jnp.float32(-1e30)) == 0 == jax.grad(KERNEL["gelu"])(jnp.float32(-1e30))
