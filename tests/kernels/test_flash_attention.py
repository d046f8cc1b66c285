"""What is peculiar to attention: its gradients, its kernels, its memory, and how it is spread over devices."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elsewhere import ELSEWHERE
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from launches import launches
from test_choice import H200, V5E, kernels

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.assembly import assemble, compile_to_ptx
from jaxlm.lowering.kernel_matrix import CHIPS
from kernels_pallas import flash_attention, hopper, target
from kernels_pallas.flash_attention import (
    IMPLEMENTATIONS,
    Visible,
    both,
    causal,
    costs,
    cudnn,
    packed,
    ring,
    union,
    window,
)
from kernels_pallas.flash_attention.cases import first, segments
from kernels_pallas.flash_attention.operands import Operands

# The kernels for Hopper have no float32.
EACH = pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "mosaic_gpu"])


def drawn(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_comes_from_the_future(implementation):
    """The gradient of query t's output by later keys and values, and by later queries, is zero: exactly."""
    query, key, value = drawn((1, 40, 2, 64), (1, 40, 1, 64), (1, 40, 1, 64))
    if implementation == "mosaic_gpu":
        query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value))
    attend = functools.partial(flash_attention, visible=causal(40), implementation=implementation, _interpret=True)

    @jax.jit
    def reach(t):
        return jax.grad(lambda arrays: jnp.sum(attend(*arrays)[:, t]))((query, key, value))

    for t in (17,) if implementation == "mosaic_gpu" else (0, 17, 33):
        d_query, d_key, d_value = reach(t)
        assert not any(np.any(d[:, t + 1 :]) for d in (d_query, d_key, d_value))
        assert np.all(np.any(d_value[:, : t + 1], axis=-1))


@EACH
def test_gradients_are_finite_differences(implementation):
    """Of a random function of output and log-sum-exp, along a random direction of all operands at once."""
    shapes = dict(
        query=(1, 20, 2, 16), key=(1, 35, 1, 16), value=(1, 35, 1, 32), sinks=(2,), bias=(1, 2, 20, 35)
    )  # fmt: skip
    point, way = (dict(zip(shapes, drawn(*shapes.values(), seed=seed), strict=True)) for seed in (0, 1))
    pulls = drawn((1, 20, 2, 32), (1, 20, 2), seed=2)
    options = dict(visible=causal(20, offset=15), soft_cap=3.0, return_log_sum_exp=True)

    @jax.jit
    def value_and_gradient(arguments):
        def loss(arguments):
            results = flash_attention(**arguments, **options, implementation=implementation, _interpret=True)
            return sum(jnp.sum(pull * y) for pull, y in zip(pulls, results, strict=True))

        return jax.value_and_grad(loss)(arguments)

    def at(step):
        return value_and_gradient(jax.tree.map(lambda x, d: x + step * d, point, way))

    step = 1e-2
    ahead, behind, gradient = at(step)[0], at(-step)[0], at(0.0)[1]
    along = sum(jnp.sum(gradient[name] * way[name]) for name in shapes)
    # Central differences err by step² of the third derivative.
    np.testing.assert_allclose((ahead - behind) / (2 * step), along, rtol=2e-3)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_of_no_key_nothing_is_seen(implementation):
    query, key = drawn((2, 20, 2, 64), (2, 0, 2, 64))
    query, key = query.astype(jnp.bfloat16), key.astype(jnp.bfloat16)
    options = dict(return_log_sum_exp=True, implementation=implementation, _interpret=True)
    out, log_sum_exp = flash_attention(query, key, key, **options)
    assert not np.any(out) and np.all(log_sum_exp == -np.inf)


def test_chunks_of_the_reference_change_nothing():
    query, key, value, bias = drawn((2, 37, 4, 16), (2, 37, 2, 16), (2, 37, 2, 8), (1, 4, 37, 37))

    def results_and_gradients(query_chunk):
        def loss(arrays):
            *arrays, bias = arrays
            options = dict(visible=both(causal(37), segments(20, 17)), bias=bias, return_log_sum_exp=True)
            out, log_sum_exp = flash_attention(*arrays, **options, query_chunk=query_chunk)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(log_sum_exp)), (out, log_sum_exp)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))((query, key, value, bias))

    chex.assert_trees_all_close(results_and_gradients(8), results_and_gradients(None), rtol=1e-5, atol=1e-6)


def test_a_chunked_reference_holds_a_chunk():
    """8192 queries and keys, 128 at a time: XLA's temporaries stay far from the 256 MiB of all scores."""
    x = jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32)
    attend = functools.partial(flash_attention, visible=causal(8192), query_chunk=128)
    gradient = jax.jit(jax.grad(lambda arrays: jnp.sum(attend(*arrays))))
    assert gradient.lower((x, x, x)).compile().memory_analysis().temp_size_in_bytes < 64 * 2**20


@ELSEWHERE
@pytest.mark.parametrize("chip", ["A100", "H200", "v5e", "v7x"])
def test_kernels_hold_no_scores(chip):
    """At 8192 the scores of one head take 128 MiB in bfloat16; forward and gradient together take less than 16."""
    mesh = Mesh(np.array(targets.devices(Target.parse(CHIPS[chip]))[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    query, key = (jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16, sharding=whole) for heads in (2, 1))
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=whole)

    def loss(arrays, ids):
        return jnp.sum(flash_attention(*arrays, visible=both(causal(8192), packed(ids))).astype(jnp.float32))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss)).lower((query, key, key), ids).compile()
    assert compiled.as_text().count("flash_attention_key_gradient")
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20


@ELSEWHERE
def test_triton_guards_no_exponential_and_keeps_its_tiles_in_registers():
    """For an A100, whose compiler gives up on a tile that is too large and keeps all of it in memory."""
    mesh = Mesh(np.array(targets.devices(Target.parse(CHIPS["A100"]))[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct((1, 4096, 8, width), jnp.bfloat16, sharding=whole) for width in (192, 192, 128)]

    def loss(arrays):
        return jnp.sum(flash_attention(*arrays, visible=causal(4096)).astype(jnp.float32))

    with jax.set_mesh(mesh):
        texts = compile_to_ptx(jax.jit(jax.grad(loss)).lower(arrays))
    texts = [text for text in texts if "flash_attention" in text]
    assert len(texts) == 3
    assert not any("ex2.approx.f32" in text for text in texts)
    assert all(kernel.spilled < 100 for text in texts for kernel in assemble(text))


def test_the_cost_is_of_what_is_seen():
    """Where intervals are known while tracing: of numpy arrays."""
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.float32)
    whole, half = (costs(x, x, x, visible=visible).forward.flops for visible in (None, causal(64)))
    assert half / whole == (64 * 65 / 2) / 64**2
    assert costs(x, x, x, visible=packed(jnp.zeros((2, 64), int))).forward.flops == whole
    assert costs(x, x, x, visible=both(causal(64), segments(32, 32))).forward.flops == whole * (32 * 33) / 64**2


# Batch over data, heads over tensor.
HEADS, SINKS = P("data", None, "tensor"), P("tensor")


@EACH
def test_heads_and_batch_over_devices(implementation):
    """Gradients with data × tensor = 2 × 2 are those of one device."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    arrays = drawn((2, 20, 4, 32), (2, 20, 2, 32), (2, 20, 2, 32), (4,))

    def attend(query, key, value, sinks):
        options = dict(visible=causal(20), implementation=implementation, _interpret=True)
        return flash_attention(query, key, value, sinks=sinks, **options)

    def gradient(attend):
        return jax.jit(jax.grad(lambda arrays: jnp.sum(jnp.sin(attend(*arrays)))))(arrays)

    # Interpreted kernels know of no other way than check_vma=False.
    specs = dict(in_specs=(HEADS, HEADS, HEADS, SINKS), out_specs=HEADS, check_vma=False)
    chex.assert_trees_all_close(
        gradient(jax.shard_map(attend, mesh=mesh, **specs)), gradient(attend), rtol=1e-5, atol=1e-6
    )


@ELSEWHERE
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "chips, implementation", [("h200-sxm:4", "triton"), ("h200-sxm:4", "mosaic_gpu"), ("tpu-v5e:2x2", "mosaic_tpu")]
)
def test_devices_send_one_another_nothing_but_sums_for_the_sinks(chips, implementation, check_vma):
    mesh = Mesh(np.array(targets.devices(Target.parse(chips))).reshape(2, 2), ("data", "tensor"))
    query, key = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)

    def attend(query, key, value, sinks):
        return flash_attention(query, key, value, sinks=sinks, visible=causal(256), implementation=implementation)

    specs = (HEADS, HEADS, HEADS, SINKS)
    through = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=HEADS, check_vma=check_vma)
    gradient = jax.jit(
        jax.grad(lambda arrays: jnp.sum(through(*arrays).astype(jnp.float32))),
        in_shardings=(tuple(NamedSharding(mesh, spec) for spec in specs),),
    )
    with jax.set_mesh(mesh):
        text = gradient.lower((query, key, key, sinks)).compile().as_text()
    assert text.count("flash_attention_query_gradient")
    assert re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", text) == ["all-reduce"]


@ELSEWHERE
@pytest.mark.parametrize("what", ["gradient of a bias", "few queries"])
@pytest.mark.parametrize("dtype, precision", [(jnp.float32, "HIGHEST"), (jnp.bfloat16, "DEFAULT")])
def test_what_xla_multiplies_for_kernels_has_their_precision(what, dtype, precision):
    """Lowered for a TPU, which multiplies float32 as bfloat16 unless it is told otherwise."""
    mesh = Mesh(np.array(targets.devices(Target.parse("tpu-v5e:4"))[:1]), ("one",))
    few, key, bias = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 15, 2, 64), (1, 64, 2, 64), (1, 2, 64, 64)))

    def gradient(bias, key):
        def total(bias):
            return jnp.sum(flash_attention(key, key, key, bias=bias).astype(jnp.float32))

        return jax.value_and_grad(total)(bias)

    def attend(implementation=None):
        return lambda few, key: flash_attention(few, key, key, implementation=implementation)

    function, arrays = (attend(), (few, key)) if what == "few queries" else (gradient, (bias, key))
    with jax.set_mesh(mesh), jax.default_matmul_precision("default"):
        text = jax.jit(function).lower(*arrays).as_text()
        asked_for = jax.jit(attend("reference")).lower(few, key).as_text()
    assert ("flash_attention_forward" in text) == (what == "gradient of a bias")

    def precisions(text):
        return set(re.findall(r"stablehlo.dot_general .*precision = \[(\w+), \w+\]", text))

    assert precisions(text) == {precision} and precisions(asked_for) == {"DEFAULT"}


@pytest.mark.parametrize("sms, shares", [(23, 1), (24, 2), (48, 4)])
@pytest.mark.parametrize("bias", [(1, 8, 200, 170), (1, 1, 1, 170), None], ids=str)
def test_few_key_heads_are_shared_out_over_a_gpu(monkeypatch, sms, shares, bias):
    """Twelve programs, two heads of 170 keys in blocks of 32, are enough for 23 SMs; for more the groups of four query
    heads are divided, each share with its own sum in float32."""
    arrays = drawn((1, 200, 8, 16), (1, 170, 2, 16), (1, 170, 2, 32), *([bias] if bias else []))

    def gradient(implementation):
        def loss(arrays):
            query, key, value, *bias = arrays
            options = dict(visible=window(200, 90, offset=-20), bias=bias[0] if bias else None)
            how = dict(implementation=implementation, _interpret=True)
            return jnp.sum(jnp.sin(flash_attention(query, key, value, **options, **how)))

        return jax.grad(loss)(arrays)

    chip = dataclasses.replace(target.current(), cores=sms)
    monkeypatch.setattr(target, "current", lambda: chip)
    program = str(jax.make_jaxpr(lambda: gradient("triton"))())
    assert f"f32[1,170,{2 * shares},16]" in program
    chex.assert_trees_all_close(gradient("triton"), gradient("reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_few_key_heads_are_shared_out_over_hopper(monkeypatch):
    """One program, of 70 keys, is too few for three SMs: two shares of two query heads each."""
    arrays = [x.astype(jnp.bfloat16) for x in drawn((1, 70, 4, 64), (1, 70, 1, 64), (1, 70, 1, 128))]
    chip = dataclasses.replace(target.current(), cores=3)
    monkeypatch.setattr(target, "current", lambda: chip)

    def gradient(arrays, **how):
        def loss(arrays):
            return jnp.sum(jnp.sin(flash_attention(*arrays, visible=causal(70), **how).astype(jnp.float32)))

        return jax.jit(jax.grad(loss)).trace(arrays)

    traced = gradient(arrays, implementation="mosaic_gpu", _interpret=True)
    assert "f32[1,128,2,64]" in str(traced.jaxpr)
    got = jax.tree.map(lambda x: x.astype(jnp.float32), traced.lower().compile()(arrays))
    wide = [x.astype(jnp.float32) for x in arrays]
    wanted = gradient(wide, implementation="reference").lower().compile()(wide)
    # bfloat16 weights and gradients are rounded before they are multiplied, and once at the end.
    chex.assert_trees_all_close(got, wanted, rtol=1e-2, atol=2e-2)


@pytest.mark.slow
def test_the_tpu_kernels_race_with_nothing_and_read_what_was_written():
    """On emulated TPU memory: races, reads out of bounds, and NaN where nothing was written."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    query, key, value, bias = drawn((1, 150, 2, 16), (1, 140, 1, 16), (1, 140, 1, 16), (1, 1, 1, 140))
    how = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")

    def gradient(**how):
        def loss(arrays):
            out = flash_attention(*arrays, bias=bias, visible=window(150, 30, offset=-10), **how)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss)((query, key, value))

    got = gradient(implementation="mosaic_tpu", _interpret=how)
    assert not interpret_pallas_call.races.races_found
    chex.assert_trees_all_close(got, gradient(implementation="reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_hopper_kernels_race_with_nothing_and_free_what_they_fill():
    """On an emulated block: races, deadlocks and barriers that are passed once too often or too rarely, and NaN where
    nothing was copied. More steps than places in the ring, forward and backward."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    arrays = [x.astype(jnp.bfloat16) for x in drawn((1, 70, 3, 64), (1, 600, 1, 64), (1, 600, 1, 64))]
    pull, bias = drawn((1, 70, 3, 64), (1, 1, 70, 600), seed=1)
    visible = window(70, 40, offset=7, after=530)

    def gradient(arrays, **how):
        def loss(arrays):
            return jnp.sum(pull * flash_attention(*arrays, visible=visible, bias=bias, **how).astype(jnp.float32))

        return jax.grad(loss)(arrays)

    interpreter = hopper.interpreter(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    got = gradient(arrays, implementation="mosaic_gpu", _interpret=interpreter)
    assert not interpret_pallas_call.get_races().races_found
    wanted = gradient([x.astype(jnp.float32) for x in arrays], implementation="reference")
    # bfloat16 weights and gradients are rounded before they are multiplied, and once at the end.
    chex.assert_trees_all_close(jax.tree.map(lambda x: x.astype(jnp.float32), got), wanted, rtol=1e-2, atol=2e-2)


def test_the_tpu_kernels_transpose_no_tile_of_scores():
    """A product that sums over the rows of its first operand turns it: keys or values [128, 64] here, of which the
    result is [64, 128], and not [keys, queries]."""

    def loss(x):
        return jnp.sum(flash_attention(x, x, x, implementation="mosaic_tpu", _interpret=True))

    program = str(jax.make_jaxpr(jax.grad(loss))(jnp.zeros((1, 256, 1, 64))))
    made = re.findall(r"\[(\d+,\d+)\] = dot_general\[\s*dimension_numbers=\(\(\[0\], \[0\]\)", program)
    assert set(made) == {"64,128"}


def _hopper_calls(widths=(64, 64), around=lambda loss: loss):
    """How many kernels of Mosaic GPU are in a loss with its gradient, lowered for an H200."""
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=H200)
    arrays = [
        jax.ShapeDtypeStruct((1, 300, heads, width), jnp.float16)
        for heads, width in ((2, widths[0]), (1, widths[0]), (1, widths[1]))
    ]

    def loss(arrays):
        out = flash_attention(*arrays, visible=causal(300), implementation="mosaic_gpu", soft_cap=9.0)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.value_and_grad(around(loss))).trace(arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2")


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (192, 256), (256, 256)], ids=str)
def test_the_hopper_kernels_fit_shared_memory(widths):
    """For each pair of widths: too much is an error of the lowering. Backward the widest are Triton's."""
    assert _hopper_calls(widths) == (3 if sum(widths) <= 256 else 1)


def test_more_shared_memory_than_there_is_does_not_pass(constant):
    constant(ring, "SHARED_MEMORY", 400_000)
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        _hopper_calls((128, 128))


def test_checkpoint_runs_the_hopper_kernel_again():
    """Forward, forward again, and both backward."""
    assert _hopper_calls(around=jax.checkpoint) == 4


def test_the_hopper_kernels_lower_where_numbers_have_64_bits():
    with jax.enable_x64(True):
        assert _hopper_calls() == 3


@EACH
def test_what_is_kept_by_its_name_is_not_computed_again(implementation):
    """Under rematerialisation that saves "attention" a kernel forward and two backward; else also one forward again."""

    def kernels_of_gradient(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def attend(x):
            x = jnp.sin(x)
            return flash_attention(x, x, x, visible=causal(20), implementation=implementation, _interpret=True)

        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(jax.checkpoint(attend, policy=policy)(x))))
        return len(list(launches(jax.make_jaxpr(gradient)(jnp.ones((1, 20, 2, 16))).jaxpr)))

    assert kernels_of_gradient("attention") == 3
    assert kernels_of_gradient("query") == 4


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
            dict(visible=both(causal(64), segments(30, 34))),
            "it serves all keys and, with as many keys as queries, causal",
        ),
        (dict(visible=window(64, 8)), "it serves all keys"),
        (dict(visible=union(causal(64), causal(64))), "it serves all keys"),
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


@pytest.mark.parametrize("visible", [None, causal(20)], ids=["full", "causal"])
def test_cudnn_is_asked_for_what_the_reference_gives(visible, monkeypatch):
    """With XLA's implementation of the function that calls it, as cuDNN is not here."""
    theirs = jax.nn.dot_product_attention
    called = []
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *arrays, implementation, **how: called.append(implementation) or theirs(*arrays, **how),
    )
    arrays = drawn((2, 20, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16))
    got = cudnn.flash_attention(Operands(*arrays, None, None, None, None), visible, 0.3)
    wanted = flash_attention(*arrays, visible=visible, scale=0.3)
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
        (dict(visible=causal(21)), r"visible's start is int32\[1, 21\]; it must be int32\[2, 20\] or int32\[1, 20\]"),
        (
            dict(visible=(jnp.zeros((1, 20), jnp.uint32),) * 2),
            r"visible's start is uint32\[1, 20\]; it must be int32\[",
        ),
        (dict(visible=(np.zeros((1, 20)),) * 2), r"visible's start is float64\[1, 20\]; it must be int32\["),
        (
            dict(visible=(first(20, 3)[0], union(first(20, 3))[1])),
            r"visible's end is \[1, 1, 20\]; it must be of as many",
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


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_a_nan_is_not_hidden(implementation):
    """In a query it is in its row's results and gradient, in no other's, and in those of the keys that the row sees."""
    query, key, value = drawn((1, 40, 2, 64), (1, 40, 1, 64), (1, 40, 1, 64))
    arrays = [x.astype(jnp.bfloat16) for x in (query.at[0, 20, 1, 3].set(jnp.nan), key, value)]
    attend = functools.partial(flash_attention, return_log_sum_exp=True, implementation=implementation, _interpret=True)

    @jax.jit
    def run(arrays):
        results, pull_back = jax.vjp(lambda arrays: attend(*arrays, visible=causal(40)), arrays)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))[0]

    (out, log_sum_exp), (d_query, d_key, d_value) = jax.tree.map(jnp.isnan, run(arrays))
    wanted = jnp.zeros((40, 2), bool).at[20, 1].set(True)
    for found in (out.all(-1), out.any(-1), log_sum_exp, d_query.all(-1), d_query.any(-1)):
        assert jnp.array_equal(found[0], wanted)
    assert d_key[0, :21].all() and d_value[0, :21].all()


@EACH
def test_a_row_that_sees_nothing_has_no_gradient_whatever_becomes_of_its_log_sum_exp(implementation):
    """Parts are joined by it, and the derivative of what joins two −∞ is NaN."""
    arrays = drawn((1, 20, 1, 16), (1, 20, 1, 16), (1, 20, 1, 16))
    visible = Visible(np.zeros((1, 20), int), np.where(np.arange(20) == 3, 0, 20)[None])

    def loss(arrays, implementation):
        options = dict(visible=visible, return_log_sum_exp=True, implementation=implementation, _interpret=True)
        _, sums = flash_attention(*arrays, **options)
        return jnp.sum(jnp.where(jnp.isfinite(sums), jnp.logaddexp(sums, sums), 0.0))

    got, wanted = (jax.grad(loss)(arrays, name) for name in (implementation, "reference"))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not jnp.any(got[0][:, 3])


@EACH
def test_the_lowest_number_as_a_bias_hides_as_infinity_does(implementation):
    arrays, lowest = drawn((1, 20, 1, 16), (1, 40, 1, 16), (1, 40, 1, 16)), jnp.finfo(jnp.float32).min
    bias = jnp.zeros((1, 1, 20, 40)).at[:, :, 7].set(lowest).at[:, :, 9, ::2].set(lowest)
    run = functools.partial(flash_attention, return_log_sum_exp=True, implementation=implementation, _interpret=True)
    hidden = jnp.where(bias == lowest, -jnp.inf, bias)
    chex.assert_trees_all_close(run(*arrays, bias=bias), run(*arrays, bias=hidden), rtol=1e-6)
    assert not jnp.any(run(*arrays, bias=bias)[0][:, 7])


@EACH
@pytest.mark.parametrize("cap", [50.0, 1e6])
def test_a_wide_cap_takes_no_digits(implementation, cap):
    arrays = drawn((1, 30, 1, 16), (1, 30, 1, 16), (1, 30, 1, 16))
    run = functools.partial(flash_attention, *arrays, soft_cap=cap, _interpret=True)
    wanted = run(implementation="reference") if cap < 1e6 else flash_attention(*arrays, implementation="reference")
    chex.assert_trees_all_close(run(implementation=implementation), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "visible, message",
    [
        (np.ones((20, 20), bool), r"visible is bool\[20, 20\]; it must be two arrays, start and end"),
        ((), "two arrays"),
        ("causal", "visible is 'causal'; it must be two arrays"),
        (causal, "two arrays"),
        (True, "visible is True"),
    ],
    ids=["mask", "empty", "name", "function", "truth"],
)
def test_what_is_no_pair_of_intervals_is_refused(visible, message):
    x = jnp.ones((1, 20, 1, 16))
    with pytest.raises(ValueError, match=f"flash_attention: .*{message}"):
        flash_attention(x, x, x, visible=visible)


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
