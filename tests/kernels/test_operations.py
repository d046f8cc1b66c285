"""Every implementation against the reference in float32: results, gradients, and equality of two runs. Interpreted, or
with JAX_PLATFORMS=cuda,cpu or tpu,cpu compiled for this machine's chip.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from markers import ELSEWHERE
from matrices import sampled
from numerics import check, drawn, served

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from kernels_pallas import (
    bias_activation,
    gated_activation,
    layer_norm,
    log_softmax,
    matmul,
    rms_norm,
    rotary_embedding,
    softmax,
)
from kernels_pallas.core import interpreted
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.core.rows import triton


def _implementations(operation):
    """Return the names of the kernels, and "xla" where an operation has it."""
    return (*operation.implementations, *(name for name in operation.others if name == "xla"))


CALLS = [
    pytest.param(
        *(operation, case, dtype, implementation),
        id=f"{operation.name}-{case.name}-{dtype}-{implementation}",
        marks=[pytest.mark.slow] if implementation == "mosaic_gpu" else [],
    )
    for operation in OPERATIONS.values()
    for implementation in _implementations(operation)
    for case, dtype in served(operation, implementation)
    if not (implementation == "mosaic_tpu" and dtype == "float16")
]


# Of each operation what differs most: masks, epilogues, options, odd sizes; over all of them each dtype. The kernels
# take turns, and XLA has every case.
SAMPLE = {
    "rms_norm": {"odd width-float32": "triton", "residual-bfloat16": "mosaic_tpu"},
    "layer_norm": {"odd width, no bias-float32": "mosaic_tpu", "residual-bfloat16": "triton"},
    "softmax": {"odd width, masked rows-float32": "mosaic_tpu", "plain-float16": "triton"},
    "log_softmax": {"odd width, masked rows-float32": "triton", "large-bfloat16": "mosaic_tpu"},
    "rotary_embedding": {"gradients of the angles-float32": "triton", "interleaved-bfloat16": "mosaic_tpu"},
    "gated_activation": {"odd width, gelu-float32": "mosaic_tpu", "plain-bfloat16": "triton"},
    "bias_activation": {
        "odd width-float32": "mosaic_tpu",
        "empty batch-float32": "mosaic_tpu",
        "plain-bfloat16": "triton",
    },
    "matmul": {"whole epilogue-bfloat16": "mosaic_tpu", "several tiles-float32": "triton"},
    "grouped_matmul": {"odd widths, transposed-bfloat16": "triton", "plain-float32": "mosaic_tpu"},
    "quantized_grouped_matmul": {
        "int4, groups of 32-bfloat16": "triton",
        "mxfp4, several steps-bfloat16": "mosaic_tpu",
    },
    "quantized_matmul": {"int8-bfloat16": "triton", "int4, groups of 32-float32": "mosaic_tpu"},
    "gated_delta_rule": {"two chunks, shared keys-float32": "mosaic_tpu", "part of a chunk-float32": "triton"},
    "state_space": {"two chunks, shared keys-bfloat16": "mosaic_tpu", "part of a chunk-float32": "triton"},
    "linear_cross_entropy": {"sum of everything-float32": "triton", "plain-bfloat16": "mosaic_tpu"},
    "flash_attention": {
        "causal-bfloat16": "mosaic_tpu",
        "full, one query-float32": "triton",
        "grouped, packed, window-float32": "mosaic_tpu",
        "rows that see nothing-float32": "triton",
        "wide, packed, window, cap and sinks-bfloat16": "triton",
    },
    "paged_attention": {
        "few tokens, cap, no keys-float32": "triton",
        "tile of a prompt, window-bfloat16": "triton",
        "tile of a prompt, window, cap, pages of 128-float32": "mosaic_tpu",
        "few tokens, cap, int8-float32": "triton",
        "tile of a prompt, window, fp8-bfloat16": "mosaic_tpu",
        "values in keys, int8-float32": "mosaic_tpu",
        "values in keys, pages of 128-bfloat16": "triton",
    },
}


def _in_the_sample(operation, case, dtype, implementation):
    if implementation == "mosaic_gpu":  # interpreted slowly: in the sample its machine code runs, and its race test
        return False
    turn = SAMPLE[operation.name].get(f"{case.name}-{dtype}")
    return turn is not None and implementation in (turn, "xla")


def test_the_sample_has_every_implementation_and_names_no_other_case():
    kept = [param.values for param in CALLS if _in_the_sample(*param.values)]
    every = {(operation.name, name) for operation in OPERATIONS.values() for name in _implementations(operation)}
    every -= {(name, "mosaic_gpu") for name in OPERATIONS}
    assert {(operation.name, implementation) for operation, _, _, implementation in kept} == every
    named = {(name, *turn) for name, cases in SAMPLE.items() for turn in cases.items()}
    found = {(operation.name, f"{case.name}-{dtype}", name) for operation, case, dtype, name in kept if name != "xla"}
    assert found == named


@pytest.mark.parametrize("operation, case, dtype, implementation", sampled(CALLS, _in_the_sample))
def test_implementations_give_what_the_reference_gives(operation, case, dtype, implementation):
    check(operation, case, dtype, implementation)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_on_a_cpu_no_kernel_runs(operation):
    """None means "xla" on a CPU, the reference where nothing is tuned; a kernel by name is refused."""
    with jax.default_device(jax.devices("cpu")[0]):
        _no_kernel_runs(operation)


def _no_kernel_runs(operation):
    case = operation.used_in("test")[0]
    arguments = case.draw("float32")
    none, xla, reference = (
        str(
            jax.make_jaxpr(lambda a, name=name: operation.function(**a, **case.options, implementation=name))(arguments)
        )
        for name in (None, "xla", "reference")
    )
    assert none == xla and (xla == reference) == ("xla" not in operation.others) and "pallas_call" not in none
    for name in operation.implementations:
        with pytest.raises(NotImplementedError, match=f"{operation.name}: {name} cannot serve this call: it runs on"):
            operation.function(**arguments, **case.options, implementation=name)
    with pytest.raises(ValueError, match=f"{operation.name}: there is no implementation 'cuda'; there are reference"):
        operation.function(**arguments, **case.options, implementation="cuda")


@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("width", sampled([32, 37], ["37"]))
@interpreted()
def test_rows_of_minus_infinity_are_those_of_the_reference(function, width, implementation):
    """NaN where a row has only −∞, at any width; with a mask as well, the same as the reference."""
    x = np.zeros((4, width), np.float32)
    x[:2] = x[2, 1:] = -np.inf
    where = np.arange(width)[None] % np.array([[1], [2], [1], [2]]) == 0
    for mask in (None, where):
        got, wanted = (
            function(jnp.asarray(x), None if mask is None else jnp.asarray(mask), implementation=name)
            for name in (implementation, "reference")
        )
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        assert np.isnan(np.asarray(got)[0]).all()


@pytest.mark.parametrize("implementation", ["reference", "triton", "mosaic_tpu"])
@interpreted()
def test_options_are_numbers_of_any_kind(implementation):
    """Options may be Python's, NumPy's or JAX's numbers, known while tracing."""
    x = jnp.linspace(-1.0, 1.0, 32).reshape(2, 16)
    for function, options in (
        (rms_norm, {"epsilon": 0.5}),
        (layer_norm, {"epsilon": 0.5}),
        (softmax, {"temperature": 0.5, "soft_cap": 2.0}),
        (log_softmax, {"temperature": 0.5, "soft_cap": 2.0}),
    ):
        run = functools.partial(function, x, implementation=implementation)
        for kind in (np.float32, jnp.float32):
            np.testing.assert_array_equal(run(**{k: kind(v) for k, v in options.items()}), run(**options))
        with pytest.raises(ValueError, match=f"{function.__name__}: {next(iter(options))} is traced"):
            jax.jit(lambda options, run=run: run(**options))(options)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: gated_activation(x, x, activation=None), "gated_activation: there is no activation None; there are"),
        (
            lambda x: bias_activation(x, x[0], activation=None),
            "bias_activation: there is no activation None; there are",
        ),
        (lambda x: rms_norm(x, epsilon=1e-40), "rms_norm: epsilon = 1e-40; it must be at least 1.17.*e-38"),
        (lambda x: layer_norm(x, epsilon=0.0), "layer_norm: epsilon = 0.0; it must be positive"),
    ],
)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(jnp.ones((2, 16)))


@pytest.mark.parametrize("implementation", [None, "triton", "mosaic_tpu"])
@pytest.mark.parametrize("function", [softmax, log_softmax, rms_norm, layer_norm])
@interpreted()
def test_rows_of_no_numbers(function, implementation):
    """Empty operands have empty results and gradients."""
    run = functools.partial(function, implementation=implementation)
    y, pull_back = jax.vjp(run, jnp.zeros((3, 0)))
    assert y.shape == (3, 0) == pull_back(y)[0].shape


SHARED = [  # tokens; heads of eight rows fill a Triton block and half a Mosaic one, and both end in the middle of 12
    pytest.param(tokens, angles, implementation, id=f"{tokens}-{angles}-{implementation}")
    for tokens, angles in (((3, 16), 1), ((2, 3, 8), 1), ((2, 3, 8), 2), ((5, 12), 1), ((40, 1), 1))
    for implementation in ("triton", "mosaic_tpu")
]


@pytest.mark.parametrize(
    "tokens, angles, implementation", sampled(SHARED, ["(2, 3, 8)-2-triton", "(5, 12)-1-mosaic_tpu"])
)
@interpreted()
def test_rows_share_a_table_of_angles(tokens, angles, implementation):
    """Results and all three gradients with angles of the tokens' last dimensions, fewer for sin than for cos."""
    x, cos, sin = drawn((*tokens, 8, 64), (*tokens[-angles:], 32), (*tokens[-1:], 32))

    @functools.partial(jax.jit, static_argnums=0)
    def both(implementation, *arrays):
        y, pull_back = jax.vjp(functools.partial(rotary_embedding, implementation=implementation), *arrays)
        return y, *pull_back(jnp.sin(y))

    made, expected = (both(name, x, cos, sin) for name in (implementation, "reference"))
    chex.assert_trees_all_close(made, expected, rtol=1e-5, atol=1e-5)


@ELSEWHERE
@pytest.mark.parametrize(
    "function, arguments",
    [
        (softmax, {"x": ((64, 4096), "bfloat16"), "where": ((64, 4096), "bool")}),
        (rotary_embedding, {"x": ((2, 64, 8, 128), "bfloat16")} | dict.fromkeys(("cos", "sin"), ((64, 64), "float32"))),
    ],
)
def test_triton_reads_operands_as_they_are(function, arguments):
    """No XLA kernel converts a mask or repeats angles, forward or backward."""
    mesh = Mesh(np.array(targets.devices(Target.parse("h200-sxm:1"))), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = {name: jax.ShapeDtypeStruct(*of, sharding=whole) for name, of in arguments.items()}
    x = arguments.pop("x")

    def program(x, d_y, others):
        y, pull_back = jax.vjp(lambda x: function(x, **others, implementation="triton"), x)
        return y, *pull_back(d_y)

    with jax.set_mesh(mesh):
        text = jax.jit(program).lower(x, x, arguments).compile().as_text()
    assert text.count("custom-call(") == 2 and " fusion(" not in text


@pytest.mark.parametrize("width", [128, 1600, 4096, 8192])
def test_partial_sums_are_a_small_part_of_what_is_moved(width):
    """The gradient of a scale over 64 MiB of bfloat16 rows on an H200: less than five bytes in a hundred."""
    rows = 2**25 // width
    blocks = triton.default_blocks(rows, width, sums=1, elementwise=False, cores=132)
    assert 132 <= blocks.programs <= rows
    written_and_read, operands_and_result = 2 * 4 * blocks.programs * width, 3 * 2 * rows * width
    assert written_and_read < 0.05 * operands_and_result


@pytest.mark.parametrize("implementation", ["reference", "triton", "mosaic_tpu"])
@pytest.mark.parametrize("function", [softmax, log_softmax])
@interpreted()
def test_a_nan_spoils_its_row_and_what_is_masked_nothing(function, implementation):
    """This holds where a maximum ignores NaN, as Triton's does, and after a cap, whose derivative at NaN is NaN."""
    run = functools.partial(function, implementation=implementation)
    x, unmasked = np.zeros((8, 300), np.float32), np.ones((8, 300), bool)
    x[3, 2], unmasked[3, 2] = np.nan, False

    @jax.jit
    def gradient(x, unmasked):
        return jax.grad(lambda x: jnp.sum(jnp.where(unmasked, run(x, unmasked, soft_cap=5.0), 0.0) ** 2))(x)

    spoilt = np.isnan(jax.jit(run)(x))
    assert spoilt[3].all() and not np.delete(spoilt, 3, axis=0).any()
    assert not np.isnan(gradient(x, unmasked)).any()


@pytest.mark.parametrize("implementation", ["reference", "triton", "mosaic_tpu"])
@interpreted()
def test_a_sum_that_float16_cannot_hold_has_a_gradient(implementation):
    a, b = jnp.full((16, 16), -300, jnp.float16), jnp.full((16, 16), 300, jnp.float16)
    run = functools.partial(matmul, activation="silu", implementation=implementation)
    assert not jnp.any(jax.grad(lambda a: jnp.sum(run(a, b).astype(jnp.float32)))(a))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: rms_norm([[1.0]]), "rms_norm: x is list; it must be an array"),
        (lambda x: gated_activation(x, None), "gated_activation: up is None; it must be an array"),
        (lambda x: gated_activation(x, x.astype(jnp.bfloat16)), r"up is bfloat16\[2, 16\]; .* like gate"),
        (lambda x: softmax(x, temperature=None), "softmax: temperature = None; it must be a number"),
        (lambda x: softmax(x, soft_cap=float("inf")), r"softmax: soft_cap = inf; it must be at most 8.507e\+37"),
        (lambda x: rms_norm(x, epsilon=1e39), r"rms_norm: epsilon = 1e\+39; it must be at most"),
        (lambda x: rms_norm(x, plus_one="no"), "rms_norm: plus_one = 'no'; it must be True or False"),
        (lambda x: rotary_embedding(None, x, x), "rotary_embedding: x is None; it must be an array"),
        (lambda x: rotary_embedding(x, x, x, interleaved=1), "interleaved = 1; it must be True or False"),
        (lambda x: rms_norm(x.astype(jnp.float8_e4m3fn)), "rms_norm: x is float8_e4m3fn; it must be of floating point"),
        (lambda x: rms_norm(x, implementation=["triton"]), r"rms_norm: there is no implementation \['triton'\]"),
        (lambda x: matmul(x, x.T, activation=["silu"]), r"matmul: there is no activation \['silu'\]"),
    ],
)
def test_what_is_no_operand_is_refused_in_words(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(jnp.ones((2, 16)))


@interpreted()
def test_a_mask_of_more_numbers_than_32_bits_count_is_widened():
    """Pallas-Triton counts in 32 bits where an array has at most 2³² bytes. The case is traced only: it has 4 GB of
    logits.
    """
    x, where = (jax.ShapeDtypeStruct((65_600, 32_768), dtype) for dtype in (jnp.bfloat16, bool))
    run = functools.partial(softmax, implementation="triton")
    assert "i16[65600,32768]" in str(jax.make_jaxpr(run)(x, where))
    small = jax.ShapeDtypeStruct((600, 32_768), jnp.bfloat16), jax.ShapeDtypeStruct((600, 32_768), bool)
    assert "i16[" not in str(jax.make_jaxpr(run)(*small))
