"""Linear attention in chunks against its recurrences in float64, with documents and padding; and what is refused."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params
from matrices import sampled
from meshes import as_users_run
from numerics import problem, results_and_gradients

from jaxlm.models.recurrences.matrix_state import matrix_recurrence
from kernels_pallas import gated_delta_rule, state_space
from kernels_pallas.core import interpreted, target
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.linear_attention import reference

B, T, K, N, H, V, CHUNK = 2, 41, 2, 4, 8, 12, 16
FUNCTIONS = {"gated_delta_rule": gated_delta_rule, "state_space": state_space}
RECURRENCES = {
    "gated_delta_rule": matrix_recurrence(gated_delta_rule, N, H, V, is_delta=True).operation.work,
    "state_space": matrix_recurrence(state_space, N, H, V).operation.work,
}


def operands(name, tokens=T, begins=(), dtype=np.float64):
    """Return arrays of a call, of which the second row has padding after three quarters of its tokens."""
    random = np.random.default_rng(0)
    shapes = [(B, tokens, K, H)] * 2 + [(B, tokens, N, V)] + [(B, tokens, N)] * 2
    arrays = [random.standard_normal(shape) for shape in shapes]
    arrays[3], arrays[4] = -np.log1p(np.exp(arrays[3])), 1 / (1 + np.exp(-arrays[4]))
    arrays += [random.standard_normal(N)] * (name == "state_space") + [random.standard_normal((B, N, H, V))]
    is_token = np.arange(tokens) < np.array([[tokens], [3 * tokens // 4 + 1]])
    is_first = np.zeros((B, tokens), bool)
    is_first[:, list(begins)] = True
    return [jnp.asarray(x, dtype) for x in arrays], jnp.asarray(is_token), jnp.asarray(is_first)


def with_gradients(function, arrays, is_token, begins):
    """Return the outputs of tokens and the last state, and the gradients of all arrays for a function of both."""

    @jax.jit
    def run(*arrays):
        def results(*arrays):
            y, state = function(*arrays, is_token, begins)
            return jnp.where(is_token[..., None, None], y, 0), state

        made, pull_back = jax.vjp(results, *arrays)
        return made, pull_back(jax.tree.map(jnp.cos, made))

    return run(*arrays)


PLACES = [(), (0,), (15,), (16,), (17,), (31, 32, 33), (5, 6, 24, 40)]  # in chunks of 16: their first, second and last


CHUNKED = [
    pytest.param(name, implementation, begins, id=f"{name}-{implementation}-{begins}")
    for name in FUNCTIONS
    for implementation in ("xla", "triton", "mosaic_tpu")
    for begins in PLACES
]
OFTEN = "gated_delta_rule-xla", "gated_delta_rule-triton", "state_space-mosaic_tpu"


@pytest.mark.parametrize("name, implementation, begins", sampled(CHUNKED, [f"{each}-(5, 6, 24, 40)" for each in OFTEN]))
@interpreted()
def test_chunks_are_the_recurrence(name, implementation, begins):
    """Results and gradients, with documents that begin anywhere in chunks, padding and an initial state.

    Rounding makes up to 1.5e-6 of the largest number.
    """
    arrays, *flags = operands(name, begins=begins, dtype=np.float32)
    in_chunks = functools.partial(FUNCTIONS[name], chunk=CHUNK, implementation=implementation)
    made = with_gradients(in_chunks, arrays, *flags)
    with jax.enable_x64(True):
        exact, *flags = operands(name, begins=begins)
        expected = with_gradients(getattr(reference, name), exact, *flags)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-6 * np.abs(y).max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_single_tokens_are_the_recurrence(name):
    """They read states by products with vectors, which XLA fuses for chips: on a CPU sums would be slow. Sums of 8
    numbers in another order differ by some 1e-7 of the largest number."""
    arrays, is_token, begins = operands(name, begins=(0, 5, 24), dtype=np.float32)
    program = jax.jit(functools.partial(FUNCTIONS[name], chunk=1, implementation="xla"))
    y, state = program(*arrays, is_token, begins)
    expected, last = jax.jit(getattr(reference, name))(*arrays, is_token, begins)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-6 * np.abs(last).max())
    np.testing.assert_allclose(y[is_token], expected[is_token], rtol=0, atol=1e-6 * np.abs(expected[is_token]).max())
    reads = {"gated_delta_rule": 2, "state_space": 1}[name]
    assert _flops_of_products(program.trace(*arrays, is_token, begins).jaxpr) == T * reads * 2 * B * N * H * V


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FUNCTIONS)
@interpreted()
def test_bfloat16_is_multiplied_as_it_is(name):
    """In the default precision Triton's kernels round what they multiply: results and gradients differ by up to 9e-3 of
    the largest number, and by no more where tensor cores multiply (`tests/machine_code`)."""
    case = OPERATIONS[name].used_in("test")[0]
    wanted = problem(OPERATIONS[name], case, "bfloat16")
    with jax.default_matmul_precision(None):
        run = results_and_gradients(functools.partial(FUNCTIONS[name], implementation="triton"), case)
        made = run(wanted.arguments, wanted.cotangents)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves((wanted.results, wanted.gradients)), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-2 * np.abs(y).max())


@pytest.mark.parametrize("name", FUNCTIONS)
@interpreted()
def test_declared_products_are_those_of_tritons_kernels(name):
    """The FLOPs of all products, forward and backward, read from the traced kernels: to the last one."""
    shapes = [(2, 64, 1, 32)] * 2 + [(2, 64, 2, 48)] + [(2, 64, 2)] * 2 + [(2,)] * (name == "state_space")
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, (2, 2, 32, 48))]

    def both_passes(*arrays):
        results, pull_back = jax.vjp(functools.partial(FUNCTIONS[name], chunk=32, implementation="triton"), *arrays)
        return pull_back(results)

    declared = RECURRENCES[name](target.any_of("gpu"), structs, 32)
    once = sum(each.product.flops for each in (*declared.products, *declared.again))
    gradients = sum(2 * each.product.flops for each in declared.products if each.gradients is None)
    # Three products of tf32 make an exact one of those that invert a system, once for each pass.
    exact = sum(each.product.flops for each in declared.products if each.gradients is not None)
    flops = _flops_of_products(jax.make_jaxpr(both_passes)(*structs).jaxpr)
    assert flops == once + gradients + 2 * 2 * exact


def _flops_of_products(jaxpr):
    """Return the FLOPs of all products in the kernels of a program."""

    def inside(jaxpr, times):
        for eqn in jaxpr.eqns:
            match eqn.primitive.name:
                case "dot_general":
                    ((contracted,), _), _ = eqn.params["dimension_numbers"]
                    yield times * 2 * eqn.invars[0].aval.shape[contracted] * eqn.outvars[0].aval.size
                case "pallas_call":
                    grid = eqn.params["grid_mapping"].grid
                    yield from inside(eqn.params["jaxpr"], times * math.prod(grid))
                case _:
                    trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
                    for inner in jaxprs_in_params(eqn.params):
                        yield from inside(inner, times * trips)

    return sum(inside(jaxpr, 1))


@pytest.mark.parametrize("name", FUNCTIONS)
@interpreted()
def test_the_backward_pass_begins_with_the_gradients(name):
    """XLA would run what reads the operands alone in the forward pass, and keep it. Four layers of Qwen3.5, three of
    them of Gated DeltaNet, 4 × 4096 on an H200, would take 19.6 GB for 16.1 GB."""
    shapes = [(1, 32, 1, 16)] * 2 + [(1, 32, 1, 16)] + [(1, 32, 1)] * 2 + [(1,)] * (name == "state_space")
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, (1, 1, 16, 16))]

    def both_passes(d_y, d_last, *arrays):
        return jax.vjp(functools.partial(FUNCTIONS[name], chunk=16, implementation="triton"), *arrays)[1]((d_y, d_last))

    jaxpr = jax.make_jaxpr(both_passes)(structs[2], structs[-1], *structs).jaxpr
    kernels = []
    _read_gradients(jaxpr, [True, True, *[False] * len(structs)], kernels)
    assert kernels == [False, False, True, True, True, True]


def _read_gradients(jaxpr, do_inputs, kernels):
    """Return which results depend on inputs that do, and add whether each kernel does."""
    dependent = {x for x, does in zip(jaxpr.invars, do_inputs, strict=True) if does}

    def among(atoms):
        return [not isinstance(x, Literal) and x in dependent for x in atoms]

    for eqn in jaxpr.eqns:
        do_operands = among(eqn.invars)
        do_results = [any(do_operands)] * len(eqn.outvars)
        if eqn.primitive.name == "pallas_call":
            kernels.append(any(do_operands))
        elif inner := list(jaxprs_in_params(eqn.params)):
            do_results = _read_gradients(inner[0], do_operands, kernels)
        dependent.update(x for x, does in zip(eqn.outvars, do_results, strict=True) if does)
    return among(jaxpr.outvars)


def test_products_of_a_token_are_rounded_before_they_are_added():
    """S exp(g) + k v in machine code as users run it, where it could be rounded once, and in each program otherwise."""
    (query, key, value, log_decay, delta, skip, state), *flags = operands("state_space", 1, dtype=np.float32)

    @as_users_run
    def after(state, key):
        return state_space(query, key, value, log_decay, delta, skip, state, *flags, implementation="xla")[1]

    decay = after(jnp.ones_like(state), jnp.zeros_like(key))
    by_head = np.repeat(np.asarray(key)[:, 0], N // K, axis=1)[..., None]
    written = by_head * np.asarray(value * delta[..., None])[:, 0, :, None]
    np.testing.assert_array_equal(after(state, key), np.asarray(state) * np.asarray(decay) + written)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_that_is_cut_goes_on_where_it_was(name):
    arrays, is_token, begins = operands(name, 2 * CHUNK, (5, 24), np.float32)
    run = jax.jit(functools.partial(FUNCTIONS[name], chunk=CHUNK))
    whole, after = run(*arrays, is_token, begins)
    parts, state = [], arrays[-1]
    for part in (slice(0, CHUNK), slice(CHUNK, None)):
        tokens, weights = [x[:, part] for x in arrays[:5]], arrays[5:-1]
        y, state = run(*tokens, *weights, state, is_token[:, part], begins[:, part])
        parts.append(y)
    # A chunk alone and one of several are different programs, whose roundings differ by up to 5e-7.
    np.testing.assert_allclose(state, after, rtol=0, atol=2e-6)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1)[is_token], whole[is_token], rtol=0, atol=2e-6)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_flags_may_be_left_out(name, tokens):
    arrays, is_token, begins = operands(name, tokens, dtype=np.float32)
    run = jax.jit(FUNCTIONS[name])
    made = run(*arrays)
    chex.assert_trees_all_equal(made, run(*arrays, jnp.ones_like(is_token), begins))
    assert made[0].shape == arrays[2].shape and made[1].shape == arrays[-1].shape


WRONG = [
    ({"query": jnp.zeros((B, T, 3, H)), "key": jnp.zeros((B, T, 3, H))}, "N a multiple of K"),
    ({"value": jnp.zeros((B, T, N))}, r"value is \[2, 41, 4\]; they must be \[B, T, K, H\] and \[B, T, N, V\]"),
    ({"key": jnp.zeros((B, T, K, H), jnp.bfloat16)}, r"key is bfloat16.* like query"),
    ({"beta": jnp.zeros((B, T, K))}, r"beta is \[2, 41, 2\]; it must be \[2, 41, 4\]"),
    ({"log_decay": jnp.zeros((B, T, N), jnp.int32)}, "log_decay is int32; it must be of floating point"),
    ({"state": jnp.zeros((B, N, V, H))}, r"state is \[2, 4, 12, 8\]; it must be \[2, 4, 8, 12\]"),
    ({"begins": jnp.zeros((B, T))}, r"begins is float32\[2, 41\]; it must be bool\[2, 41\]"),
    ({"chunk": 0}, "chunk = 0; it must be 1 or more tokens"),
    ({"implementation": "cuda"}, "there is no implementation 'cuda'"),
]


@pytest.mark.parametrize("changed, message", WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_refused(changed, message):
    names = "query", "key", "value", "log_decay", "beta", "state"
    arrays, is_token, begins = operands("gated_delta_rule", dtype=np.float32)
    call = dict(zip(names, arrays, strict=True)) | {"is_token": is_token, "begins": begins}
    with pytest.raises(ValueError, match=f"gated_delta_rule: .*{message}"):
        gated_delta_rule(**(call | changed))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_memory_of_training_is_linear_in_the_chunks(name):
    """Read from the compiled program: a state between two chunks, where the recurrence keeps one for each token."""
    N, H = 2, 64
    of_state = 4 * N * H * H

    def needed(tokens, **how):
        shapes = [(1, tokens, N, H)] * 3 + [(1, tokens, N)] * 2 + [(N,)] * (name == "state_space") + [(1, N, H, H)]
        structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

        def loss(*arrays):
            return jnp.sum(jnp.sin(FUNCTIONS[name](*arrays, **how)[0]))

        program = jax.jit(jax.grad(loss, range(len(shapes)))).lower(*structs).compile()
        return program.memory_analysis().temp_size_in_bytes

    # Of each token a 32nd of a state (a CPU's chunks) and four numbers for each of the operands' and the output's.
    assert needed(16384) - needed(8192) < 8192 * (of_state / 32 + 4 * 4 * 4 * N * H)
    assert needed(2048, implementation="reference") > 2048 * of_state
