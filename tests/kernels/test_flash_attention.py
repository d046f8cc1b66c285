"""Properties of attention alone: its gradients, masked keys, and NaN."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launches import launches
from matrices import sampled
from numerics import drawn

from kernels_pallas import flash_attention
from kernels_pallas.core import interpreted
from kernels_pallas.core.hopper.memory import SharedBuffer
from kernels_pallas.core.hopper.ring import BlockPipeline, PipelineBlocks
from kernels_pallas.flash_attention import IMPLEMENTATIONS, KeyRange, causal, costs, intersection, packed
from kernels_pallas.flash_attention.cases import segments

# The kernels for Hopper have no float32.
IN_FLOAT32 = [name for name in IMPLEMENTATIONS if name != "mosaic_gpu"]
EACH = pytest.mark.parametrize("implementation", IN_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", sampled(IMPLEMENTATIONS, ["mosaic_tpu"]))
@interpreted()
def test_nothing_comes_from_the_future(implementation):
    """The gradient of query t's output by later keys and values, and by later queries, is exactly zero."""
    query, key, value = drawn((1, 40, 2, 64), (1, 40, 1, 64), (1, 40, 1, 64))
    if implementation == "mosaic_gpu":
        query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value))
    attend = functools.partial(flash_attention, key_range=causal(40), implementation=implementation)

    @jax.jit
    def reach(t):
        return jax.grad(lambda arrays: jnp.sum(attend(*arrays)[:, t]))((query, key, value))

    for t in (17,) if implementation == "mosaic_gpu" else (0, 17, 33):
        d_query, d_key, d_value = reach(t)
        assert not any(np.any(d[:, t + 1 :]) for d in (d_query, d_key, d_value))
        assert np.all(np.any(d_value[:, : t + 1], axis=-1))


@pytest.mark.parametrize("implementation", sampled(IN_FLOAT32, ["mosaic_tpu"]))
@interpreted()
def test_gradients_are_finite_differences(implementation):
    """Gradients of a random function of output and log-sum-exp, along a random direction of all operands at once."""
    shapes = dict(
        query=(1, 20, 2, 16), key=(1, 35, 1, 16), value=(1, 35, 1, 32), sinks=(2,), bias=(1, 2, 20, 35)
    )  # fmt: skip
    point, way = (
        dict(zip(shapes, map(np.asarray, drawn(*shapes.values(), seed=seed)), strict=True)) for seed in (0, 1)
    )
    pulls = drawn((1, 20, 2, 32), (1, 20, 2), seed=2)
    options = dict(key_range=causal(20, offset=15), soft_cap=3.0, return_log_sum_exp=True)

    @jax.jit
    def value_and_gradient(arguments):
        def loss(arguments):
            results = flash_attention(**arguments, **options, implementation=implementation)
            return sum(jnp.sum(pull * y) for pull, y in zip(pulls, results, strict=True))

        return jax.value_and_grad(loss)(arguments)

    def at(step):
        return value_and_gradient(jax.tree.map(lambda x, d: x + step * d, point, way))

    def slope(step):
        return (at(step)[0] - at(-step)[0]) / (2 * step)

    gradient = jax.device_get(at(0.0)[1])
    along = [float(np.sum(gradient[name] * way[name])) for name in shapes]
    # Central differences err by step² times the third derivative, two of them combined by step⁴ times the fifth; the
    # remaining error is float32's, of terms that cancel.
    error = 1e-4 * sum(map(abs, along))
    np.testing.assert_allclose((4 * slope(1e-2) - slope(2e-2)) / 3, sum(along), rtol=0, atol=error)


@pytest.mark.parametrize(
    ("implementation", "magnitude"),
    sampled(
        [
            *map(pytest.param, *zip(*itertools.product(["reference", *IMPLEMENTATIONS], [6e4, 1e9]), strict=True)),
            # Where Hopper's forward pass overflows.
            *(pytest.param(name, 1e20) for name in ("reference", "xla", "triton", "mosaic_tpu")),
        ],
        lambda implementation, magnitude: magnitude == 1e20,
    ),
)
@interpreted()
def test_weights_stay_at_most_one_at_extreme_scores(implementation, magnitude):
    """Every query sees key 0 alone, whose value's gradient is then the sum of 16 weights of 1."""
    T, H = 16, 64
    dtype = jnp.bfloat16 if implementation == "mosaic_gpu" else jnp.float32
    query = jnp.zeros((1, T, 1, H), dtype).at[..., 0].set(-magnitude)
    key, value = jnp.zeros((1, T, 1, H), dtype).at[..., 0].set(1), jnp.ones((1, T, 1, H), dtype)
    first = KeyRange(np.zeros((1, T), np.int32), np.ones((1, T), np.int32))

    # Optimised, XLA fuses products with sums as chips do: the backward pass rounds scores otherwise than the forward.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    def gradients(*arrays):
        attend = functools.partial(flash_attention, key_range=first, scale=1.0, implementation=implementation)
        return jax.grad(lambda *arrays: jnp.sum(attend(*arrays).astype(jnp.float32)), argnums=(0, 1, 2))(*arrays)

    d_query, d_key, d_value = gradients(query, key, value)
    assert not np.any(d_value[:, 1:]) and not np.any(d_query) and not np.any(d_key)
    assert np.all(d_value <= 16.0)
    if magnitude == 6e4:
        assert np.all(d_value[:, 0] == 16.0)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@interpreted()
def test_without_keys_outputs_are_zero(implementation):
    query, key = drawn((2, 20, 2, 64), (2, 0, 2, 64))
    query, key = query.astype(jnp.bfloat16), key.astype(jnp.bfloat16)
    options = dict(return_log_sum_exp=True, implementation=implementation)
    out, log_sum_exp = flash_attention(query, key, key, **options)
    assert not np.any(out) and np.all(log_sum_exp == -np.inf)


def test_chunks_of_the_reference_change_nothing():
    query, key, value, bias = drawn((2, 37, 4, 16), (2, 37, 2, 16), (2, 37, 2, 8), (1, 4, 37, 37))

    def results_and_gradients(query_chunk):
        def loss(arrays):
            *arrays, bias = arrays
            options = dict(key_range=intersection(causal(37), segments(20, 17)), bias=bias, return_log_sum_exp=True)
            out, log_sum_exp = flash_attention(*arrays, **options, query_chunk=query_chunk)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(log_sum_exp)), (out, log_sum_exp)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))((query, key, value, bias))

    chex.assert_trees_all_close(results_and_gradients(8), results_and_gradients(None), rtol=1e-5, atol=1e-6)


def test_a_chunked_reference_holds_a_chunk():
    """XLA's temporaries for 8192 queries and keys, 128 at a time, stay far from the 256 MiB of all scores."""
    x = jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32)
    attend = functools.partial(flash_attention, key_range=causal(8192), query_chunk=128)
    gradient = jax.jit(jax.grad(lambda arrays: jnp.sum(attend(*arrays))))
    assert gradient.lower((x, x, x)).compile().memory_analysis().temp_size_in_bytes < 64 * 2**20


def test_costs_count_unmasked_scores():
    """Costs count unmasked scores where intervals are known while tracing, as numpy arrays."""
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.float32)
    whole, half = (costs(x, x, x, key_range=key_range).forward.flops for key_range in (None, causal(64)))
    assert half / whole == (64 * 65 / 2) / 64**2
    assert costs(x, x, x, key_range=packed(jnp.zeros((2, 64), int))).forward.flops == whole
    assert (
        costs(x, x, x, key_range=intersection(causal(64), segments(32, 32))).forward.flops == whole * (32 * 33) / 64**2
    )


def test_costs_count_five_products_where_one_kernel_computes_the_gradients_and_else_seven():
    """On Hopper one kernel serves width 256 without a bias; with one, Triton's two kernels run."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 256), jnp.bfloat16)

    def products(**how):
        return costs(x, x, x, **how).backward.flops // (2 * 256 * 64 * 64 * 2)

    assert products(implementation="mosaic_gpu") == 5 and products(implementation="triton") == 7
    for rows in (1, 64):
        bias = jax.ShapeDtypeStruct((1, 1, rows, 64), jnp.bfloat16)
        assert products(implementation="mosaic_gpu", bias=bias) == 7


@EACH
@interpreted()
def test_what_is_kept_by_its_name_is_not_computed_again(implementation):
    """Under rematerialisation that saves "attention", one kernel runs forward, and backward one or two; otherwise one
    more forward.
    """

    def kernels_of_gradient(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def attend(x):
            x = jnp.sin(x)
            return flash_attention(x, x, x, key_range=causal(20), implementation=implementation)

        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(jax.checkpoint(attend, policy=policy)(x))))
        return len(list(launches(jax.make_jaxpr(gradient)(jnp.ones((1, 20, 2, 16))).jaxpr)))

    both_ways = 3 if implementation == "triton" else 2
    assert kernels_of_gradient("attention") == both_ways
    assert kernels_of_gradient("query") == both_ways + 1


@pytest.mark.slow
@pytest.mark.parametrize("implementation", sampled(["reference", *IMPLEMENTATIONS], ["reference", "triton"]))
@interpreted()
def test_a_nan_is_not_hidden(implementation):
    """A NaN in a query reaches its row's results and gradient, no other row's, and the gradients of the row's keys."""
    query, key, value = drawn((1, 40, 2, 64), (1, 40, 1, 64), (1, 40, 1, 64))
    arrays = [x.astype(jnp.bfloat16) for x in (query.at[0, 20, 1, 3].set(jnp.nan), key, value)]
    attend = functools.partial(flash_attention, return_log_sum_exp=True, implementation=implementation)

    @jax.jit
    def run(arrays):
        results, pull_back = jax.vjp(lambda arrays: attend(*arrays, key_range=causal(40)), arrays)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))[0]

    made = jax.tree.map(lambda x: np.isnan(x.astype(np.float32)), jax.device_get(run(arrays)))
    (out, log_sum_exp), (d_query, d_key, d_value) = made
    wanted = np.zeros((40, 2), bool)
    wanted[20, 1] = True
    for found in (out.all(-1), out.any(-1), log_sum_exp, d_query.all(-1), d_query.any(-1)):
        assert np.array_equal(found[0], wanted)
    assert d_key[0, :21].all() and d_value[0, :21].all()


@pytest.mark.parametrize("implementation", sampled(IN_FLOAT32, ["mosaic_tpu"]))
@interpreted()
def test_a_fully_masked_row_has_no_gradient_even_through_its_log_sum_exp(implementation):
    """Partial results are joined by log-sum-exp, and the derivative of joining two −∞ is NaN."""
    arrays = drawn((1, 20, 1, 16), (1, 20, 1, 16), (1, 20, 1, 16))
    key_range = KeyRange(np.zeros((1, 20), int), np.where(np.arange(20) == 3, 0, 20)[None])

    def loss(arrays, implementation):
        options = dict(key_range=key_range, return_log_sum_exp=True, implementation=implementation)
        _, sums = flash_attention(*arrays, **options)
        return jnp.sum(jnp.where(jnp.isfinite(sums), jnp.logaddexp(sums, sums), 0.0))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    got, wanted = (gradient(arrays, name) for name in (implementation, "reference"))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not jnp.any(got[0][:, 3])


@EACH
@interpreted()
def test_the_lowest_number_as_a_bias_hides_as_infinity_does(implementation):
    arrays, lowest = drawn((1, 20, 1, 16), (1, 40, 1, 16), (1, 40, 1, 16)), jnp.finfo(jnp.float32).min
    bias = jnp.zeros((1, 1, 20, 40)).at[:, :, 7].set(lowest).at[:, :, 9, ::2].set(lowest)
    run = functools.partial(flash_attention, return_log_sum_exp=True, implementation=implementation)
    hidden = jnp.where(bias == lowest, -jnp.inf, bias)
    chex.assert_trees_all_close(run(*arrays, bias=bias), run(*arrays, bias=hidden), rtol=1e-6)
    assert not jnp.any(run(*arrays, bias=bias)[0][:, 7])


@pytest.mark.parametrize(
    "cap, implementation",
    sampled(
        [pytest.param(cap, name) for cap in (50.0, 1e6) for name in IN_FLOAT32],
        ["50.0-triton", "1000000.0-mosaic_tpu"],
    ),
)
@interpreted()
def test_a_wide_cap_takes_no_digits(implementation, cap):
    arrays = drawn((1, 30, 1, 16), (1, 30, 1, 16), (1, 30, 1, 16))
    run = functools.partial(flash_attention, *arrays, soft_cap=cap)
    wanted = run(implementation="reference") if cap < 1e6 else flash_attention(*arrays, implementation="reference")
    chex.assert_trees_all_close(run(implementation=implementation), wanted, rtol=1e-5, atol=1e-5)


def test_buffers_that_share_a_barrier_are_not_waited_for_alone():
    """Waiting twice for one barrier would never end."""
    buffers = {name: SharedBuffer((64, 64), jnp.bfloat16, tiled=True) for name in ("query", "d_out")}
    pipeline = BlockPipeline(PipelineBlocks(64, 2), buffers, together=True)
    assert set(pipeline.shared()) == {"query_ring", "d_out_ring", "ring_ready", "ring_free"}
    with pytest.raises(ValueError, match="query, d_out share a barrier; wait for all of them, not query alone"):
        pipeline.consumer_wait(None, {}, jnp.int32(0), "query")
