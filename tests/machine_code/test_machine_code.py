"""Compiled kernels for NVIDIA GPUs, emulated and compared with the reference in float32.

Results and gradients agree, and are the same whether copies arrive early or late; no access leaves its array, and no
two blocks write the same place.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import kernel_runs
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from machine_code.program import compile_call
from markers import ELSEWHERE
from matrices import sampled
from numerics import check, drawn, problem, results_and_gradients, served

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.kernel_matrix import CHIPS
from kernels_pallas import gated_activation, rms_norm
from kernels_pallas.core import launch, target
from kernels_pallas.core.hopper.warpgroup import Warpgroup
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.flash_attention import (
    causal,
    flash_attention,
    intersection,
    mosaic_gpu_backward,
    packed,
    pipeline,
    sliding_window,
)

pytestmark = ELSEWHERE


def _calls():
    """Yield every case on Hopper, and a selection on Ampere and Blackwell.

    These differ in how they multiply narrow numbers. They get the cases of matmul, attention and quantised matrices in
    narrow numbers, and the first case of each other operation.
    """
    for operation in OPERATIONS.values():
        for implementation in set(operation.implementations) & {"triton", "mosaic_gpu"}:
            for i, (case, dtype) in enumerate(served(operation, implementation)):
                yield operation, case, dtype, implementation, "H100"
                multiplies = operation.name in ("matmul", "flash_attention", "quantized_matmul")
                if implementation == "triton" and (dtype != "float32" if multiplies else i == 0):
                    yield operation, case, dtype, implementation, "A100"
                    yield operation, case, dtype, implementation, "B200"


CALLS = [
    pytest.param(*call, id=f"{call[0].name}-{call[1].name}-{'-'.join(call[2:])}")
    for call in sorted(_calls(), key=lambda call: (call[0].name, call[3]))
]
# Every operation; matrix products of every chip (mma.sync on Ampere, wgmma on Hopper, tcgen05 on Blackwell); attention
# by Mosaic GPU and by Triton, with a window, cap and sinks. Its other masks, and further tests of attention by Mosaic
# GPU below, run only with `-m exhaustive`, except that of an error that must be found, and causal gradients over more
# than a block of keys (`test_gradients_may_be_added_in_any_order`).
SAMPLE = {
    "bias_activation-plain-bfloat16-triton-A100",
    "flash_attention-causal-bfloat16-triton-B200",
    "flash_attention-wide, packed, window, cap and sinks-bfloat16-mosaic_gpu-H100",
    "gated_activation-plain-bfloat16-triton-B200",
    "grouped_matmul-plain-bfloat16-triton-H100",
    "grouped_matmul-whole tiles-bfloat16-mosaic_gpu-H100",
    "layer_norm-residual-bfloat16-triton-H100",
    "linear_cross_entropy-plain-bfloat16-triton-B200",
    "log_softmax-odd width, masked rows-float32-triton-H100",
    "matmul-whole epilogue-bfloat16-triton-A100",
    "paged_attention-wide, window, cap, no keys-bfloat16-mosaic_gpu-H100",
    "quantized_matmul-fp8, blocks of 128 × 8-bfloat16-triton-B200",
    "quantized_matmul-mxfp4, many rows-bfloat16-triton-A100",
    "rms_norm-residual-bfloat16-triton-H100",
    "rms_norm-wide, residual-bfloat16-mosaic_gpu-H100",
    "rotary_embedding-half-split-bfloat16-triton-B200",
    "softmax-odd width, masked rows-float32-triton-H100",
}


@pytest.mark.parametrize("operation, case, dtype, implementation, chip", sampled(CALLS, SAMPLE))
def test_machine_code_agrees_with_the_reference(operation, case, dtype, implementation, chip, monkeypatch):
    kernel_runs.on(chip, monkeypatch)
    check(operation, case, dtype, implementation)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chip", ["A100", "H100", "B200"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "state_space"])
def test_linear_attention_in_the_default_precision(name, chip, monkeypatch):
    """Tensor cores multiply bfloat16, as in production, where other tests ask for float32. Roundings make up to 9e-3 of
    the largest number, as in the interpreter (`test_bfloat16_is_multiplied_as_it_is`)."""
    operation = OPERATIONS[name]
    case = operation.used_in("test")[0]
    wanted = problem(operation, case, "bfloat16")
    kernel_runs.on(chip, monkeypatch)
    with jax.default_matmul_precision(None):
        run = results_and_gradients(functools.partial(operation.function, implementation="triton"), case)
        assert_near(
            lambda: jax.tree.leaves(run(wanted.arguments, wanted.cotangents)),
            [np.asarray(x, np.float32) for x in jax.tree.leaves((wanted.results, wanted.gradients))],
        )


def assert_near(run, expected):
    """Assert that attention in bfloat16 is near `expected`: weights and their gradients are rounded before products.

    A second run, in which copies arrive at once, must give the same bits.
    """
    made = run()
    for got, want in zip(made, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-2, atol=2e-2 * float(jnp.abs(want).max()))
    chex.assert_trees_all_equal(run(), made)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "widths, stages",
    [((64, 64), 1), ((64, 64), 4), ((128, 64), 1), ((128, 64), 4), ((128, 128), 4), ((192, 128), 4), ((256, 256), 4)],
)
def test_attention_of_every_width(widths, stages, monkeypatch):
    """Rings have one to four stages; outputs replace the queries in shared memory or lie next to them."""
    shapes = [(1, 400, heads, width) for heads, width in ((2, widths[0]), (1, widths[0]), (1, widths[1]))]
    operands = drawn(*shapes, dtype=jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def results(implementation, *operands):
        def attend(*operands):
            return flash_attention(*operands, key_range=causal(400), implementation=implementation)

        out, pull_back = jax.vjp(attend, *operands)
        return out, *pull_back(jnp.ones_like(out))

    expected = results("reference", *(x.astype(jnp.float32) for x in operands))
    monkeypatch.setattr(pipeline.tuning, "blocks", lambda *request: request[-1]._replace(stages=stages))
    kernel_runs.on("H100", monkeypatch)
    assert_near(functools.partial(results, "mosaic_gpu", *operands), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows, stages", [(1, 4), (448, 3)])
def test_a_bias_may_have_fewer_stages_than_queries(rows, stages, monkeypatch):
    """The step that waits for the bias, with one stage, also waits for gradients sent between two copies."""
    shapes = [(1, 448, 1, width) for width in (128, 128, 64)] + [(1, 1, rows, 448)]
    *operands, bias = drawn(*shapes, dtype=jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, *operands):
        def attend(*operands):
            return flash_attention(*operands, key_range=causal(448), bias=bias, implementation=implementation)

        out, pull_back = jax.vjp(attend, *operands)
        return pull_back(jnp.ones_like(out))

    expected = gradients("reference", *(x.astype(jnp.float32) for x in operands))
    made = []
    plain = pipeline.pipeline_of
    monkeypatch.setattr(mosaic_gpu_backward, "pipeline_of", lambda *a, **o: made.append(plain(*a, **o)) or made[-1])
    kernel_runs.on("H100", monkeypatch)
    assert_near(functools.partial(gradients, "mosaic_gpu", *operands), expected)
    assert made[-1].stages == stages


def test_a_load_without_its_mask_is_found(monkeypatch):
    """The interpreter cannot find it: there, reads beyond an array return values. JAX 0.12 masks blocks itself."""
    kernel_runs.on("A100", monkeypatch)
    x = jnp.ones((3, 48))
    rms_norm(x, implementation="triton")
    plain = launch.load
    monkeypatch.setattr(launch, "load", lambda ref, mask=None, other=0: plain(ref))
    jax.clear_caches()
    if jax.__version_info__ >= (0, 12):
        np.testing.assert_allclose(rms_norm(x, implementation="triton"), x, rtol=1e-6)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="rms_norm: .*ld.global.* of operand 0, which"):
            rms_norm(x, implementation="triton")
    jax.clear_caches()


def test_a_missing_wait_is_found(monkeypatch):
    """A kernel that waits for nothing ends before its copies and products do."""
    kernel_runs.on("H100", monkeypatch)
    query, key, value = drawn(*[(1, 64, 1, 64)] * 3, dtype=jnp.bfloat16)

    def attend():
        jax.clear_caches()
        return np.asarray(
            flash_attention(query, key, value, key_range=causal(64), implementation="mosaic_gpu"), np.float32
        )

    right = attend()
    assert np.isfinite(right).all()
    monkeypatch.setattr(Warpgroup, "wait", lambda *arguments: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="EmulationError: .*exits before a (copy|product)"):
        attend()
    jax.clear_caches()


@pytest.mark.exhaustive
@pytest.mark.parametrize("left_out", ["semaphore_wait", "wait_smem_to_gmem"])
def test_an_unordered_accumulation_is_found(left_out, monkeypatch):
    """A block of keys does not wait for the previous one, or signals before the copy engine has written."""
    plain = getattr(plgpu, left_out)
    early = {
        "semaphore_wait": lambda *arguments, **options: None,
        "wait_smem_to_gmem": lambda n, wait_read_only=False: plain(n, wait_read_only=True),
    }
    query, key, value = drawn(*[(1, 256, 1, 128)] * 3, dtype=jnp.bfloat16)
    attend = functools.partial(flash_attention, key_range=causal(256), implementation="mosaic_gpu")
    kernel_runs.on("H100", monkeypatch)
    out, pull_back = jax.vjp(attend, query, key, value)
    monkeypatch.setattr(plgpu, left_out, early[left_out])
    with pytest.raises(jax.errors.JaxRuntimeError, match="gradients.*: (reads what another block wrote|two blocks)"):
        pull_back(out)
    jax.clear_caches()


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_are_accumulated_over_keys_and_heads(width, monkeypatch):
    """A block on one SM iterates over all query heads of its keys.

    Sequences are packed, with windows, a cap and sinks; several blocks of keys contribute to some queries, one to
    others, none to the rest. All is under vmap.
    """
    shapes = [(2, 1, 400, heads, width) for heads in (4, 2, 2)]
    operands = drawn(*shapes, dtype=jnp.bfloat16)
    ids = jnp.repeat(jnp.array([[0, 1, 2, -1]]), 100, axis=1)
    (sinks,) = drawn((4,), seed=1)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, *operands):
        def attend(*operands):
            key_range = intersection(sliding_window(400, 150), packed(ids))
            options = dict(key_range=key_range, soft_cap=5.0, sinks=sinks, implementation=implementation)
            return flash_attention(*operands, **options)

        out, pull_back = jax.vjp(jax.vmap(attend), *operands)
        return pull_back(jnp.cos(jnp.arange(out.size).reshape(out.shape)).astype(out.dtype))

    expected = gradients("reference", *(x.astype(jnp.float32) for x in operands))
    kernel_runs.on("H100", monkeypatch)
    chip = dataclasses.replace(target.current(), cores=1)
    monkeypatch.setattr(target, "current", lambda: chip)
    assert_near(functools.partial(gradients, "mosaic_gpu", *operands), expected)


def _causal_gradients(implementation, operands, **options):
    """Return a function that computes the gradients of causal attention, forward once."""
    options |= dict(key_range=causal(operands[0].shape[1]), implementation=implementation)
    out, pull_back = jax.vjp(functools.partial(flash_attention, **options), *operands)
    return lambda: pull_back(jnp.ones_like(out))


def test_gradients_may_be_added_in_any_order(monkeypatch):
    """Two blocks of keys add to the last queries. Without `deterministic` neither waits for the other."""
    operands = drawn(*[(1, 129, 1, 128)] * 3, dtype=jnp.bfloat16)
    expected = _causal_gradients("reference", [x.astype(jnp.float32) for x in operands])()
    kernel_runs.on("H100", monkeypatch)
    monkeypatch.delattr(plgpu, "semaphore_wait")
    made = _causal_gradients("mosaic_gpu", operands, deterministic=False)()
    for got, want in zip(made, expected, strict=True):
        got, most = np.asarray(got, np.float32), float(jnp.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * most)  # as in assert_near


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_order_of_additions_changes_roundings_alone(width, monkeypatch):
    operands = drawn(*[(1, 300, 1, width)] * 3, dtype=jnp.bfloat16)
    expected = _causal_gradients("reference", [x.astype(jnp.float32) for x in operands])()
    kernel_runs.on("H100", monkeypatch)
    in_order = _causal_gradients("mosaic_gpu", operands)
    in_any_order = _causal_gradients("mosaic_gpu", operands, deterministic=False)
    assert_near(in_order, expected)
    want = in_order()
    for _ in range(2):  # copies arrive late, and at once
        # Sums differ by roundings of float32, results by one rounding to bfloat16.
        chex.assert_trees_all_close(
            *(jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (in_any_order(), want)),
            rtol=2**-7,
            atol=1e-5 * max(float(jnp.abs(x).max()) for x in want),
        )


def test_a_program_of_more_than_a_kernel_is_refused():
    (device,) = targets.devices(Target.parse(CHIPS["A100"]))
    mesh = Mesh(np.array([device]), ("one",))
    x = jax.ShapeDtypeStruct((4, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

    def lowered(function):
        with jax.set_mesh(mesh):
            return jax.jit(function).lower(x, x)

    add = functools.partial(gated_activation, activation="relu", implementation="triton")
    assert compile_call(lowered(add)).kernel.name == "gated_activation"
    for program, message in (
        (lambda a, b: a + b, "not one call"),
        (lambda a, b: add(add(a, b), b), "not one call"),
        (lambda a, b: add(a, b) * 2, "does more .*: stablehlo.*multiply"),
        (lambda a, b: add(b, a), "not those of the program"),
        (lambda a, b: add(a, a), "not those of the program"),
    ):
        with pytest.raises(ValueError, match=message):
            compile_call(lowered(program))


def test_emulation_ends_with_its_test(monkeypatch):
    with monkeypatch.context() as patch:
        kernel_runs.on("A100", patch)
    with pytest.raises(NotImplementedError):
        rms_norm(jnp.ones((4, 32)), implementation="triton")
