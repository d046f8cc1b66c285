"""Products with quantised matrices: how numbers are rounded and stored, what a row depends on, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import sampled
from meshes import as_users_run
from numerics import check, drawn, served

from kernels_pallas import quantized_matmul
from kernels_pallas.core import interpreted
from kernels_pallas.core.fp8 import from_bytes
from kernels_pallas.core.quantized.formats import KINDS, halves
from kernels_pallas.core.quantized.triton import _half_units_of
from kernels_pallas.quantized_matmul import dequantize, quantize
from kernels_pallas.quantized_matmul.cases import OPERATION

# Kinds with their groups: all inputs of an output, some inputs, and blocks of inputs and outputs.
STORED = [
    ("int8", None),
    ("int8", (32, 8)),
    ("int4", None),
    ("int4", 32),
    ("fp8", None),
    ("fp8", (64, 8)),
    ("mxfp4", None),
]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def stored(kind, group, K=128, N=40):
    """Return the parts of a random matrix whose products have unit scale."""
    (matrix,) = drawn((K, N))
    return quantize(matrix * K**-0.5, kind, group)


@pytest.mark.parametrize("kind, group", [*STORED, ("w8a8", None)])
@pytest.mark.parametrize("by_outputs", [False, True])
def test_a_product_is_that_of_the_dequantised_matrix(kind, group, by_outputs):
    """Against NumPy in float64, forward and backward; sums of 128 products in float32."""
    values, scales = stored(kind, group)
    matrix = np.asarray(dequantize(values, scales, kind), np.float64)
    parts = (values.T, scales.T) if by_outputs else (values, scales)
    np.testing.assert_array_equal(dequantize(*parts, kind, by_outputs=by_outputs), matrix.T if by_outputs else matrix)
    x, d_y = drawn((3, 5, 128), (3, 5, 40))
    rows = np.asarray(x, np.float64)
    if kind == "w8a8":
        of_row = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        rows = np.round(x / of_row).astype(np.float64) * of_row
    for implementation in ("reference", "xla"):

        def product(x, name=implementation):
            return quantized_matmul(x, *parts, kind=kind, by_outputs=by_outputs, implementation=name)

        y, pull_back = jax.vjp(product, x)
        for got, want in ((y, rows @ matrix), (pull_back(d_y)[0], d_y @ matrix.T)):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("kind, group", STORED)
def test_numbers_are_rounded_to_the_nearest(kind, group):
    """Within half a step of integers; of floats within half the distance of neighbours, which 1 + 2⁻²⁰ of float32's own
    roundings exceed. Magnitudes of groups differ by many powers of two."""
    (matrix, powers) = drawn((128, 40), (128, 40))
    matrix = matrix * jnp.exp2(jnp.round(6 * powers))
    values, scales = quantize(matrix, kind, group)
    error = np.abs(np.asarray(dequantize(values, scales, kind), np.float64) - np.asarray(matrix, np.float64))
    ones = np.ones_like(values, np.float32 if kind == "fp8" else np.int8)
    step = np.asarray(dequantize(ones.astype(values.dtype), scales, "int8" if kind == "int8" else kind))
    if kind in ("int4", "mxfp4"):  # a byte of ones is the code 1 in the low nibbles
        apart = step.reshape(scales.shape[0], 2, -1, 40)
        step = np.broadcast_to(apart[:, :1], apart.shape).reshape(128, 40)
    half = {"fp8": np.maximum(np.abs(matrix) / 16, step * 2**-10)}.get(kind, step / 2)
    if kind == "mxfp4":  # the code 1 is 0.5; neighbours are 1 apart from 2 on, and 2 from 4 on
        unit = 2 * step
        half = unit * np.select([np.abs(matrix) < 2 * unit, np.abs(matrix) < 4 * unit], [0.25, 0.5], 1.0)
    assert (error <= half * (1 + 2**-20)).all() and error.max() > 0
    again = dequantize(*quantize(dequantize(values, scales, kind), kind, group), kind)
    np.testing.assert_allclose(again, dequantize(values, scales, kind), rtol=1e-6)


@pytest.mark.parametrize("kind, group", STORED)
def test_zeros_and_extreme_numbers(kind, group):
    """Zeros are exact, also of a whole group; the largest numbers of float32 stay finite; a group with a NaN or an
    infinity becomes NaN as a whole, and no other does."""
    (matrix,) = drawn((128, 40))
    matrix = np.array(matrix)
    matrix[::3] = 0
    matrix[:, :8] = 0
    matrix[:, 8:16] *= 1e-42  # below the smallest normal number, and of its scale
    matrix[:, 16:24] *= 8e37
    matrix[64, 24], matrix[64, 32] = np.nan, -np.inf
    back = np.asarray(dequantize(*quantize(jnp.asarray(matrix), kind, group), kind))
    assert not back[:, :8].any() and np.abs(back[:, 8:16]).max() <= 2e-38
    spoilt = np.isnan(back)
    inputs, outputs = (
        (KINDS[kind].group or 128, 1) if group is None else group if isinstance(group, tuple) else (group, 1)
    )
    expected = np.zeros_like(spoilt)
    begin = 64 // inputs * inputs
    for column in (24, 32):
        expected[begin : begin + inputs, column : column + outputs] = True
    np.testing.assert_array_equal(spoilt, expected)
    zero = (matrix == 0) & ~expected
    assert not back[zero].any() and np.isfinite(back[~expected]).all()
    large = back[:, 16:24]
    np.testing.assert_allclose(large, matrix[:, 16:24], rtol=0, atol=np.abs(matrix[:, 16:24]).max() / 3)


def test_nibbles_of_a_group_are_its_halves():
    """The first half of a group's inputs is in the low nibbles; −8, which others may write, is read."""
    matrix = np.array([1, -2, 3, -7, 7, 0, 5, -6], np.float32)[:, None]
    values, scales = quantize(jnp.asarray(matrix), "int4", 4)
    np.testing.assert_array_equal(values[:, 0], [0x31, 0x9E, 0x57, 0xA0])
    np.testing.assert_array_equal(scales, [[1], [1]])
    lowest = dequantize(jnp.full((2, 1), 0x88, jnp.uint8), jnp.ones((1, 1)), "int4")
    np.testing.assert_array_equal(lowest, np.full((4, 1), -8))


def test_every_code_is_read_as_its_format_says():
    """E2M1 and E8M0 by the OCP specification; E4M3 of bytes, as Ampere reads it, by NumPy's type. XLA on a CPU takes
    numbers of float32 below the smallest normal one for zeros, those of float16, as which bytes are read, not."""
    codes = jnp.arange(256, dtype=jnp.uint8)
    values = np.array([*E2M1, *(-x for x in E2M1)])
    for read in (halves(codes, "mxfp4"), _half_units_of(codes.view(jnp.int8))):
        for numbers, nibbles in zip(read, (np.arange(256) % 16, np.arange(256) // 16), strict=True):
            np.testing.assert_array_equal(np.asarray(numbers) / 2, values[nibbles])
    ones = jnp.full((16, 256), 0x22, jnp.uint8)
    powers = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256) - 127.0))
    got = dequantize(ones, codes[None], "mxfp4")
    # Products of the smallest numbers with half of a scale are zeros on a CPU.
    np.testing.assert_array_equal(np.asarray(got)[0, 2:], powers[2:])
    native = np.asarray(codes).view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(from_bytes(codes.view(jnp.int8)), native)


def test_numbers_between_two_codes_go_to_the_even_one():
    magnitudes = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    matrix = np.zeros((32, 1), np.float32)
    matrix[:8, 0] = magnitudes
    back = dequantize(*quantize(jnp.asarray(matrix), "mxfp4"), "mxfp4")
    np.testing.assert_array_equal(back[:8, 0], [0, 1, 1, 2, 2, 4, 4, 6])


CALLS = [
    pytest.param(case, dtype, name, id=f"{case.name}-{dtype}-{name}")
    for name in (*OPERATION.implementations, "xla")
    for case, dtype in served(OPERATION, name)
    if not (name == "mosaic_tpu" and dtype == "float16")
]


@pytest.mark.parametrize(
    "case, dtype, implementation",
    sampled(
        CALLS,
        [
            "int4, groups of 32-bfloat16-triton",
            "fp8, blocks of 128 × 8-float32-triton",
            "int4, many rows-bfloat16-triton",
            "int4, many rows, long groups-float32-triton",
            "mxfp4, many rows-bfloat16-triton",
            "mxfp4, several steps-bfloat16-mosaic_tpu",
            "int8, short groups-float32-mosaic_tpu",
            "int4, by outputs, groups of 32-float32-xla",
            "w8a8, by outputs-bfloat16-xla",
        ],
    ),
)
def test_implementations_give_what_the_reference_gives(case, dtype, implementation):
    check(OPERATION, case, dtype, implementation)


@pytest.mark.parametrize("kind, group", [("int8", None), ("int4", 32), ("fp8", (64, 10)), ("w8a8", None)])
def test_a_row_has_the_same_bits_however_many_there_are(kind, group):
    """On a CPU, of matrices by their outputs; of others whatever the other rows are. K × N needs several blocks."""
    values, scales = stored(kind, group, 1024, 300)
    (x,) = drawn((300, 1024))

    @jax.jit
    def product(x, values, scales):
        return quantized_matmul(x, values, scales, kind=kind, by_outputs=True, implementation="xla")

    every = np.asarray(product(x, values.T, scales.T))
    for rows in (1, 2, 3, 8, 33, 64, 128):
        np.testing.assert_array_equal(product(x[:rows], values.T, scales.T), every[:rows])
    np.testing.assert_array_equal(product(x[::-1], values.T, scales.T), every[::-1])
    of_inputs = [
        quantized_matmul(rows, values, scales, kind=kind, implementation="xla")[0]
        for rows in (x[:4], x[:4].at[1:].set(jnp.nan))
    ]
    np.testing.assert_array_equal(*of_inputs)


@pytest.mark.parametrize("kind", sampled(["int8", "int4", "fp8", "w8a8"], ["int8", "w8a8"]))
def test_a_product_has_the_same_bits_whatever_is_added_to_it(kind):
    """On a CPU, of matrices by their outputs, as a layer adds adapters or a bias. Joined with the sum, the last scales
    would be multiplied and added with one rounding, as optimised code does it. A small matrix would be one block, and
    sums of integers have no blocks."""
    values, scales = stored(kind, None)
    x, added = drawn((5, 128), (5, 40))

    @as_users_run
    def product(x, *added):
        y = quantized_matmul(x, values.T, scales.T, kind=kind, by_outputs=True, implementation="xla")
        return sum(added, y)

    np.testing.assert_array_equal(product(x, added), product(x) + added)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
@interpreted()
def test_kernels_compose(implementation):
    """jit, vmap over matrices, and the gradient of rows alone."""
    matrices, x = drawn((2, 64, 24), (2, 5, 64))
    values, scales = jax.vmap(lambda matrix: quantize(matrix / 8, "int4", 32))(matrices)

    def product(x, values, scales, name=implementation):
        return quantized_matmul(x, values, scales, kind="int4", implementation=name)

    def loss(name, x, scales):
        y = jax.vmap(lambda *parts: product(*parts, name=name))(x, values, scales)
        return jnp.sum(jnp.sin(y))

    for got, want in zip(
        *(jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(name, x, scales) for name in (implementation, "reference")),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not jax.grad(loss, 2)(implementation, x, scales).any()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "int3"}, "there is no kind 'int3'; there are int8, int4, fp8, w8a8, mxfp4"),
        ({"x": jnp.ones((3, 32))}, r"x has shape \[3, 32\], and the matrix 64 inputs"),
        ({"x": jnp.ones((3, 64), jnp.int32)}, "x is int32; it must be of floating point"),
        ({"values": jnp.ones((64, 8))}, r"values of int8 are float32\[64, 8\]; they must be int8 \[·, ·\]"),
        ({"values": jnp.ones((2, 64, 8), jnp.int8)}, r"values of int8 are int8\[2, 64, 8\]"),
        ({"scales": jnp.ones((2, 8), jnp.bfloat16)}, r"scales of int8 are bfloat16\[2, 8\]; they must be float32"),
        ({"scales": jnp.ones((3, 8))}, "3 × 8 scales do not divide a matrix of 64 inputs and 8 outputs"),
        ({"scales": jnp.ones((2, 3))}, "2 × 3 scales do not divide"),
        ({"scales": jnp.ones((0, 8))}, "0 × 8 scales do not divide"),
        ({"kind": "w8a8"}, "groups of w8a8 have 64 inputs, not 32"),
        (
            {"values": jnp.ones((33, 8), jnp.uint8), "kind": "int4"},
            "groups of int4 have an even number of inputs, not 33",
        ),
        (
            {"values": jnp.ones((32, 8), jnp.uint8), "kind": "mxfp4", "scales": jnp.ones((4, 8), jnp.uint8)},
            "groups of mxfp4 have 32 inputs, not 16",
        ),
        ({"by_outputs": 1}, "by_outputs = 1; it must be True or False"),
        ({"by_outputs": True}, r"x has shape \[3, 64\], and the matrix 8 inputs"),
        ({"implementation": "cutlass"}, "there is no implementation 'cutlass'; there are reference, xla, triton"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {"x": jnp.ones((3, 64)), "values": jnp.ones((64, 8), jnp.int8), "scales": jnp.ones((2, 8))}
    with pytest.raises(ValueError, match=f"quantized_matmul: {message}"):
        quantized_matmul(**(arguments | {"kind": "int8"} | changes))


@pytest.mark.parametrize(
    "shape, kind, group, message",
    [
        ((64, 8), "int8", 48, "groups of 48 × 1 do not divide a matrix of 64 × 8"),
        ((64, 8), "int8", (32, 3), "groups of 32 × 3 do not divide"),
        ((64, 8), "int8", 0, "groups of 0 × 1 do not divide"),
        ((64, 8), "mxfp4", 64, "groups of mxfp4 have 32 inputs, not 64"),
        ((64,), "int8", None, r"matrix has shape \[64\]; it must be \[K, N\]"),
        ((64, 8), "int2", None, "there is no kind 'int2'"),
    ],
)
def test_what_cannot_be_quantised_is_refused(shape, kind, group, message):
    with pytest.raises(ValueError, match=f"quantize: {message}"):
        quantize(jnp.ones(shape), kind, group)


@pytest.mark.parametrize(
    "implementation, by_outputs, kind, reason",
    [
        ("triton", True, "int8", "it reads matrices by their inputs"),
        ("mosaic_tpu", True, "int8", "it reads matrices by their inputs"),
        ("mosaic_tpu", False, "int8", "its steps do not consist of groups of 24 inputs"),
        ("triton", False, "w8a8", "it does not round x"),
    ],
)
@interpreted()
def test_kernels_refuse_what_they_cannot_read(implementation, by_outputs, kind, reason):
    values, scales = stored(kind, 24 if kind == "int8" else None, 96, 8)
    parts = (values.T, scales.T) if by_outputs else (values, scales)
    with pytest.raises(NotImplementedError, match=f"{implementation} cannot serve this call: {reason}"):
        quantized_matmul(jnp.ones((2, 96)), *parts, kind=kind, by_outputs=by_outputs, implementation=implementation)


def test_a_row_that_is_not_finite_stays_so():
    values, scales = stored("w8a8", None, 64, 8)
    x = drawn((3, 64))[0].at[1, 3].set(jnp.inf)
    for implementation in ("reference", "xla"):
        y = quantized_matmul(x, values, scales, kind="w8a8", implementation=implementation)
        assert not np.isfinite(y[1]).any() and np.isfinite(np.delete(y, 1, axis=0)).all()
