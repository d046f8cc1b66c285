"""Attention lowered for chips that are absent, and sharded over devices."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from markers import ELSEWHERE
from matrices import sampled
from numerics import drawn
from test_choice import H200

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.assembly import assemble, compile_to_ptx
from jaxlm.lowering.kernel_matrix import CHIPS, TPUS
from kernels_pallas import flash_attention
from kernels_pallas.core import interpreted, target
from kernels_pallas.core.hopper import ring
from kernels_pallas.flash_attention import IMPLEMENTATIONS, causal, intersection, packed, sliding_window


@ELSEWHERE
@pytest.mark.parametrize("chip", sampled(["A100", "H200", "v5e", "v7x"], ["A100"]))
def test_kernels_hold_no_scores(chip):
    """The scores of one head at 8192 take 128 MiB in bfloat16; forward and gradient together take less than 16."""
    mesh = Mesh(np.array(targets.devices(Target.parse(CHIPS[chip]))[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    query, key = (jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16, sharding=whole) for heads in (2, 1))
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=whole)

    def loss(arrays, ids):
        return jnp.sum(flash_attention(*arrays, key_range=intersection(causal(8192), packed(ids))).astype(jnp.float32))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss)).lower((query, key, key), ids).compile()
    assert compiled.as_text().count(f"flash_attention_{'gradients' if chip in TPUS else 'key_gradient'}")
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20


@ELSEWHERE
def test_triton_guards_no_exponential_and_keeps_its_tiles_in_registers():
    """Lowered for an A100, whose compiler spills a tile that is too large to memory."""
    mesh = Mesh(np.array(targets.devices(Target.parse(CHIPS["A100"]))[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct((1, 4096, 8, width), jnp.bfloat16, sharding=whole) for width in (192, 192, 128)]

    def loss(arrays):
        return jnp.sum(flash_attention(*arrays, key_range=causal(4096)).astype(jnp.float32))

    with jax.set_mesh(mesh):
        texts = compile_to_ptx(jax.jit(jax.grad(loss)).lower(arrays))
    texts = [text for text in texts if "flash_attention" in text]
    assert len(texts) == 3
    assert not any("ex2.approx.f32" in text for text in texts)
    assert all(kernel.spilled < 100 for text in texts for kernel in assemble(text))


# Batch over data, heads over tensor.
HEADS, SINKS = P("data", None, "tensor"), P("tensor")


@pytest.mark.parametrize(
    "implementation", sampled([name for name in IMPLEMENTATIONS if name != "mosaic_gpu"], ["triton"])
)
@interpreted()
def test_heads_and_batch_over_devices(implementation):
    """Gradients with data × tensor = 2 × 2 equal those of one device."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    arrays = drawn((2, 20, 4, 32), (2, 20, 2, 32), (2, 20, 2, 32), (4,))

    def attend(query, key, value, sinks):
        options = dict(key_range=causal(20), implementation=implementation)
        return flash_attention(query, key, value, sinks=sinks, **options)

    def gradient(attend):
        return jax.jit(jax.grad(lambda arrays: jnp.sum(jnp.sin(attend(*arrays)))))(arrays)

    # Interpreted kernels require check_vma=False.
    specs = dict(in_specs=(HEADS, HEADS, HEADS, SINKS), out_specs=HEADS, check_vma=False)
    chex.assert_trees_all_close(
        gradient(jax.shard_map(attend, mesh=mesh, **specs)), gradient(attend), rtol=1e-5, atol=1e-6
    )


@ELSEWHERE
@pytest.mark.parametrize("check_vma", sampled([True, False], ["True"]))
@pytest.mark.parametrize(
    "chips, implementation",
    sampled(
        [
            pytest.param("h200-sxm:4", "triton"),
            pytest.param("h200-sxm:4", "mosaic_gpu"),
            pytest.param("tpu-v5e:2x2", "mosaic_tpu"),
        ],
        ["h200-sxm:4-mosaic_gpu", "tpu-v5e:2x2-mosaic_tpu"],
    ),
)
def test_devices_send_one_another_nothing_but_sums_for_the_sinks(chips, implementation, check_vma):
    mesh = Mesh(np.array(targets.devices(Target.parse(chips))).reshape(2, 2), ("data", "tensor"))
    query, key = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)

    def attend(query, key, value, sinks):
        return flash_attention(query, key, value, sinks=sinks, key_range=causal(256), implementation=implementation)

    specs = (HEADS, HEADS, HEADS, SINKS)
    through = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=HEADS, check_vma=check_vma)
    gradient = jax.jit(
        jax.grad(lambda arrays: jnp.sum(through(*arrays).astype(jnp.float32))),
        in_shardings=(tuple(NamedSharding(mesh, spec) for spec in specs),),
    )
    with jax.set_mesh(mesh):
        text = gradient.lower((query, key, key, sinks)).compile().as_text()
    assert text.count(f"flash_attention_{'query_gradient' if implementation == 'triton' else 'gradients'}")
    assert re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", text) == ["all-reduce"]


@ELSEWHERE
@pytest.mark.parametrize("what", ["gradient of a bias", "few queries"])
@pytest.mark.parametrize("dtype, precision", [(jnp.float32, "HIGHEST"), (jnp.bfloat16, "DEFAULT")])
def test_what_xla_multiplies_for_kernels_has_their_precision(what, dtype, precision):
    """Lowered for a TPU, which by default multiplies float32 as bfloat16."""
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


@pytest.mark.parametrize(
    "sms, shares", sampled([pytest.param(23, 1), pytest.param(24, 2), pytest.param(48, 4)], ["24-2"])
)
@pytest.mark.parametrize("bias", sampled([(1, 8, 200, 170), (1, 1, 1, 170), None], ["None"]), ids=str)
@interpreted()
def test_few_key_heads_are_shared_out_over_a_gpu(monkeypatch, sms, shares, bias):
    """Twelve programs, two heads of 170 keys in blocks of 32, are enough for 23 SMs.

    For more SMs the groups of four query heads are divided, each share with its own sum in float32.
    """
    arrays = drawn((1, 200, 8, 16), (1, 170, 2, 16), (1, 170, 2, 32), *([bias] if bias else []))

    def gradient(implementation):
        def loss(arrays):
            query, key, value, *bias = arrays
            options = dict(key_range=sliding_window(200, 90, offset=-20), bias=bias[0] if bias else None)
            how = dict(implementation=implementation)
            return jnp.sum(jnp.sin(flash_attention(query, key, value, **options, **how)))

        return jax.jit(jax.grad(loss)).trace(arrays)

    chip = dataclasses.replace(target.current(), cores=sms)
    monkeypatch.setattr(target, "current", lambda: chip)
    traced = gradient("triton")
    assert f"f32[1,170,{2 * shares},16]" in str(traced.jaxpr)
    got, wanted = (each.lower().compile()(arrays) for each in (traced, gradient("reference")))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
@interpreted()
def test_few_key_heads_are_shared_out_over_hopper(monkeypatch):
    """One program, of 70 keys, is too few for three SMs: two shares of two query heads each."""
    arrays = drawn((1, 70, 4, 64), (1, 70, 1, 64), (1, 70, 1, 64), dtype=jnp.bfloat16)
    chip = dataclasses.replace(target.current(), cores=3)
    monkeypatch.setattr(target, "current", lambda: chip)

    def gradient(arrays, **how):
        def loss(arrays):
            return jnp.sum(jnp.sin(flash_attention(*arrays, key_range=causal(70), **how).astype(jnp.float32)))

        return jax.jit(jax.grad(loss)).trace(arrays)

    traced = gradient(arrays, implementation="mosaic_gpu")
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

    def gradient(**how):
        def loss(arrays):
            out = flash_attention(*arrays, bias=bias, key_range=sliding_window(150, 30, offset=-10), **how)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss)((query, key, value))

    with interpreted(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"):
        got = gradient(implementation="mosaic_tpu")
    assert not interpret_pallas_call.races.races_found
    chex.assert_trees_all_close(got, gradient(implementation="reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, T, S, heads, width, bias",
    sampled(
        [
            pytest.param("forward", 70, 600, 1, 64, (1, 1, 70, 600), id="forward"),
            pytest.param("forward", 70, 600, 3, 64, (1, 1, 70, 600), id="forward, grouped"),
            pytest.param("backward", 260, 100, 3, 64, (1, 1, 1, 100), id="backward"),
            pytest.param("backward", 140, 100, 3, 128, (1, 1, 140, 100), id="backward, wide"),
        ],
        ["forward"],
    ),
)
def test_the_hopper_kernels_race_with_nothing_and_free_what_they_fill(what, T, S, heads, width, bias):
    """On an emulated block: races, deadlocks, barriers passed too often or too rarely, and NaN where nothing was
    copied.

    There are more steps than slots in the ring, forward and backward. Backward has one block of keys, since the
    interpreter does not support the counters by which several blocks take turns (`test_machine_code`).
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    arrays = drawn((1, T, heads, width), (1, S, 1, width), (1, S, 1, width), dtype=jnp.bfloat16)
    pull, bias = drawn((1, T, heads, width), bias, seed=1)
    key_range = sliding_window(T, S // 2, offset=7, after=S - 70)

    def results(arrays, **how):
        def loss(arrays):
            out = flash_attention(*arrays, key_range=key_range, bias=bias, **how).astype(jnp.float32)
            return jnp.sum(pull * out), out

        return loss(arrays)[1] if what == "forward" else jax.grad(loss, has_aux=True)(arrays)[0]

    with interpreted(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"):
        got = results(arrays, implementation="mosaic_gpu")
    assert not interpret_pallas_call.get_races().races_found
    wanted = results([x.astype(jnp.float32) for x in arrays], implementation="reference")
    # bfloat16 weights and gradients are rounded before they are multiplied, and once at the end.
    chex.assert_trees_all_close(jax.tree.map(lambda x: x.astype(jnp.float32), got), wanted, rtol=1e-2, atol=2e-2)


@interpreted()
def test_the_tpu_kernels_transpose_no_tile_of_scores():
    """A product that sums over the rows of its first operand transposes it.

    Here that is keys or values [128, 64], with a result of [64, 128], and never [keys, queries].
    """

    def loss(x):
        return jnp.sum(flash_attention(x, x, x, implementation="mosaic_tpu"))

    program = str(jax.make_jaxpr(jax.grad(loss))(jnp.zeros((1, 256, 1, 64))))
    made = re.findall(r"\[(\d+,\d+)\] = dot_general\[\s*dimension_numbers=\(\(\[0\], \[0\]\)", program)
    assert set(made) == {"64,128"}


def _hopper_loss(widths=(64, 64), around=lambda loss: loss, **how):
    """Trace a loss with its gradient for an H200."""
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=H200)
    arrays = [
        jax.ShapeDtypeStruct((1, 300, heads, width), jnp.float16)
        for heads, width in ((2, widths[0]), (1, widths[0]), (1, widths[1]))
    ]

    def loss(arrays):
        out = flash_attention(*arrays, key_range=causal(300), implementation="mosaic_gpu", soft_cap=9.0, **how)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(jax.value_and_grad(around(loss))).trace(arrays)


def _hopper_calls(*where, **how):
    """Return the number of Mosaic GPU kernels that `_hopper_loss` launches."""
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        return _hopper_loss(*where, **how).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2")


def test_blocks_wait_for_their_turn_to_add_unless_gradients_may_vary():
    waits = [str(_hopper_loss(**how).jaxpr).count("semaphore_wait") for how in ({}, {"deterministic": False})]
    assert waits == [1, 0] and _hopper_calls(deterministic=False) == 2


@pytest.mark.parametrize(
    "widths, calls",
    sampled(
        [
            pytest.param(widths, calls, id=f"{widths[0]}, {widths[1]}")
            for widths, calls in (
                *(((64, 64), 2), ((128, 64), 2), ((128, 128), 2)),
                *(((64, 128), 1), ((192, 128), 1), ((256, 256), 2)),
            )
        ],
        ["128, 128", "192, 128"],
    ),
)
def test_the_hopper_kernels_fit_shared_memory(widths, calls):
    """Lower each pair of widths: too much memory is an error. Backward, unsupported widths take Triton's kernels."""
    assert _hopper_calls(widths) == calls


def test_more_shared_memory_than_there_is_does_not_pass(constant):
    constant(ring, "SHARED_MEMORY", 400_000)
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        _hopper_calls((128, 128))


def test_checkpoint_runs_the_hopper_kernel_again_and_they_lower_where_numbers_have_64_bits():
    """Kernels run forward, forward again, and backward."""
    with jax.enable_x64(True):
        assert _hopper_calls(around=jax.checkpoint) == 3
