"""The product of groups of rows: what a row and a matrix's gradient depend on, and bad input."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import grouped_matmul
from kernels_pallas.core import interpreted
from kernels_pallas.grouped_matmul import visits, xla

IMPLEMENTATIONS = ["reference", "xla", "triton", "mosaic_tpu"]
SIZES = [0, 20, 1, 0, 17, 5]  # of 50 rows


def drawn(rows=50, k=40, n=24, groups=6, seed=0, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    shapes = (rows, k), (groups, n, k), (rows, n)
    return [jnp.asarray(random.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


def results_and_gradients(implementation, x, matrices, d_y, sizes, transposed=True):
    sizes = jnp.asarray(sizes, jnp.int32)

    def product(x, matrices):
        return grouped_matmul(x, matrices, sizes, transposed=transposed, implementation=implementation)

    with interpreted() if implementation in ("triton", "mosaic_tpu") else jax.named_scope("compiled"):
        y, pull_back = jax.vjp(product, x, matrices)
        return y, *pull_back(d_y)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [SIZES, [0] * 6, [50, 0, 0, 0, 0, 0], [8, 8, 8, 8, 8, 10]], ids=str)
def test_it_is_the_product_in_float64(implementation, sizes):
    x, matrices, d_y = drawn()
    y, d_x, d_matrices = (np.asarray(each) for each in results_and_gradients(implementation, x, matrices, d_y, sizes))
    x, matrices, d_y = (np.asarray(each, np.float64) for each in (x, matrices, d_y))
    end = 0
    for group, size in enumerate(sizes):
        own, end = slice(end, end + size), end + size
        np.testing.assert_allclose(y[own], x[own] @ matrices[group].T, atol=2e-5)
        np.testing.assert_allclose(d_x[own], d_y[own] @ matrices[group], atol=2e-5)
        np.testing.assert_allclose(d_matrices[group], d_y[own].T @ x[own], atol=2e-5)
    assert not y[end:].any() and not d_x[end:].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_reaches_its_own_row_and_its_own_matrix_alone(implementation):
    x, matrices, d_y = drawn()
    clean = results_and_gradients(implementation, x, matrices, d_y, SIZES)
    for row, group in ((20, 2), (0, 1), (42, 5), (49, None)):  # the last is past all groups
        y, d_x, d_matrices = results_and_gradients(implementation, x.at[row].set(np.nan), matrices, d_y, SIZES)
        assert set(np.flatnonzero(np.isnan(y).any(1))) == ({row} if group is not None else set())
        others = np.delete(np.arange(50), row)
        chex.assert_trees_all_equal((y[others], d_x), (clean[0][others], clean[1]))
        rest = [each for each in range(6) if each != group]
        chex.assert_trees_all_equal(d_matrices[np.array(rest)], clean[2][np.array(rest)])
        assert group is None or np.isnan(d_matrices[group]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradient_of_a_matrix_without_rows_has_no_bit(implementation):
    *_, d_matrices = results_and_gradients(implementation, *drawn(), SIZES)
    bits = np.asarray(d_matrices).view(np.uint32)
    assert [bool(each.any()) for each in bits] == [size > 0 for size in SIZES]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_surroundings_and_tiles(dtype):
    """On a CPU, with matrices [N, K]: whatever the other rows are, and in tiles of 2 rows or more."""
    (own, matrices, _), random = drawn(5, 96, 70, 16, dtype=dtype), np.random.default_rng(1)
    own_groups, found = np.array([3, 3, 7, 0, 15]), set()
    run = jax.jit(xla.product, static_argnames=("transposed", "tile"))
    for trial in range(200):
        rows, tile = int(random.choice([5, 33, 200])), (2, 8, 32, 128)[trial % 4]
        groups = np.concatenate([own_groups, random.integers(0, 16, rows - 5)])
        x = np.concatenate([own, random.standard_normal((rows - 5, 96))]).astype(own.dtype)
        order = np.lexsort((random.random(rows), groups))
        sizes = jnp.asarray(np.bincount(groups, minlength=16), jnp.int32)
        y = np.asarray(run(jnp.asarray(x[order]), matrices, sizes, transposed=True, tile=tile))
        found.add(y[np.argsort(order)[:5]].tobytes())
    assert len(found) == 1


def test_tiles_cover_each_row_of_a_group_once():
    sizes = jnp.asarray(SIZES, jnp.int32)
    for tile in (2, 8, 64):
        for alignment in {1, 2, tile}:
            walk = visits.of_groups(sizes, 50, tile, alignment)
            count, covered = int(walk.count), []
            assert count <= visits.most_visits(50, 6, tile) == len(walk.group)
            for group, start in zip(walk.group[:count].tolist(), walk.start[:count].tolist(), strict=True):
                begin, end = int(walk.begin[group]), int(walk.end[group])
                covered += range(max(start, begin), min(start + tile, end))
            assert covered == list(range(43))


def test_only_tiles_with_rows_are_computed():
    """The loop's trips are known at run time; no product has all rows, or all matrices."""
    x, matrices, _ = drawn(512, 64, 32, 64)
    sizes = jnp.zeros(64, jnp.int32).at[5].set(512)
    compiled = jax.jit(lambda *a: grouped_matmul(*a, transposed=True)).lower(x, matrices, sizes).compile()
    assert compiled.cost_analysis()["flops"] < 3 * 2 * xla.tile_rows(512, 64) * 64 * 32


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sizes": jnp.zeros(6)}, "sizes are float32.6.; they must be int32.6."),
        ({"sizes": jnp.zeros(5, jnp.int32)}, "sizes are int32.5.; they must be int32.6."),
        ({"sizes": jnp.asarray([1, -2, 0, 0, 0, 0], jnp.int32)}, "sizes.1. = -2; no group has fewer than 0 rows"),
        ({"sizes": jnp.full(6, 10, jnp.int32)}, "sizes add up to 60, and x has 50 rows"),
        (
            {"matrices": jnp.ones((6, 40, 24))},
            r"x is float32.50, 40. and matrices are float32.6, 40, 24.; they must be",
        ),
        ({"matrices": jnp.ones((6, 24, 40), jnp.bfloat16)}, "of one dtype"),
        ({"x": jnp.ones((50, 40), jnp.int32)}, "x is int32; it must be of floating point"),
        ({"transposed": 1}, "transposed = 1; it must be True or False"),
        ({"implementation": "cutlass"}, "there is no implementation 'cutlass'; there are reference, xla, triton"),
    ],
)
def test_bad_input_is_refused(changes, said):
    x, matrices, _ = drawn()
    arguments = {"x": x, "matrices": matrices, "sizes": jnp.asarray(SIZES, jnp.int32), "transposed": True} | changes
    with pytest.raises(ValueError, match=said):
        grouped_matmul(**arguments)
