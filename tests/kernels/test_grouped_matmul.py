"""The product of groups of rows: what a row and a matrix's gradient depend on, and bad input."""

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from machine_code import kernel_runs
from markers import ELSEWHERE

from jaxlm.lowering import hlo, loops
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
    """On a CPU, with matrices [N, K]: whatever the other rows are, in tiles of 2 rows or more, and in each length of a
    tile."""
    (own, matrices, _), random = drawn(5, 96, 70, 16, dtype=dtype), np.random.default_rng(1)
    own_groups, found = np.array([3, 3, 7, 0, 15]), set()
    run = jax.jit(xla.product, static_argnames=("transposed", "tile"))
    for trial in range(200):
        rows, tile = int(random.choice([5, 33, 200])), (2, 8, 32, 96, 256)[trial % 5]
        groups = np.concatenate([own_groups, random.integers(0, 16, rows - 5)])
        x = np.concatenate([own, random.standard_normal((rows - 5, 96))]).astype(own.dtype)
        order = np.lexsort((random.random(rows), groups))
        sizes = jnp.asarray(np.bincount(groups, minlength=16), jnp.int32)
        with jax.set_mesh(meshes.make()):
            y = np.asarray(run(jnp.asarray(x[order]), matrices, sizes, transposed=True, tile=tile))
        found.add(y[np.argsort(order)[:5]].tobytes())
    assert len(found) == 1


@ELSEWHERE
@pytest.mark.slow
def test_what_a_row_and_a_matrix_depend_on_in_the_machine_code_of_hopper(monkeypatch):
    """Emulated: groups that share tiles, that are empty, that end in the middle of a tile; NaN, and other rows.

    The kernels are in the matrix of `test_machine_code`, against the reference; here are their promises, to the bit.
    """
    kernel_runs.on("H100", monkeypatch)
    x, matrices, d_y = drawn(k=64, n=64, dtype=jnp.bfloat16)

    @jax.jit
    def run(*arguments):
        return results_and_gradients("mosaic_gpu", *arguments)

    def of(x, d_y, sizes=SIZES):
        return [np.asarray(each, np.float32) for each in run(x, matrices, d_y, jnp.asarray(sizes, jnp.int32))]

    y, d_x, d_matrices = clean = of(x, d_y)
    wide_x, wide_d_y = (np.asarray(each, np.float64) for each in (x, d_y))
    end = 0
    for group, size in enumerate(SIZES):
        own, end = slice(end, end + size), end + size
        wanted = wide_d_y[own].T @ wide_x[own]
        # One rounding to bfloat16, of numbers whose terms may cancel.
        np.testing.assert_allclose(d_matrices[group], wanted, rtol=2**-8, atol=1e-5)
        assert d_matrices[group].view(np.uint32).any() == (size > 0)
    assert not y[end:].any() and not d_x[end:].any()

    spoilt = np.array([20, 49])  # of group 2, which has one row, and past all groups
    y, d_x, d_matrices = of(x.at[spoilt].set(jnp.nan), d_y.at[spoilt].set(jnp.nan))
    for got, right in ((y, clean[0]), (d_x, clean[1])):
        assert np.flatnonzero(np.isnan(got).any(1)).tolist() == [20]
        np.testing.assert_array_equal(np.delete(got, 20, 0), np.delete(right, 20, 0))
    assert np.isnan(d_matrices[2]).all()
    np.testing.assert_array_equal(np.delete(d_matrices, 2, 0), np.delete(clean[2], 2, 0))

    # The last five rows of group 5 move to the front of it, behind others of group 4: in another place of a tile.
    other = drawn(seed=1, k=64, n=64, dtype=jnp.bfloat16)
    moved_x, moved_d_y = (mine.at[3:8].set(own[38:43]) for mine, own in ((other[0], x), (other[2], d_y)))
    y, d_x, d_matrices = of(moved_x, moved_d_y, [0, 0, 1, 0, 2, 5])
    chex.assert_trees_all_equal((y[3:8], d_x[3:8]), (clean[0][38:43], clean[1][38:43]))
    np.testing.assert_allclose(d_matrices[5], clean[2][5], rtol=2**-7, atol=1e-5)  # summed in other places of a step


@pytest.mark.exhaustive
@pytest.mark.parametrize("transposed", [False, True])
def test_the_hopper_kernels_race_with_nothing(transposed):
    """On an emulated block: races, deadlocks, barriers passed too often or too rarely, and NaN where nothing was
    copied. There are more steps than slots in the ring, and rows of a tile that two warpgroups put zeros into."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    sizes = [100, 330]
    x, matrices, d_y = drawn(440, 384, 128, 2, dtype=jnp.bfloat16)
    matrices = matrices if transposed else matrices.swapaxes(1, 2)
    options = dict(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    with interpreted("mosaic_gpu", **options):
        made = results_and_gradients(None, x, matrices, d_y, sizes, transposed)
    assert not interpret_pallas_call.get_races().races_found
    x, matrices, d_y = (each.astype(jnp.float32) for each in (x, matrices, d_y))
    wanted = results_and_gradients("reference", x, matrices, d_y, sizes, transposed)
    for got, want in zip(made, wanted, strict=True):
        # One rounding to bfloat16, of numbers whose terms may cancel.
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    "k, n, dtype, reason",
    [
        (64, 64, "float32", "it multiplies bfloat16 and float16, not float32"),
        (40, 64, "bfloat16", "matrices of 40 × 64 numbers are not both ways a multiple of 64"),
        (64, 24, "bfloat16", "matrices of 64 × 24 numbers are not both ways a multiple of 64"),
    ],
)
@interpreted()
def test_what_the_hopper_kernels_do_not_serve_is_refused_with_the_reason(k, n, dtype, reason):
    x, matrices, _ = drawn(k=k, n=n, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"mosaic_gpu cannot serve this call: {reason}"):
        grouped_matmul(x, matrices, jnp.asarray(SIZES, jnp.int32), transposed=True, implementation="mosaic_gpu")


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


def test_a_tile_multiplies_as_many_rows_as_its_group_needs():
    """On a CPU, by a branch for each length."""
    x, matrices, _ = drawn(1024, 64, 32, 16)
    product = jax.jit(lambda *operands: grouped_matmul(*operands, transposed=True))
    with jax.set_mesh(meshes.make()):
        compiled = product.lower(x, matrices, jax.ShapeDtypeStruct((16,), jnp.int32)).compile()
    program = hlo.parse(compiled.as_text(), trips=1)
    instructions = [each for part in program.computations.values() for each in part.instructions.values()]
    assert {each.arrays[0].shape[0] for each in instructions if each.opcode == "dot"} == {32, 64, 96}
    assert loops.program_flops(program) == 2 * 96 * 64 * 32


def test_each_length_of_a_tile_gives_the_product_and_its_gradients():
    """On a CPU, in tiles of 96 rows: of no group's rows but its own, also beside NaNs."""
    sizes, end = [0, 33, 1, 190, 76], 300  # of 310 rows
    x, matrices, d_y = drawn(310, 40, 24, 5)
    dirty = x.at[end:].set(np.nan), matrices, d_y.at[end:].set(np.nan)
    with jax.set_mesh(meshes.make()):
        y, d_x, d_matrices = (np.asarray(each) for each in results_and_gradients("xla", *dirty, sizes))
    of_reference = results_and_gradients("reference", x, matrices, d_y, sizes)
    for found, expected in zip((y[:end], d_x[:end], d_matrices), of_reference, strict=True):
        np.testing.assert_allclose(found, expected[: len(found)], atol=5e-5)


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
