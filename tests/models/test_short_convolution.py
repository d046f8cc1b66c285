"""The short convolution of recurrent layers: its gradients, and what XLA makes of it for chips."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from markers import ELSEWHERE

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import hlo, launched_kernels, targets
from jaxlm.models.doors.scan import ChunkRows, scan
from jaxlm.models.recurrences import convolution


@ELSEWHERE
@pytest.mark.parametrize("target", ["h200-sxm:1", "tpu-v5e:1x1"])
def test_a_short_convolution_is_one_pass_with_its_activation(target):
    """XLA makes one kernel of the taps, documents and activation: it needs no kernel of ours forward."""
    mesh = meshes.make(1, 1, 1, devices=targets.devices(Target.parse(target)))
    whole, (B, T, D) = NamedSharding(mesh, PartitionSpec()), (4, 512, 1024)
    shapes = ((B, T, D), jnp.bfloat16), ((4, D), jnp.float32), ((B, T), jnp.bool_), ((B, T), jnp.bool_)
    x_BTD, weights, *rows = (jax.ShapeDtypeStruct(*each, sharding=whole) for each in shapes)

    def convolve(x_BTD, weights, *rows):
        recurrence = convolution.short_convolution((weights, (None, None)), None, "tail", x_BTD.dtype)
        inputs = x_BTD, ("batch", "sequence", None)
        return scan(recurrence, recurrence.initial_states(B), ChunkRows(*rows), inputs)[0]

    with jax.set_mesh(mesh):
        compiled = jax.jit(convolve).lower(x_BTD, weights, *rows).compile()
    entry = compiled.as_text().partition("ENTRY")[2]
    assert len(re.findall(rf" = \(?\w+\[{B},5\d\d,{D}\]\S* (?!parameter)", entry)) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < B * T * D / 8


@pytest.mark.parametrize("tokens", [2, 9])
def test_the_gradients_of_a_short_convolution_are_those_of_its_sums(tokens):
    """The tail, the input, the taps and the bias have those of JAX, with documents that begin, and padding."""
    draw = np.random.default_rng(0)
    shapes = (2, 3, 5), (2, tokens, 5), (4, 5), (5,), (2, tokens, 5)
    *arrays, d_y = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)
    rows = ChunkRows(np.arange(tokens) < np.array([[tokens], [tokens - 1]]), np.arange(tokens) == np.array([[1], [9]]))

    def gradients(function):
        def outputs(tail, x, weights, bias):
            return function("silu", tail, jax.tree.map(jnp.asarray, rows), x, weights, bias)

        return jax.vjp(outputs, *arrays)[1](d_y)

    model_fixtures.assert_same_numbers(gradients(convolution._outputs), gradients(convolution._outputs.fun), 1e-6)


def test_gradients_in_bfloat16_are_those_of_float32_but_for_its_rounding():
    """The gradient of the sums is rounded once and added up in float32: results differ by up to 5.3e-3 of the largest.
    Those of taps and bias stay float32."""
    draw, T = np.random.default_rng(0), 9
    shapes = (2, 3, 5), (2, T, 5), (4, 5), (5,), (2, T, 5)
    tail, x, weights, bias, d_y = (jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for shape in shapes)
    rows = ChunkRows(jnp.arange(T)[None] < jnp.array([[T], [T - 1]]), jnp.arange(T)[None] == jnp.array([[1], [9]]))

    @partial(jax.jit, static_argnums=0)
    def gradients(dtype):
        def outputs(tail, x, weights, bias):
            return convolution._outputs("silu", tail, rows, x, weights, bias)

        arrays = tail.astype(dtype), x.astype(dtype), weights.astype("float32"), bias.astype("float32")
        return jax.vjp(outputs, *arrays)[1](d_y.astype(dtype))

    made, exact = gradients("bfloat16"), gradients("float32")
    assert [each.dtype.name for each in made] == ["bfloat16", "bfloat16", "float32", "float32"]
    for one, other in zip(made, exact, strict=True):
        np.testing.assert_allclose(one.astype("float32"), other, rtol=0, atol=8e-3 * np.abs(other).max())


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.parametrize("target, most", [("h200-sxm:1", 8.2), ("tpu-v5e:1x1", 4.1)])
def test_the_gradients_of_a_short_convolution_move_few_arrays(target, most):
    """At least three: x, and the gradients of outputs and of x. A GPU sums those of weights apart."""
    mesh = meshes.make(1, 1, 1, devices=targets.devices(Target.parse(target)))
    whole, (B, T, D) = NamedSharding(mesh, PartitionSpec()), (4, 2048, 2048)
    shapes = *(((B, T, D), jnp.bfloat16),) * 2, ((4, D), jnp.float32), *(((B, T), jnp.bool_),) * 2
    structs = [jax.ShapeDtypeStruct(*each, sharding=whole) for each in shapes]

    def gradients(d_y, x, weights, *rows):
        tail = jnp.zeros((B, 3, D), x.dtype)
        return jax.vjp(lambda *xs: convolution._outputs("silu", tail, ChunkRows(*rows), *xs, None), x, weights)[1](d_y)

    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients).lower(*structs).compile()
    kernels = launched_kernels.kernels(hlo.parse(compiled.as_text(), trips=1))
    assert sum(each.bytes * each.count for each in kernels) < most * 2 * B * T * D


def test_products_with_taps_are_rounded_before_they_are_added():
    """In machine code as users run it, of prompts and of single tokens: fused with the sums in one and not in another,
    they would give other bits."""
    draw, T = np.random.default_rng(0), 40
    tail, x, weights = (draw.normal(size=size).astype(np.float32) for size in ((3, 3, 96), (3, T, 96), (4, 96)))
    recurrence = convolution.short_convolution((weights, (None, None)), None, "tail", x.dtype, "linear")

    @meshes.as_users_run
    def outputs(tail, x):
        rows = ChunkRows(jnp.ones(x.shape[:2], bool), jnp.zeros(x.shape[:2], bool))
        return recurrence.chunk({"tail": tail}, rows, x, weights)[1]

    read = np.concatenate([tail, x], 1)
    rounded = sum(read[:, i : i + T] * weights[i] for i in range(4))
    np.testing.assert_array_equal(outputs(tail, x), rounded)
    np.testing.assert_array_equal(outputs(read[:, 5:8], read[:, 8:9]), rounded[:, 5:6])
