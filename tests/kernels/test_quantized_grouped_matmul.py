"""Products of groups of rows with quantised matrices: what a row depends on, what is converted, and bad input."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import sampled
from numerics import check, served

from kernels_pallas import quantized_grouped_matmul
from kernels_pallas.core import interpreted
from kernels_pallas.core.quantized.formats import dequantize, quantize
from kernels_pallas.grouped_matmul import xla
from kernels_pallas.grouped_matmul.quantized_cases import OPERATION

SIZES = [0, 20, 1, 0, 17, 5]  # of 50 rows
STORED = [("int8", None), ("int4", 32), ("fp8", (64, 8)), ("mxfp4", None), ("w8a8", None)]


def drawn(kind, group, rows=50, k=128, n=40, count=6, seed=0, by_outputs=False):
    """Return rows, and the parts of random matrices whose products have unit scale."""
    random = np.random.default_rng(seed)
    x, matrices = (jnp.asarray(random.standard_normal(shape, np.float32)) for shape in ((rows, k), (count, k, n)))
    values, scales = jax.vmap(lambda matrix: quantize(matrix * k**-0.5, kind, group))(matrices)
    return x, *(each.swapaxes(1, 2) if by_outputs else each for each in (values, scales))


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
            "w8a8, by outputs-bfloat16-xla",
            "int4, by outputs, groups of 32-float32-xla",
            "fp8, blocks of 128 × 8, more groups than rows-bfloat16-triton",
            "int4, many rows-bfloat16-mosaic_tpu",
        ],
    ),
)
def test_implementations_give_what_the_reference_gives(case, dtype, implementation):
    check(OPERATION, case, dtype, implementation)


@pytest.mark.parametrize("kind, group", STORED)
def test_a_row_has_the_bits_of_its_own_numbers(kind, group):
    """On a CPU: whatever the other rows are, NaN among them; with matrices by their outputs in tiles of 2 rows or more,
    and with rows whose groups are empty beside them."""
    own, values, scales = drawn(kind, group, 5, by_outputs=True)
    own_groups, found, random = np.array([3, 3, 5, 0, 4]), set(), np.random.default_rng(1)
    run = jax.jit(xla.quantized_product, static_argnames=("kind", "by_outputs", "tile"))
    for trial in range(12):
        rows, tile = (33, 200)[trial % 2], (2, 8, 64)[trial % 3]
        groups = np.concatenate([own_groups, random.integers(0, 6, rows - 5)])
        x = np.concatenate([own, random.standard_normal((rows - 5, 128)).astype(np.float32)])
        x[5 + trial] = np.nan
        order = np.lexsort((random.random(rows), groups))
        sizes = jnp.asarray(np.bincount(groups, minlength=6), jnp.int32)
        y = np.asarray(run(jnp.asarray(x[order]), values, scales, sizes, kind=kind, by_outputs=True, tile=tile))
        assert np.isnan(y).any(axis=1).sum() == 1
        found.add(y[np.argsort(order)[:5]].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("implementation", ["reference", "xla", *OPERATION.implementations])
def test_rows_past_the_last_group_are_zeros_and_have_no_gradient(implementation):
    x, values, scales = drawn("int8", None)
    sizes = jnp.asarray(SIZES, jnp.int32)

    def product(x):
        return quantized_grouped_matmul(x, values, scales, sizes, kind="int8", implementation=implementation)

    with interpreted():
        y, pull_back = jax.vjp(product, x)
        (d_x,) = pull_back(jnp.ones_like(y))
    assert not y[43:].any() and not d_x[43:].any()
    matrices = np.asarray(jax.vmap(lambda *parts: dequantize(*parts, "int8"))(values, scales), np.float64)
    group = np.repeat(np.arange(6), SIZES)
    np.testing.assert_allclose(
        y[:43], np.einsum("rk,rkn->rn", np.asarray(x, np.float64)[:43], matrices[group]), atol=1e-5
    )
    np.testing.assert_allclose(d_x[:43], matrices[group].sum(axis=2), atol=1e-5)


@pytest.mark.parametrize("kind, group", STORED[:4])
def test_no_program_has_the_numbers_of_all_matrices(kind, group):
    """A tile's own matrix is converted, block by block."""
    x, values, scales = drawn(kind, group, 16, 128, 64, 40, by_outputs=True)

    def product(x, values, scales, sizes):
        return quantized_grouped_matmul(x, values, scales, sizes, kind=kind, by_outputs=True)

    text = jax.jit(product).lower(x, values, scales, jnp.zeros(40, jnp.int32)).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"(?:f32|bf16|s32)\[([\d,]+)\]", text)}
    assert max(np.prod(shape) for shape in shapes) < 2 * 128 * 64  # of 40


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sizes": jnp.zeros(6)}, "sizes are float32.6.; they must be int32.6."),
        ({"sizes": jnp.full(6, 10, jnp.int32)}, "sizes add up to 60, and x has 50 rows"),
        ({"values": jnp.ones((64, 8), jnp.int8)}, r"values of int8 are int8.64, 8.; they must be int8 \[·, ·, ·\]"),
        ({"scales": jnp.ones((5, 1, 8))}, "5 scales are of 6 matrices; both must be as many"),
        ({"scales": jnp.ones((6, 3, 8))}, "3 × 8 scales do not divide a matrix of 64 inputs and 8 outputs"),
        ({"x": jnp.ones((50, 32))}, r"x has shape \[50, 32\]; it must be \[R, 64\], as matrices have 64 inputs"),
        ({"x": jnp.ones((50, 64), jnp.int32)}, "x is int32; it must be of floating point"),
        ({"kind": "int3"}, "there is no kind 'int3'"),
        ({"implementation": "cutlass"}, "there is no implementation 'cutlass'; there are reference, xla"),
    ],
)
def test_bad_input_is_refused(changes, said):
    values, scales = jnp.ones((6, 64, 8), jnp.int8), jnp.ones((6, 1, 8))
    arguments = {"x": jnp.ones((50, 64)), "values": values, "scales": scales, "sizes": jnp.asarray(SIZES, jnp.int32)}
    with pytest.raises(ValueError, match=f"quantized_grouped_matmul: {said}"):
        quantized_grouped_matmul(**(arguments | {"kind": "int8"} | changes))
