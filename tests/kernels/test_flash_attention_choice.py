"""The choice among attention's implementations, and the calls that they refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from numerics import drawn
from test_choice import H200, V5E, kernels

from kernels_pallas import flash_attention
from kernels_pallas.flash_attention import causal, cudnn, intersection, sliding_window, union
from kernels_pallas.flash_attention.cases import first, segments
from kernels_pallas.flash_attention.operands import Operands


@pytest.mark.parametrize(
    "device, name", [(H200, "triton"), (V5E, "mosaic_tpu")], ids=lambda x: getattr(x, "platform", x)
)
def test_chosen_by_chip_and_by_the_number_of_queries(device, name):
    shape = (1, 128, 2, 64)
    assert kernels(lambda x: flash_attention(x, x, x), device, shape=shape) == 1
    assert kernels(lambda x: flash_attention(x, x, x, implementation=name), device, shape=shape) == 1
    assert kernels(lambda x: flash_attention(x[:, :1], x, x), device, shape=shape) == 0
    assert kernels(lambda x: flash_attention(x[:, :1], x, x, implementation=name), device, shape=shape) == 1
    assert kernels(lambda x: flash_attention(x, x, x), device, shape=(1, 128, 2, 264)) == 0


@pytest.mark.parametrize(
    "device, shape, dtype, reason",
    [
        ("NVIDIA H200", (1, 64, 2, 64), jnp.float32, "it multiplies bfloat16 and float16, not float32"),
        ("NVIDIA H200", (1, 64, 2, 80), jnp.bfloat16, "head widths 80 and 80 are not both multiples of 64"),
        ("NVIDIA B200", (1, 64, 2, 64), jnp.bfloat16, "it runs on NVIDIA GPUs of compute capability 9.0"),
        ("NVIDIA A100-SXM4-80GB", (1, 64, 2, 64), jnp.bfloat16, "it runs on NVIDIA GPUs of compute capability 9.0"),
    ],
    ids=["float32", "width", "Blackwell", "Ampere"],
)
def test_the_hopper_kernels_are_refused_where_they_cannot_serve(device, shape, dtype, reason):
    with pytest.raises(NotImplementedError, match=f"flash_attention: mosaic_gpu cannot serve this call: {reason}"):
        kernels(
            lambda x: flash_attention(x, x, x, implementation="mosaic_gpu"),
            AbstractDevice(device, 1, "gpu"),
            shape=shape,
            dtype=dtype,
        )


def _cudnn(**options):
    return lambda x: flash_attention(x, x, x, implementation="cudnn", **options)


@pytest.mark.parametrize(
    "options, reason",
    [
        (
            dict(key_range=intersection(causal(64), segments(30, 34))),
            "it serves all keys and, with as many keys as queries, causal",
        ),
        (dict(key_range=sliding_window(64, 8)), "it serves all keys"),
        (dict(key_range=union(causal(64), causal(64))), "it serves all keys"),
        (dict(soft_cap=30.0), "neither soft cap nor sinks"),
        (dict(sinks=jnp.zeros(2)), "neither soft cap nor sinks"),
        (dict(bias=jnp.zeros((1, 2, 64, 64))), "a row whose bias is −∞ throughout"),
        (
            dict(return_log_sum_exp=True),
            "it rounds the log-sum-exp to the dtype of the query, and JAX drops its gradient",
        ),
    ],
    ids=["packed", "window", "union", "cap", "sinks", "bias", "log-sum-exp"],
)
def test_cudnn_is_refused_where_it_would_mean_something_else(options, reason):
    with pytest.raises(NotImplementedError, match=f"flash_attention: cudnn cannot serve this call: .*{reason}"):
        kernels(_cudnn(**options), H200, shape=(1, 64, 2, 64))


@pytest.mark.parametrize("device", [V5E, AbstractDevice("cpu", None, "cpu")], ids=lambda device: device.platform)
def test_cudnn_is_refused_where_there_is_none(device):
    reason = rf"it runs on NVIDIA GPUs, and this is lowered for {device.device_kind} \({device.platform}\)"
    with pytest.raises(NotImplementedError, match=f"flash_attention: cudnn cannot serve this call: {reason}"):
        kernels(_cudnn(), device, shape=(1, 64, 2, 64))


def test_what_jax_calls_otherwise_is_the_same():
    """Test the equivalents in the table of docs/kernels.md."""
    arrays = drawn((2, 20, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16))
    (bias,) = drawn((2, 4, 20, 20))
    mask = (bias > -0.5).at[..., 0].set(True)
    for theirs, ours in (
        ({"is_causal": True}, {"key_range": causal(20)}),
        ({"local_window_size": (6, 3)}, {"key_range": sliding_window(20, 6, 3)}),
        ({"local_window_size": 6}, {"key_range": sliding_window(20, 6, 6)}),
        ({"local_window_size": 6, "is_causal": True}, {"key_range": sliding_window(20, 6)}),
        ({"mask": mask}, {"bias": jnp.where(mask, 0.0, -jnp.inf)}),
        ({"bias": bias}, {"bias": bias}),
        ({"mask": mask, "bias": bias}, {"bias": jnp.where(mask, bias, -jnp.inf)}),
    ):
        wanted = jax.nn.dot_product_attention(*arrays, **theirs)
        chex.assert_trees_all_close(flash_attention(*arrays, **ours), wanted, rtol=1e-5, atol=1e-5)
    nothing = mask.at[:, :, 3].set(False)
    wanted = jnp.repeat(jnp.mean(arrays[2], axis=1), 2, axis=1)
    chex.assert_trees_all_close(jax.nn.dot_product_attention(*arrays, mask=nothing)[:, 3], wanted, rtol=1e-5, atol=1e-5)
    assert not flash_attention(*arrays, bias=jnp.where(nothing, 0.0, -jnp.inf))[:, 3].any()


@pytest.mark.parametrize("key_range", [None, causal(20)], ids=["full", "causal"])
def test_cudnn_is_asked_for_what_the_reference_gives(key_range, monkeypatch):
    """XLA's implementation of the function that calls cuDNN stands in for cuDNN, which is absent here."""
    theirs = jax.nn.dot_product_attention
    called = []
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *arrays, implementation, **how: called.append(implementation) or theirs(*arrays, **how),
    )
    arrays = drawn((2, 20, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16))
    got = cudnn.flash_attention(Operands(*arrays, None, None, None, None), key_range, 0.3, None)
    wanted = flash_attention(*arrays, key_range=key_range, scale=0.3)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert called == ["cudnn"]


X = jnp.zeros((2, 20, 4, 32))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(key=X[..., :16]), r"key is \[2, 20, 4, 16\]; it must be \[2, S, K, 32\] for query \[2, 20, 4, 32\]"),
        (dict(value=X[:, :5]), r"value is \[2, 5, 4, 32\]; it must be \[2, 20, 4, V\]"),
        (dict(key=X[:, :, :3], value=X[:, :, :3]), "the number of query heads is 4; it must be a multiple of the 3"),
        (dict(value=X.astype(jnp.bfloat16)), "value is bfloat16; it must be float32 like query"),
        (dict(query=X[0]), r"query is \[20, 4, 32\]; it must be \[B, T, N, H\]"),
        (
            dict(key_range=causal(21)),
            r"key_range's start is int32\[1, 21\]; it must be int32\[2, 20\] or int32\[1, 20\]",
        ),
        (
            dict(key_range=(jnp.zeros((1, 20), jnp.uint32),) * 2),
            r"key_range's start is uint32\[1, 20\]; it must be int32\[",
        ),
        (dict(key_range=(np.zeros((1, 20)),) * 2), r"key_range's start is float64\[1, 20\]; it must be int32\["),
        (
            dict(key_range=(first(20, 3)[0], union(first(20, 3))[1])),
            r"key_range's end is \[1, 1, 20\]; it must be of as many",
        ),
        (dict(sinks=jnp.zeros(3)), r"sinks is \[3\]; it must be \[4\]"),
        (dict(bias=jnp.zeros((20, 20))), r"bias is \[20, 20\]; it must be \[2 or 1, 4 or 1, 20 or 1, 20\]"),
        (dict(soft_cap=0.0), "soft_cap = 0.0; it must be positive"),
        (dict(query_chunk=0), "query_chunk is 0; it must be a positive whole number"),
    ],
)
def test_operands_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=f"flash_attention: {message}"):
        flash_attention(**{"query": X, "key": X, "value": X} | arguments)


@pytest.mark.parametrize(
    "key_range, message",
    [
        (np.ones((20, 20), bool), r"key_range is bool\[20, 20\]; it must be two arrays, start and end"),
        ((), "two arrays"),
        ("causal", "key_range is 'causal'; it must be two arrays"),
        (causal, "two arrays"),
        (True, "key_range is True"),
    ],
    ids=["mask", "empty", "name", "function", "truth"],
)
def test_what_is_no_pair_of_intervals_is_refused(key_range, message):
    x = jnp.ones((1, 20, 1, 16))
    with pytest.raises(ValueError, match=f"flash_attention: .*{message}"):
        flash_attention(x, x, x, key_range=key_range)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(scale="0.3x"), "scale = '0.3x'; it must be a number"),
        (dict(query_chunk=2.5), "query_chunk is 2.5; it must be a positive whole number"),
    ],
    ids=["scale", "chunk"],
)
def test_numbers_that_are_none_are_refused(options, message):
    x = jnp.ones((1, 20, 1, 16))
    with pytest.raises(ValueError, match=f"flash_attention: {message}"):
        flash_attention(x, x, x, **options)
    with pytest.raises(ValueError, match="flash_attention: scale is traced"):
        jax.jit(lambda scale: flash_attention(x, x, x, scale=scale))(1.0)
    with pytest.raises(ValueError, match="flash_attention: query is .* at least one channel"):
        flash_attention(x[..., :0], x[..., :0], x)
