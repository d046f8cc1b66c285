"""Products that are rounded before they are added, in machine code as users run it: the suite's is made quickly, and
fuses nothing."""

import jax
import numpy as np
import pytest
from meshes import as_users_run

from kernels_pallas.core.unfused import unfused


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_a_product_is_rounded_before_it_is_added(terms):
    draw = np.random.default_rng(0)
    *pairs, c = draw.normal(size=(2 * terms + 1, 64, 257)).astype(np.float32)

    @as_users_run
    def total(*arrays):
        *factors, y = arrays
        for a, b in zip(factors[::2], factors[1::2], strict=True):
            y += unfused(a * b)
        return y

    rounded = c.copy()
    for a, b in zip(pairs[::2], pairs[1::2], strict=True):
        rounded += a * b
    np.testing.assert_array_equal(total(*pairs, c), rounded)


def test_every_number_and_its_gradient_stay_as_they_are():
    numbers = np.array([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    y, pull_back = as_users_run(lambda x: jax.vjp(unfused, x))(numbers)
    np.testing.assert_array_equal(y, numbers)
    np.testing.assert_array_equal(np.signbit(y[:-2]), np.signbit(numbers[:-2]))
    np.testing.assert_array_equal(*pull_back(y), numbers)
