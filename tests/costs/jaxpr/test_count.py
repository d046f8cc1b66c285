"""What is counted against arithmetic by hand, and against the products that XLA's compiled program runs."""

import functools
import math
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from jaxlm import sharding
from jaxlm.costs.jaxpr.count import count
from jaxlm.inference.cache import empty_cache
from jaxlm.inference.steps import decode_step, prefill
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.training.step import jit_steps, make_steps

MODELS = Path(__file__).parents[3] / "configs" / "models"


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
    """Two layers, each of two products: what is inside is computed again for the backward pass."""
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


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_shard_map_counts_every_shard():
    def fn(x, w):
        return lax.psum(x @ w, "tensor")

    def mapped(x, w):
        specs = PartitionSpec("data", "tensor"), PartitionSpec("tensor")
        return jax.shard_map(fn, mesh=mesh_of(data=2, tensor=4), in_specs=specs, out_specs=PartitionSpec("data"))(x, w)

    cost = count(mapped, f32(16, 8), f32(8, 8))
    assert cost.matmul_flops == 2 * 16 * 8 * 8
    (sent,) = cost.collectives
    assert sent == ("all-reduce", ("tensor",), 1, 8 * (8 * 8 * 4))  # [8, 8] float32 on each of eight shards
    assert cost.matmul_flops + cost.reduction_flops == cost.flops


def test_shard_map_over_some_axes_and_inside_another():
    mesh = mesh_of(data=2, tensor=4)

    def over_data(x, w):
        return jax.shard_map(
            jnp.matmul, mesh=mesh, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data"),
            axis_names={"data"},
        )(x, w)  # fmt: skip

    assert count(over_data, f32(16, 8), f32(8, 8)).matmul_flops == 2 * 16 * 8 * 8

    def both(x, w):
        def inner(x, w):
            return jax.shard_map(
                jnp.matmul, in_specs=(PartitionSpec("tensor"), PartitionSpec()), out_specs=PartitionSpec("tensor"),
                axis_names={"tensor"},
            )(x, w)  # fmt: skip

        return jax.shard_map(
            inner, mesh=mesh, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data"),
            axis_names={"data"},
        )(x, w)  # fmt: skip

    assert count(both, f32(16, 8), f32(8, 8)).matmul_flops == 2 * 16 * 8 * 8


def test_collectives_by_kind():
    def fn(x):
        x = lax.psum_scatter(lax.all_gather(x, "data", tiled=True), "data", tiled=True)
        return lax.ppermute(x, "data", [(0, 1), (1, 0)])

    def mapped(x):
        spec = PartitionSpec("data")
        f = jax.shard_map(fn, mesh=mesh_of(data=2), in_specs=spec, out_specs=spec, check_vma=False)
        return lax.fori_loop(0, 3, lambda i, x: f(x), x)

    each = 3 * 2 * (4 * 8 * 4)
    assert count(mapped, f32(8, 8)).collectives == (
        ("all-gather", ("data",), 3, each),
        ("collective-permute", ("data",), 3, each),
        ("reduce-scatter", ("data",), 3, 2 * each),
    )


def kernel(cost):
    def body(x, y):
        y[...] = x[...] * 2

    return pl.pallas_call(body, out_shape=f32(4, 8), interpret=True, name="doubled", cost_estimate=cost)


def test_pallas_kernels_count_what_they_state():
    stated = pl.CostEstimate(flops=32, transcendentals=5, bytes_accessed=300)
    cost = count(kernel(stated), f32(4, 8))
    assert (cost.flops, cost.kernel_flops) == (37, 37)
    assert (cost.bytes_in, cost.bytes_out) == (300 - 128, 128)
    assert cost["doubled"].flops == 37
    looped = count(lambda x: lax.fori_loop(0, 3, lambda i, x: kernel(stated)(x), x), f32(4, 8))
    assert looped.flops == 3 * 37
    with pytest.raises(ValueError, match="kernel doubled states no cost"):
        count(kernel(None), f32(4, 8))


def test_an_unknown_primitive_is_named():
    cost = count(jnp.fft.fft, jax.ShapeDtypeStruct((8,), jnp.complex64))
    assert cost.assumed == ("fft",) and cost.flops == 8
    assert "assumed of fft" in str(cost)


def test_scopes_and_phases():
    def layer(x, w):
        with jax.named_scope("outer"):
            with jax.named_scope("product"):
                y = x @ w
            return jnp.sin(y)

    def loss(w, x):
        return jnp.sum(lax.scan(lambda x, _: (jax.checkpoint(layer)(x, w), None), x, None, length=3)[0])

    cost = count(jax.vmap(jax.value_and_grad(loss), (None, 0)), f32(8, 8), f32(4, 2, 8))
    one = 4 * 2 * 2 * 8 * 8
    product = cost["outer/product"]
    assert set(cost.children) == {"outer"} and set(cost["outer"].children) == {"product"}
    assert product.forward.matmul_flops == 3 * one
    assert product.backward.matmul_flops == 6 * one
    assert product.rematerialised.matmul_flops == 3 * one
    assert cost.of(phase="backward", kind="matmul").flops == 6 * one
    with pytest.raises(KeyError, match="outer/products: outer has the scopes product"):
        cost["outer/products"]


def abstract_step(model, training, optimization=None):
    steps = make_steps(model, training, optimization or tiny.optimization())
    batch = {name: i32(training.batch, training.sequence) for name in ("tokens", "targets", "segments", "positions")}
    return steps, jax.eval_shape(steps.init), batch


def every_node(cost):
    yield cost
    for child in cost.children.values():
        yield from every_node(child)


def test_the_tree_of_a_model_adds_up():
    steps, state, batch = abstract_step(tiny.model(), tiny.training(remat="full", microbatches=2))
    cost = count(steps.train, state, batch)
    for node in every_node(cost):
        for figure in ("flops", "matmul_flops", "elementwise_flops", "reduction_flops", "bytes_in", "bytes_out"):
            parts = [node.of(scope=()), *node.children.values()]
            assert getattr(node, figure) == sum(getattr(part, figure) for part in parts)
            phases = node.forward, node.backward, node.rematerialised
            assert getattr(node, figure) == sum(getattr(phase, figure) for phase in phases)
    assert not cost.assumed
    assert "attention" in str(cost)

    # Every matrix has its scope, and does 2 FLOPs per number and token forward, twice that backward.
    tokens, (_, abstract) = 8 * tiny.CONTEXT, tree.abstract(tiny.model())
    for path, parameter in tree.paths(tree.dimensions(abstract)).items():
        if parameter.inputs and path != "embedding":
            each = 2 * math.prod(parameter.shape) * tokens
            assert cost[path].forward.matmul_flops == each, path
            assert cost[path].backward.matmul_flops == 2 * each, path
    assert cost["layers/feed_forward/down"].rematerialised.flops == 0
    assert cost["layers/feed_forward/up"].rematerialised.flops == cost["layers/feed_forward/up"].forward.flops


COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]*)\]")


def executed_products(text):
    """FLOPs of the products in an optimised program, times the trips of the loops around them."""
    lines, name, entry = {}, "", ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[1]
            entry = name if line.startswith("ENTRY") else entry
        lines.setdefault(name, []).append(line)

    def numbers(text):
        return [int(n) for n in text.split(",") if n]

    def flops(name):
        total, shapes = 0, {}
        for line in lines[name]:
            if match := INSTRUCTION.match(line):
                shapes[match[1]] = numbers(match[2])
            assert "convolution(" not in line and not re.search(r"custom-call\(.*dot_general", line), line
            if match := re.search(r" dot\((?:\w+\[[\d,]*\]\S* )?%([\w.-]+),", line):
                contracted = numbers(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)[1])
                result = numbers(INSTRUCTION.match(line)[2])
                total += 2 * math.prod(result) * math.prod(shapes[match[1]][i] for i in contracted)
            trips = 1
            if " while(" in line:
                trips = int(re.search(r'known_trip_count"?:\{"n":"(\d+)"', line)[1])
            for callee in re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", line):
                total += trips * flops(callee)
        return total

    return flops(entry)


SETTINGS = [
    ("llama", {}, {}),
    ("llama", {"remat": "full", "microbatches": 2}, {}),
    ("llama", {"remat": "full", "scan_layers": False}, {}),
    ("gpt2", {"remat": ("query", "key", "value", "up")}, {}),
    ("qwen3", {"remat": ("attention",), "dropout": 0.1, "z_loss": 1e-4}, {}),
    ("llama3.1", {"scan_layers": False}, {"kind": "muon"}),
]


@pytest.mark.parametrize("family, training, optimization", SETTINGS, ids=str)
def test_products_of_the_training_step_are_those_that_run(family, training, optimization):
    mesh = sharding.make_mesh()
    steps, state, batch = abstract_step(
        tiny.model(tiny.FAMILIES[family]), tiny.training(**training), tiny.optimization(**optimization)
    )
    with jax.set_mesh(mesh):
        text = jit_steps(steps, mesh).train.lower(state, batch).compile().as_text()
    cost = count(steps.train, state, batch)
    assert cost.matmul_flops == executed_products(text)
    assert not cost.assumed


@pytest.mark.parametrize("shape, microbatches", [((2, 2, 2), 1), ((4, 1, 2), 2)], ids=str)
def test_the_products_of_all_devices_are_those_of_one(shape, microbatches):
    mesh = sharding.make_mesh(*shape)
    training = tiny.training(remat="full", microbatches=microbatches, batch=16)
    steps, state, batch = abstract_step(tiny.model(), training)

    def lying(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    rows = sharding.sharding(("batch", "sequence"), (training.batch, training.sequence), mesh)
    with jax.set_mesh(mesh):
        cost = count(steps.train, state, batch)
        arguments = jax.tree.map(lying, state, steps.shardings(mesh)), jax.tree.map(lambda x: lying(x, rows), batch)
        text = jit_steps(steps, mesh).train.lower(*arguments).compile().as_text()
    assert cost.matmul_flops == mesh.size * executed_products(text)
    # The gradients, float32, and the loss cross the data axis once: by the program's own word, or XLA's partitioner's.
    sent = shape[0] * 4 * (tree.parameter_count(tiny.model()) + 1)
    written = [(each.kind, each.axes, each.bytes) for each in cost.collectives]
    assert written == ([] if microbatches == 1 else [("all-reduce", ("data",), sent)])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_products_of_inference_are_those_that_run(family):
    model = tiny.model(tiny.FAMILIES[family])
    graph, declared = tree.abstract(model)
    parameters, cache = tree.shapes(declared), jax.eval_shape(lambda: empty_cache(model, 4, 32, jnp.float32))
    for step, read in ((prefill, (i32(4, 16), i32(4))), (decode_step, (i32(4),))):
        fn, arguments = functools.partial(step, graph), (parameters, *read, cache)
        cost = count(fn, *arguments)
        assert cost.name == step.__name__
        assert cost.matmul_flops == executed_products(jax.jit(fn).lower(*arguments).compile().as_text())
        assert not cost.assumed


def published(name):
    return ModelConfig(**tomllib.loads((MODELS / f"{name}.toml").read_text())["model"])


def test_the_largest_model_counts_in_seconds():
    model = published("llama3.1-405b")
    training = tiny.training(batch=512, sequence=model.context, dtype="bfloat16", remat="full", microbatches=4)
    begin = time.perf_counter()
    cost = count(*(lambda steps, *state: (steps.train, *state))(*abstract_step(model, training)))
    assert time.perf_counter() - begin < 20  # some two seconds on two quiet cores
    tokens = 512 * model.context
    assert cost["layers/attention/query"].forward.flops == 2 * 126 * 16384 * 16384 * tokens
    assert cost["unembedding"].matmul_flops == 6 * 16384 * 128256 * tokens
    assert not cost.assumed


def test_no_backend_is_asked():
    code = """
import jax, tiny
from jax.sharding import AbstractMesh, AxisType
from jaxlm.costs.jaxpr.count import count
from jaxlm.training.step import make_steps
steps = make_steps(tiny.model(), tiny.training(microbatches=2, batch=4096), tiny.optimization())
batch = {k: jax.ShapeDtypeStruct((4096, 32), "int32") for k in ("tokens", "targets", "segments", "positions")}
state = jax.eval_shape(steps.init)
alone = count(steps.train, state, batch)
with jax.sharding.use_abstract_mesh(AbstractMesh((1024, 2, 4), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)):
    spread = count(steps.train, state, batch)
assert alone.matmul_flops == spread.matmul_flops
assert [(sent.kind, sent.axes) for sent in spread.collectives] == [("all-reduce", ("data",))]
print(jax._src.xla_bridge.backends_are_initialized())
"""
    here = Path(__file__).parents[2]
    path = {"PYTHONPATH": f"{here}:{here.parent}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, check=False)
    assert ran.stdout.strip() == "False", ran.stderr


def test_figures_are_whole_numbers():
    cost = count(lambda x: jnp.sum(jnp.sin(x @ x)), f32(np.int64(8), np.int64(8)))
    assert all(type(n) is int for row in cost.rows for n in row[6:])
    assert cost.intensity == cost.flops / (cost.bytes_in + cost.bytes_out)
