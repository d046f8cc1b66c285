"""A mixture's FLOPs, counted and in jaxprs: of the most tiles that there may be, and of a measured load."""

import math
from dataclasses import replace

import engine_jaxprs
import expert_tiles
import jax
import model_fixtures
import numpy as np
import pytest
from workload_fixtures import sections_of, workload

from jaxlm.costs.counted import operations
from jaxlm.costs.counted.flops import expert_rows
from jaxlm.costs.jaxpr.count import count
from jaxlm.training.step import TrainStep
from kernels_pallas.grouped_matmul import visits, xla

BATCH, TOKENS, CHOSEN, EXPERTS = 3, 41, 3, 8
ROWS = BATCH * TOKENS * CHOSEN
TILE = xla.tile_rows(ROWS, EXPERTS)


def mixture(layers):
    """Return a model of a dense layer and mixtures."""
    return model_fixtures.model(model_fixtures.MIXTURE, num_layers=layers, context_length=64)


def step(model, **changes):
    """Return a training step of a model, and its workload."""
    work = workload("train", model, BATCH, TOKENS, dtype="float32", kernels="xla", **changes)
    return TrainStep(model, *sections_of(work), work.optimizer), work


def batch():
    ids = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (BATCH, TOKENS), dtype=np.int32)
    positions = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), ids.shape)
    return {"tokens": ids, "targets": ids, "segments": np.ones_like(ids), "positions": positions}


@pytest.mark.parametrize("remat", ["none", "full", ("up",)], ids=str)
def test_a_training_step_has_the_counted_flops_of_the_most_tiles(remat):
    steps, work = step(mixture(3), remat=remat)
    most = expert_tiles.most_trips(ROWS, EXPERTS)
    found = count(steps.train, jax.eval_shape(steps.init), batch(), trips=most)
    assert found.matmul_flops == expert_tiles.executed(operations.step(work), work.model, {ROWS})
    with pytest.raises(ValueError, match="does not say how often its while loop in scope .*tiles_of"):
        count(steps.train, jax.eval_shape(steps.init), batch(), trips={"pages": 3})


def test_a_training_step_has_the_counted_flops_of_a_measured_load(monkeypatch):
    """The tiles are those that a step walks over."""
    steps, work = step(mixture(2))
    measured, of_groups = set(), visits.of_groups

    def watched(sizes, rows, tile, alignment, after=0):
        walk = of_groups(sizes, rows, tile, alignment, after)
        name = xla.loop_name(tile, after)
        jax.debug.callback(lambda tiles: measured.add((name, int(tiles))), walk.count)
        return walk

    monkeypatch.setattr(visits, "of_groups", watched)
    jax.clear_caches()  # of operations that another test has traced
    jax.block_until_ready(jax.jit(steps.train)(steps.init(), batch()))
    jax.effects_barrier()
    trips, most = dict(measured), expert_tiles.most_trips(ROWS, EXPERTS)
    assert len(measured) == len(most) and all(0 < trips[name] < most[name] for name in most)
    monkeypatch.undo()
    jax.clear_caches()
    found = count(steps.train, jax.eval_shape(steps.init), batch(), trips=trips)
    assert found.matmul_flops == expert_tiles.executed(operations.step(work), work.model, {ROWS}, trips)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_engine_s_steps_have_the_counted_flops_of_the_most_tiles(kind):
    model = mixture(3)
    work = workload(kind, model, 3, 64, dtype="float32", kernels="xla", page=32, chunk_tokens=64)
    found = sum(each.matmul_flops for each in engine_jaxprs.costs(work))
    rows = {CHOSEN * shape.rows for shape in engine_jaxprs.shapes(work)}
    assert found == expert_tiles.executed(operations.step(work), model, rows)


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("rows, groups, tile", [(0, 4, 8), (3, 4, 8), (4, 4, 8), (11, 4, 8), (100, 7, 32), (9, 1, 6)])
def test_no_sizes_need_more_tiles_than_the_most(rows, groups, tile, after):
    draw = np.random.default_rng(0)
    sizes = draw.multinomial(rows, draw.dirichlet(np.ones(groups), 300).mean(0), 300)
    some = min(rows // (after + 1), groups)
    worst = np.array([after + 1] * some + [0] * (groups - some))
    worst[0] += (rows - worst.sum()) // tile * tile
    needed = [sum(-(-max(size - after, 0) // tile) for size in each) for each in (*sizes, worst)]
    assert max(needed[:-1]) <= needed[-1] == visits.most_tiles(rows, groups, tile, after)


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize(
    "tokens, choices, groups, multiplied, tile",
    [(200, 3, 8, 8, 16), (7, 2, 12, 12, 4), (64, 8, 128, 128, 2), (50, 4, 4, 4, 8), (200, 4, 16, 3, 16)],
)
def test_expected_and_most_rows_are_those_of_drawn_loads(tokens, choices, groups, multiplied, tile, is_aligned):
    """The mean of 400 loads is off by at most four of its standard errors; where tiles lie at their multiples, also by
    2 %, since groups do not begin anywhere in a tile with equal probability."""
    draw, alignment = np.random.default_rng(0), tile if is_aligned else 1
    computed = []
    for _ in range(400):
        chosen = draw.random((tokens, groups)).argsort(axis=1)[:, :choices]
        sizes = np.bincount(chosen.ravel(), minlength=groups)[:multiplied]
        first = (end := sizes.cumsum()) - sizes
        tiles = np.where(sizes > 0, -(-(end - first // alignment * alignment) // tile), 0)
        computed.append(tile * tiles.sum())
    rows = visits.computed_rows(tokens, choices, groups, tile, is_aligned, multiplied)
    error = 4 * np.std(computed) / 20 + (0.02 * tokens * choices if is_aligned else 1e-9)
    assert abs(np.mean(computed) - rows.expected) <= error
    assert max(computed) <= rows.most


@pytest.mark.parametrize("lengths", [(), (4, 8, 16), (8, 16)])
def test_expected_rows_are_those_of_the_least_length_of_each_tile(lengths):
    """The mean over the sizes of a group, each with its probability."""
    tokens, chance = 60, 0.25
    sizes = np.arange(tokens + 1)
    ways = np.array([math.comb(tokens, n) for n in sizes], float)
    probability = ways * chance**sizes * (1 - chance) ** (tokens - sizes)
    last = np.array([min((n for n in (0, *(lengths or (16,))) if n >= size % 16), default=16) for size in sizes])
    rows = visits.computed_rows(tokens, 1, 4, 16, is_aligned=False, lengths=lengths)
    np.testing.assert_allclose(rows.expected, 4 * np.sum(probability * (sizes // 16 * 16 + last)), rtol=1e-9)


@pytest.mark.parametrize("platform, kernels, tile", [("cpu", "xla", TILE), ("gpu", "auto", 64), ("tpu", "auto", 128)])
def test_a_plan_has_the_rows_of_experts(platform, kernels, tile):
    _, work = step(mixture(3))
    rows = expert_rows(replace(work.with_execution(kernels=kernels), platform=platform))
    assert rows.rows == ROWS and rows.tile == tile and rows.rows <= rows.expected <= rows.most
    assert expert_rows(step(model_fixtures.model())[1]) is None
