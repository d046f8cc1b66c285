"""The tiles of scores that TPU attention visits: exactly the unmasked ones, from one list per call."""

import functools
from importlib.metadata import version

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launches import launches
from matrices import sampled
from packaging.version import Version
from test_choice import V5E
from test_flash_attention import drawn

from kernels_pallas import flash_attention
from kernels_pallas.core import interpreted
from kernels_pallas.core.attention.key_range import clipped
from kernels_pallas.flash_attention import (
    KeyRange,
    causal,
    intersection,
    mosaic_tpu,
    packed,
    sliding_window,
    tile_schedule,
)
from kernels_pallas.flash_attention.tile_schedule import PARTS, ScheduledTile

QUERIES, KEYS = 8, 16
_MARKED = (1 << tile_schedule._MARKS) - 1


def _tiles(start, end, columns):
    """Return the dense mask cut into tiles and their parts, [B, rows, columns, parts, queries, keys of a part]."""
    (B, T), S = start.shape, columns * KEYS
    unmasked = (start[..., None] <= np.arange(S)) & (np.arange(S) < end[..., None])
    unmasked = np.pad(unmasked, ((0, 0), (0, -T % QUERIES), (0, 0)))
    return unmasked.reshape(B, -1, QUERIES, columns, PARTS, KEYS // PARTS).transpose(0, 1, 3, 4, 2, 5)


def test_an_unmasked_tile_is_visited_once_and_each_block_of_queries_at_least_once():
    """Compare with the dense mask, for random intervals, some of them empty."""
    T, S = 50, 70
    low, high = np.random.default_rng(0).integers(0, S + 1, (2, 40, T)).astype(np.int32)
    # Tiles that are fully unmasked, and blocks of queries that attend to nothing.
    low[:20], high[:20] = low[:20, :1], S
    high[:10, 13:37] = 0
    tiles = _tiles(low, np.where(low < high, high, 0), -(-S // KEYS))
    some, whole = tiles.any((-1, -2)), tiles.all((-1, -2))
    make = functools.partial(tile_schedule.schedule_tiles, queries=QUERIES, keys=KEYS, columns=-(-S // KEYS))
    known, late = make(low, high), jax.jit(make)(low, high)
    assert known.steps == late.steps == known.tiles.shape[1]
    chex.assert_trees_all_equal(known.tiles, late.tiles[:, : known.steps])

    for b, listed in enumerate(known.tiles):
        at = ScheduledTile(listed)
        marked = (listed & _MARKED) != 0
        count = marked.sum()
        place = list(zip(at.outer, at.inner, strict=True))
        assert np.all(marked[:count]) and place[count:] == [place[count - 1]] * (len(place) - count)
        place, opens, closes = place[:count], at.is_first[:count], at.is_last[:count]
        assert place == sorted(set(place))
        outer = at.outer[:count]
        assert set(outer) == set(range(some.shape[1]))
        assert list(opens) == [i == 0 or outer[i] != outer[i - 1] for i in range(count)]
        assert list(closes) == [i == count - 1 or outer[i] != outer[i + 1] for i in range(count)]
        computed, unmasked = np.zeros_like(some[b]), np.zeros_like(some[b])
        for here, *bits in zip(place, at.computed, at.unmasked, strict=False):
            computed[here], unmasked[here] = (each >> np.arange(PARTS) & 1 for each in bits)
        # Where queries of one block attend to intervals far apart, the tiles between them are computed as well.
        assert np.all(computed >= some[b]) and np.all(unmasked <= whole[b])
    assert np.any(ScheduledTile(known.tiles).unmasked) and np.any(known.tiles[:, -1] & _MARKED == 0)


@pytest.mark.exhaustive
@interpreted()
def test_more_blocks_than_a_tile_can_name_are_split():
    """The block number in a tile would overflow to a negative number, even with few unmasked tiles."""
    x = jax.ShapeDtypeStruct((1, (tile_schedule.MAX_OUTER + 1) * 128, 1, 16), jnp.float32)

    def attend(x):
        return flash_attention(x, x, x, key_range=sliding_window(x.shape[1], 5), implementation="mosaic_tpu")

    steps = [kernel["grid_mapping"].grid[3] for kernel in launches(jax.make_jaxpr(attend)(x).jaxpr)]
    assert steps == [tile_schedule.MAX_OUTER + 1, tile_schedule.MAX_OUTER]  # two for each block, except the very first


def test_sequences_with_the_same_mask_share_a_list():
    see = clipped(causal(100), 3, 100, 100)
    tiles, steps = tile_schedule.schedule_tiles(see.start[0], see.end[0], 10, 20, 5)
    assert tiles.shape == (1, steps) and steps == 2 * (1 + 2 + 3 + 4 + 5)


def _grids(key_range, T):
    """Return the steps over tiles of each kernel of a loss and its gradient, lowered for a TPU; "late" if known at run
    time.
    """
    arrays = [jax.ShapeDtypeStruct((1, T, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]

    def loss(*arrays):
        return jnp.sum(flash_attention(*arrays, key_range=key_range(), implementation="mosaic_tpu").astype(jnp.float32))

    mesh = jax.sharding.AbstractMesh((1,), ("one",), (jax.sharding.AxisType.Auto,), abstract_device=V5E)
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    found = {kernel["name"]: kernel["grid_mapping"].grid[3] for kernel in launches(program.jaxpr)}
    steps = (found[f"flash_attention_{name}"] for name in ("forward", "gradients"))
    return [size if isinstance(size, int) else "late" for size in steps]


def test_the_grid_has_a_step_for_each_unmasked_tile():
    """At 8192 with tiles of 512 × 1024: 128 steps without a mask."""
    T = 8192
    assert _grids(lambda: None, T) == [128, 128]
    assert _grids(lambda: causal(T), T) == [72, 72]
    assert _grids(lambda: sliding_window(T, 511), T) == [23, 23]
    assert _grids(lambda: packed(jnp.zeros((1, T), jnp.int32)), T) == ["late"] * 2


@interpreted()
def test_masks_known_while_tracing_and_later_give_the_same():
    query, key, value = drawn((2, 300, 2, 16), (2, 300, 1, 16), (2, 300, 1, 16))
    ids = np.repeat([[0, 0, 1, 1, 1, -1], [2, 3, 3, 3, 3, 3]], 50, axis=1)
    known = KeyRange(*map(np.asarray, intersection(causal(300), packed(ids))))

    # By the emitters that users have: those of the tests' quick code round the two programs otherwise.
    has_flag = Version(version("jaxlib")) < Version("0.11")

    @functools.partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": True} if has_flag else None)
    def results_and_gradients(arrays, key_range=known):
        def loss(arrays):
            out = flash_attention(*arrays, key_range=key_range, implementation="mosaic_tpu")
            return jnp.sum(jnp.sin(out)), out

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    arrays = query, key, value
    chex.assert_trees_all_equal(results_and_gradients(arrays), results_and_gradients(arrays, known))


@pytest.mark.parametrize("maps", sampled(["both", "arrays", "mask"], ["both"]))
@interpreted()
def test_masks_known_later_are_mapped(maps):
    """`jax.vmap` maps over masks, each with its own number of steps, or uses one mask for all."""
    axes = {"both": (0, 0), "arrays": (0, None), "mask": (None, 0)}[maps]
    arrays = tuple(drawn((3, 1, 200, 2, 16), (3, 1, 200, 1, 16), (3, 1, 200, 1, 16)))
    ids = jnp.asarray(np.array([[0] * 4, [0, 1, 2, -1], [0, 1, 1, 1]]).repeat(50, axis=1)[:, None], jnp.int32)
    if axes[0] is None:
        arrays = tuple(x[1] for x in arrays)
    if axes[1] is None:
        ids = ids[1]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, arrays, ids):
        def loss(arrays, ids):
            see = intersection(causal(200), packed(ids))
            out = flash_attention(*arrays, key_range=see, implementation=implementation)
            return jnp.sum(jnp.sin(out)), out

        return jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=axes)(arrays, ids)

    chex.assert_trees_all_close(*(run(name, arrays, ids) for name in ("mosaic_tpu", "reference")), rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", [(1, 1, 1, 640), (2, 2, 520, 640), None], ids=str)
@interpreted()
def test_a_list_that_is_too_long_is_split(constant, bias):
    """Split by queries forward, by keys backward: the same numbers, the same FLOPs."""
    arrays = drawn((2, 520, 2, 16), (2, 640, 1, 16), (2, 640, 1, 16), *([bias] if bias else []))
    options = dict(key_range=sliding_window(520, 300, offset=100), soft_cap=5.0, return_log_sum_exp=True)

    def run():
        def loss(arrays):
            query, key, value, *bias = arrays
            given = dict(bias=bias[0] if bias else None, implementation="mosaic_tpu")
            results = flash_attention(query, key, value, **options, **given)
            return sum(jnp.sum(jnp.sin(x)) for x in results), results

        def results_and_gradients(arrays):
            return jax.value_and_grad(loss, has_aux=True)(arrays)

        flops = [kernel["cost_estimate"].flops for kernel in launches(jax.make_jaxpr(results_and_gradients)(arrays))]
        return jax.jit(results_and_gradients)(arrays), flops

    whole, flops = run()
    constant(tile_schedule, "MAX_TILES", 10)
    in_halves, of_halves = run()
    assert len(flops) == 2 < len(of_halves) and sum(flops) == sum(of_halves)
    # float32 sums in another order, where XLA fuses differently.
    chex.assert_trees_all_close(in_halves, whole, rtol=1e-5, atol=1e-5)


@interpreted()
def test_gradients_of_more_keys_than_vmem_holds_come_from_several_kernels(constant):
    """Each adds its part of the queries' gradient to that of the kernels before it."""
    arrays = drawn((1, 50, 2, 16), (1, 200, 1, 16), (1, 200, 1, 16))

    def run():
        def loss(arrays):
            return jnp.sum(jnp.sin(flash_attention(*arrays, key_range=see, implementation="mosaic_tpu")))

        see = causal(50, offset=150)
        gradient = jax.grad(loss)
        return jax.jit(gradient)(arrays), [kernel["name"] for kernel in launches(jax.make_jaxpr(gradient)(arrays))]

    whole, once = run()
    constant(mosaic_tpu, "_granted", lambda: 0)
    in_parts, kernels = run()
    assert once == ["flash_attention_forward", "flash_attention_gradients"]
    assert kernels == ["flash_attention_forward", *["flash_attention_gradients"] * 2]
    chex.assert_trees_all_close(in_parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", [(3, 1, 16, 16), (1, 2, 1, 16)], ids=str)
@interpreted()
def test_lists_of_many_sequences_are_split_by_sequences(constant, bias):
    """Each sequence has another mask, all of it in one tile."""
    arrays = drawn((3, 16, 2, 16), (3, 16, 1, 16), (3, 16, 1, 16), *([bias] if bias else []))
    ids = jnp.asarray(np.arange(16) // np.arange(3, 6)[:, None], jnp.int32)

    def run():
        def loss(arrays, ids):
            query, key, value, *bias = arrays
            given = dict(bias=bias[0] if bias else None, implementation="mosaic_tpu")
            see = intersection(causal(16), packed(ids))
            results = flash_attention(query, key, value, key_range=see, return_log_sum_exp=True, **given)
            return sum(jnp.sum(jnp.sin(x)) for x in results), results

        results_and_gradients = jax.value_and_grad(loss, has_aux=True)
        kernels = [kernel["name"] for kernel in launches(jax.make_jaxpr(results_and_gradients)(arrays, ids).jaxpr)]
        return jax.jit(results_and_gradients)(arrays, ids), len(kernels)

    whole, once = run()
    constant(tile_schedule, "MAX_TILES", 2)
    in_halves, times = run()
    assert (once, times) == (2, 2 * 3)
    chex.assert_trees_all_close(in_halves, whole, rtol=1e-5, atol=1e-5)
