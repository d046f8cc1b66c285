"""The bytes of a jaxpr whose elementwise work is fused, against what its kernels read and write."""

import jax
import jax.numpy as jnp
import pytest

from jaxlm.costs.jaxpr.fused import fused_bytes

N = 64
MATRIX, ROW = 4 * N * N, 4 * N


def moved(function, *shapes):
    return fused_bytes(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(each, jnp.float32) for each in shapes)).jaxpr)


@jax.checkpoint
def squared(x):
    y = jnp.sin(x)
    return y @ y


CASES = {
    "a chain": (lambda x, y: jnp.exp(x * y) + x, 3 * MATRIX),
    "two results": (lambda x, y: (x + y, x * y), 6 * MATRIX),
    "a sum between": (lambda x, y: x - jnp.sum(x * y, axis=0, keepdims=True), 2 * MATRIX + ROW + 2 * MATRIX + ROW),
    "a sum by a function": (
        lambda x, y: jax.lax.reduce(x * y, 0.0, lambda a, b: a * b + a, (0,)),
        2 * MATRIX + ROW,
    ),
    "a product of what is computed": (lambda x, y: (x + 1) @ y, 2 * MATRIX + 3 * MATRIX),
    "a product with a vector": (lambda x, y: jnp.exp(x + y) @ x[0] + x[1], 2 * MATRIX + ROW + 3 * ROW),
    "a product of what is transposed": (lambda x, y: jnp.exp(x.T @ y), 3 * MATRIX + 2 * MATRIX),
    "a part": (lambda x, y: x[:2] * y[2:4], 3 * 2 * ROW),
    "windows of one array": (lambda x, y: x[1:] * x[:-1] + y[1:], 2 * (MATRIX - ROW) + MATRIX),
    "a loop": (lambda x, y: jax.lax.scan(lambda c, row: (c + row, c * row), x[0], y), N * 6 * ROW + 2 * ROW),
}


@pytest.mark.parametrize("name", CASES)
def test_each_kernel_reads_what_it_needs_once(name):
    function, expected = CASES[name]
    assert moved(function, (N, N), (N, N)) == {"forward": expected}


def test_what_moves_an_unknown_number_of_bytes_is_refused():
    with pytest.raises(ValueError, match="^cond moves bytes that depend on"):
        moved(lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), (N,))
    with pytest.raises(ValueError, match="^while moves"):
        moved(lambda x: jax.lax.while_loop(lambda x: x[0] > 0, jnp.cos, x), (N,))


def test_bytes_have_the_phase_of_what_is_computed():
    found = moved(jax.grad(lambda x: jnp.sum(squared(x))), (N, N))
    assert found["rematerialised"] == 2 * MATRIX  # the sine
    assert found["backward"] > found["rematerialised"]
