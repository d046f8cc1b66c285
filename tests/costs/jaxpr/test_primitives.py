"""Costs of single equations, against arithmetic by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxlm.costs.jaxpr.count import count


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def square_sum(f):
    return lambda *xs: jnp.sum(f(*xs))


def repeated(n):
    return lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=n)[0]


def nested(x, w):
    def outer(x, _):
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0] @ w, None

    return lax.scan(outer, x, None, length=5)[0]


def unused_carry(x, w):
    """The second carry is a product that no result needs."""
    return lax.scan(lambda c, _: ((c[0] + 1, c[1] @ w), c[1]), (x, x), None, length=4)[0][0]


@jax.custom_vjp
def twice(x, w):
    return x @ w


twice.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g @ saved[1] @ saved[1].T))


def counted_down(x, w):
    return lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] @ w, c[1] - 2), (x, 7))[0]


def counted_to(x, w):
    return lax.while_loop(lambda c: c[0] <= c[1], lambda c: (3 + c[0], c[1], c[2] @ w), (1, 10, x))[2]


def convolution(x, k, **options):
    return lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def ragged(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


def blocks(x, w):
    """Two layers, each of two products, whose insides are computed again for the backward pass."""
    layer = jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)
    return jnp.sum(layer(layer(x)))


ONE = 2 * 4 * 8 * 8  # FLOPs of [4, 8] · [8, 8]


PRODUCTS = {
    "matmul": (jnp.matmul, [f32(4, 8), f32(8, 16)], 2 * 4 * 8 * 16),
    "vector": (jnp.matmul, [f32(8), f32(8)], 2 * 8),
    "einsum": (
        lambda a, b: jnp.einsum("BTKH,BSKH->BKTS", a, b),
        [f32(2, 5, 3, 7), f32(2, 4, 3, 7)],
        2 * 2 * 3 * 5 * 4 * 7,
    ),
    "outer": (lambda a, b: jnp.einsum("i,j->ij", a, b), [f32(3), f32(5)], 2 * 15),
    "vmap": (jax.vmap(jnp.matmul), [f32(3, 4, 8), f32(3, 8, 16)], 3 * 2 * 4 * 8 * 16),
    "vmap of one": (jax.vmap(jnp.matmul, (0, None)), [f32(3, 4, 8), f32(8, 16)], 3 * 2 * 4 * 8 * 16),
    "ragged": (ragged, [f32(12, 8), f32(3, 8, 5), i32(3)], 2 * 12 * 8 * 5),
    "ragged backward": (
        jax.grad(square_sum(ragged), (0, 1)),
        [f32(12, 8), f32(3, 8, 5), i32(3)],
        2 * 2 * 12 * 8 * 5,  # a sum needs no value of the product itself
    ),
    "convolution": (
        lambda x, k: convolution(x, k, window_strides=(1, 1), padding="VALID"),
        [f32(2, 8, 9, 3), f32(3, 2, 3, 5)],
        2 * 2 * 6 * 8 * 5 * 3 * 2 * 3,
    ),
    "convolution in groups": (
        lambda x, k: convolution(x, k, window_strides=(2, 1), padding="VALID", feature_group_count=2),
        [f32(2, 8, 9, 4), f32(2, 3, 2, 6)],
        2 * 2 * 4 * 7 * 6 * 2 * 3 * 2,
    ),
    # Of 8 outputs and 3 taps 2 pairs fall on padding.
    "convolution, padded": (
        lambda x, k: convolution(x, k, window_strides=(1, 1), padding="SAME"),
        [f32(1, 8, 8, 3), f32(3, 3, 3, 5)],
        2 * (8 * 3 - 2) ** 2 * 3 * 5,
    ),
    "convolution backward": (
        jax.grad(square_sum(lambda x, k: convolution(x, k, window_strides=(2, 2), padding="VALID")), (0, 1)),
        [f32(2, 9, 9, 3), f32(3, 3, 3, 5)],
        2 * (2 * 2 * 4 * 4 * 5 * 3 * 3 * 3),
    ),
    "scan": (repeated(7), [f32(4, 8), f32(8, 8)], 7 * ONE),
    "nested scans": (nested, [f32(4, 8), f32(8, 8)], 5 * (3 + 1) * ONE),
    "scan, unrolled": (
        lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=7, unroll=7)[0],
        [f32(4, 8), f32(8, 8)],
        7 * ONE,
    ),
    "unused carry": (unused_carry, [f32(4, 8), f32(8, 8)], 0),
    "unused": (lambda x, w: (x @ w, x + 1)[1], [f32(4, 8), f32(8, 8)], 0),
    "fori_loop": (lambda x, w: lax.fori_loop(2, 7, lambda i, x: x @ w, x), [f32(4, 8), f32(8, 8)], 5 * ONE),
    "while, down": (counted_down, [f32(4, 8), f32(8, 8)], 4 * ONE),
    "while, up": (counted_to, [f32(4, 8), f32(8, 8)], 4 * ONE),
    "cond": (
        lambda p, x, w: lax.cond(p, lambda: x @ w, lambda: x @ w @ w),
        [jax.ShapeDtypeStruct((), bool), f32(4, 8), f32(8, 8)],
        2 * ONE,
    ),
    "switch": (
        lambda i, x, w: lax.switch(i, [lambda: x @ w @ w @ w, lambda: x @ w, lambda: x]),
        [i32(), f32(4, 8), f32(8, 8)],
        3 * ONE,
    ),
    "jit": (jax.jit(lambda x, w: jax.jit(jnp.matmul)(x, w) @ w), [f32(4, 8), f32(8, 8)], 2 * ONE),
    "value and gradient": (
        jax.value_and_grad(square_sum(lambda x, w: jnp.sin(x @ w)), (0, 1)),
        [f32(4, 8), f32(8, 8)],
        3 * ONE,
    ),
    "custom_vjp": (twice, [f32(4, 8), f32(8, 8)], ONE),
    "custom_vjp backward": (
        jax.grad(square_sum(lambda x, w: jnp.sin(twice(x, w))), (0, 1)),
        [f32(4, 8), f32(8, 8)],
        3 * ONE + 2 * (2 * 8**3),
    ),
    # Forward 4; backward 8; again: of each layer the first product, as the last one's value is not needed.
    "checkpoint": (jax.value_and_grad(blocks, (0, 1)), [f32(4, 8), f32(8, 8)], (4 + 8 + 2) * ONE),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    fn, arguments, flops = PRODUCTS[name]
    counted = count(fn, *arguments).matmul_flops
    assert counted == flops and type(counted) is int


def test_solve_counts_only_the_solution():
    cost = count(jnp.linalg.solve, f32(4, 4), f32(4))
    assert cost.matmul_flops == 0  # a·x and xᵀ·a are there for derivatives
    assert cost.assumed == ("lu", "triangular_solve")


def test_a_loop_without_end_is_refused():
    def loop(x, n):
        with jax.named_scope("search"):
            return lax.fori_loop(0, n, lambda i, x: x @ x, x)

    with pytest.raises(ValueError, match="scope search"):
        count(loop, f32(8, 8), i32())
    assert count(loop, f32(8, 8), i32(), trips=6).matmul_flops == 6 * 2 * 8**3


def in_place(x):
    held = jax.new_ref(x)
    held[0] = held[0] * 2
    jax.ref.addupdate(held, 1, x[0])
    return jax.freeze(held)


ELEMENTS = {
    "chain": (lambda x: jnp.exp(x) * 2 + lax.integer_pow(x, 3), [f32(4, 8)], 4 * 32, 0),
    "max": (lambda x: jnp.maximum(x, 0.0), [f32(4, 8)], 32, 0),
    "logic": (lambda x: jnp.where(x > 0, x, -x), [f32(4, 8)], 32, 0),
    "moves": (lambda x: jnp.broadcast_to(x.T.reshape(-1).astype(jnp.bfloat16)[None], (3, 32)), [f32(4, 8)], 0, 0),
    "integers": (lambda i: i * 2 + 1, [i32(4, 8)], 0, 0),
    "sum": (lambda x: jnp.sum(x, 0), [f32(4, 8)], 0, 24),
    "largest": (lambda x: jnp.max(x), [f32(4, 8)], 0, 31),
    "argmax": (lambda x: jnp.argmax(x, 0), [f32(4, 8)], 0, 0),
    "cumulative": (lambda x: jnp.cumsum(x, 1), [f32(4, 8)], 0, 4 * 7),
    "window": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"), [f32(4, 8)], 0, 4 * 7),
    "sort": (lambda x: jnp.sort(x), [f32(4, 8)], 0, 0),
    "reference": (in_place, [f32(4, 8)], 8, 8),
    "scatter-add": (lambda x, i: x.at[i].add(jnp.zeros((2, 8)), mode="drop"), [f32(4, 8), i32(2)], 0, 16),
    "bits": (lambda k: jax.random.bits(k, (4, 8)), [jax.eval_shape(jax.random.key, 0)], 0, 0),
    "scan": (lambda x: lax.scan(lambda c, x: (c + x, None), jnp.zeros(8), x)[0], [f32(4, 8)], 32, 0),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_and_reductions(name):
    fn, arguments, elementwise, reduction = ELEMENTS[name]
    cost = count(fn, *arguments)
    assert (cost.elementwise_flops, cost.reduction_flops) == (elementwise, reduction)
    assert cost.flops == elementwise + reduction
    assert not cost.assumed


BYTES = {
    "matmul": (jnp.matmul, [f32(4, 8), f32(8, 16)], 4 * (32 + 128), 4 * 64),
    "bfloat16": (lambda x: x + x, [jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)], 64, 64),
    "half a byte": (lambda x: lax.rev(x, (0,)), [jax.ShapeDtypeStruct((8,), jnp.int4)], 4, 4),
    "literal": (lambda x: x * 2.0, [f32(4, 8)], 128, 128),
    "view": (lambda x: x.reshape(-1), [f32(4, 8)], 0, 0),
    "slice": (lambda x: x[:2], [f32(1000, 8)], 64, 64),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name):
    fn, arguments, read, written = BYTES[name]
    cost = count(fn, *arguments)
    assert (cost.bytes_in, cost.bytes_out) == (read, written)


PARTS = {
    "gather": (lambda x, i: x.at[i].get(mode="promise_in_bounds"), [f32(1000, 8), i32(3)], 96 + 12, 96),
    "scatter": (lambda x, i, u: x.at[i].set(u), [f32(1000, 8), i32(3), f32(3, 8)], 96 + 12, 96),
    "scatter-add": (lambda x, i, u: x.at[i].add(u), [f32(1000, 8), i32(3), f32(3, 8)], 2 * 96 + 12, 96),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 8)), [f32(1000, 8), i32()], 64 + 4, 64),
    "dynamic_update_slice": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        [f32(1000, 8), f32(2, 8), i32()],
        64 + 4,
        64,
    ),
}


@pytest.mark.parametrize("primitive", PARTS)
def test_what_is_taken_or_put_counts_not_the_array_around_it(primitive):
    fn, arguments, read, written = PARTS[primitive]
    cost = count(fn, *arguments).of(primitive=primitive)
    assert (cost.bytes_in, cost.bytes_out) == (read, written)
