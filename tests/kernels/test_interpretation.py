"""The context in which kernels run in Pallas's interpreter."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import linear_cross_entropy, rms_norm
from kernels_pallas.core import interpreted, target


def has_a_kernel(function, *arguments):
    return "pallas_call" in str(jax.make_jaxpr(function)(*arguments))


def test_a_function_is_traced_anew_inside_and_outside():
    norm, x = jax.jit(rms_norm), jnp.ones((4, 32))
    for _ in range(2):
        assert not has_a_kernel(norm, x)
        with interpreted("triton"):
            assert has_a_kernel(norm, x)


def test_contexts_nest_and_end_with_an_error():
    x = jnp.ones((4, 32))
    with pytest.raises(ValueError, match="there is no implementation 'cudnn'"), interpreted("triton"):
        with interpreted("cudnn"):
            rms_norm(x)
    assert not has_a_kernel(rms_norm, x)


@pytest.mark.skipif(target.current().platform != "cpu", reason="a chip compiles its own kernels")
def test_outside_a_kernel_is_refused_where_its_chip_is_not():
    x = jnp.ones((4, 32))
    with interpreted():
        rms_norm(x, implementation="triton")
    with pytest.raises(NotImplementedError, match="triton cannot serve this call"):
        rms_norm(x, implementation="triton")


def test_the_implementation_is_kept_where_a_call_would_choose_the_reference():
    """The loss of few tokens defaults to the reference; a call that names another implementation keeps it."""
    arguments = jnp.ones((4, 32)), jnp.ones((32, 16)), jnp.zeros(4, jnp.int32)
    with interpreted():
        assert not has_a_kernel(linear_cross_entropy, *arguments)
    with interpreted("mosaic_tpu"):
        assert has_a_kernel(linear_cross_entropy, *arguments)
        assert not has_a_kernel(lambda *xs: linear_cross_entropy(*xs, implementation="reference"), *arguments)
