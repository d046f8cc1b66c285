"""Replicas that train by themselves, and the outer optimizer over them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
import runs
from matrices import sampled
from workload_fixtures import workload

from jaxlm import config
from jaxlm.config import mesh_layout
from jaxlm.core.errors import InputError
from jaxlm.costs import local_shapes
from jaxlm.costs.counted import memory, operations, traffic
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.lowering import collectives, hlo
from jaxlm.models import tree as model_tree
from jaxlm.parallel.batches import put_batch
from jaxlm.training.checkpoints import Checkpoints, restore_state
from jaxlm.training.config import LocalSGDConfig
from jaxlm.training.step import TrainStep

# Where the mean of the replicas' steps is the step by the mean of their gradients.
PLAIN = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 1e9}
AVERAGES = {"period": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
MODEL = model_fixtures.model(num_layers=2)


@functools.cache
def _steps(mesh, local: tuple, optimizer: tuple, changes: tuple) -> tuple:
    sections = model_fixtures.sections(**dict(changes), local_sgd=dict(local) or None)
    optimization = model_fixtures.optimization(**dict(optimizer))
    steps = TrainStep(MODEL, *sections, optimization, replicas=mesh.shape["data"])
    with jax.set_mesh(mesh):
        return steps, steps.jitted(mesh)


def steps_of(mesh, local=None, optimizer=None, **changes):
    """Return a step and its programs, which are compiled once."""
    return _steps(mesh, *(tuple((each or {}).items()) for each in (local, optimizer, changes)))


def batches(count: int, whole: bool = False) -> list[dict]:
    """Return batches whose rows have as many targets as one another where they are `whole`."""
    made = [model_fixtures.batch(seed=seed) for seed in range(count)]
    for each in made if whole else ():
        each["segments"][:], each["positions"][:] = 1, np.arange(model_fixtures.CONTEXT)
    return made


def train(mesh, rows, local=None, optimizer=None, state=None, first=0, **changes):
    """Train on batches, with a step of the outer optimizer after each period. Return the metrics and the last state."""
    _, programs = steps_of(mesh, local, optimizer, **changes)
    measured = []
    with jax.set_mesh(mesh):
        state = programs.begin(model_fixtures.placed(MODEL, mesh)) if state is None else state
        for step, host in enumerate(rows, first + 1):
            state, metrics = programs.train(state, put_batch(host, mesh))
            if local and step % local["period"] == 0:
                state = programs.outer(state)
            measured.append(jax.device_get(metrics))
    return measured, state


@pytest.mark.parametrize(
    ("sizes", "microbatches"),
    sampled(
        [
            pytest.param((2, 1, 1), 1),
            pytest.param((4, 1, 1), 2),
            pytest.param((2, 2, 2), 1),
            pytest.param((2, 2, 1), 2),
        ],
        ["(2, 1, 1)-1"],
    ),
)
def test_replicas_that_meet_after_each_step_train_as_one(sizes, microbatches):
    mesh, rows = meshes.make(*sizes), batches(3, whole=True)
    expected, whole = train(mesh, rows, optimizer=PLAIN, microbatches=microbatches)
    measured, state = train(mesh, rows, AVERAGES, PLAIN, microbatches=microbatches)
    for each, of_whole in zip(measured, expected, strict=True):
        assert each.keys() == of_whole.keys()
        assert each["loss"] == pytest.approx(of_whole["loss"], rel=1e-5)
        for name in ("tokens", "learned_tokens", "learning_rate", "skipped"):
            assert each[name] == of_whole[name]
    model_fixtures.assert_same_numbers(jax.device_get(state.parameters), jax.device_get(whole.parameters), 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", model_fixtures.OPTIMIZERS)
def test_a_replica_trains_as_a_model_on_its_own_rows(kind):
    mesh, rows = meshes.make(2, 2), batches(1)[0]
    _, state = train(mesh, [rows], {"period": 2}, {"kind": kind})
    for replica in range(2):
        own = jax.tree.map(lambda x, i=replica: np.split(x, 2)[i], rows)
        of_half = model_fixtures.sections(batch=4), [own], meshes.make(), model_fixtures.optimization(kind=kind)
        _, alone = model_fixtures.run_steps(MODEL, *of_half)
        found = jax.tree.map(lambda x, i=replica: x[i], jax.device_get(state.local.parameters))
        model_fixtures.assert_same_numbers(found, alone.parameters, 1e-4)


def test_replicas_part_and_meet_where_the_outer_optimizer_leads_them():
    """Nesterov's momentum as PyTorch has it, of the mean of what replicas moved by."""
    mesh, settings = meshes.make(2), {"period": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    _, programs = steps_of(mesh, settings)
    rows = iter(batches(4))
    with jax.set_mesh(mesh):
        state = programs.begin(model_fixtures.placed(MODEL, mesh))
        momentum = jax.tree.map(np.zeros_like, jax.device_get(state.parameters))
        for _ in range(2):
            begun = jax.device_get(state.parameters)
            for _ in range(2):
                state, _ = programs.train(state, put_batch(next(rows), mesh))
            each = jax.device_get(state.local.parameters)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.parameters), begun)
            first, second = (jax.tree.map(lambda x, i=i: x[i], each) for i in range(2))
            assert all(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))
            state = programs.outer(state)
            gradient = jax.tree.map(lambda x, a, b: x - (a + b) / 2, begun, first, second)
            momentum = jax.tree.map(lambda m, g: np.float32(0.9) * m + g, momentum, gradient)
            led = jax.tree.map(
                lambda x, g, m: x - np.float32(0.7) * (g + np.float32(0.9) * m), begun, gradient, momentum
            )
            model_fixtures.assert_same_numbers(jax.device_get(state.parameters), led, 1e-6)
            model_fixtures.assert_same_numbers(jax.device_get(state.local.momentum), momentum, 1e-6)
            for own, outer in zip(*map(jax.tree.leaves, (state.local.parameters, state.parameters)), strict=True):
                np.testing.assert_array_equal(own, np.broadcast_to(outer, own.shape))


def test_a_step_that_is_not_finite_on_one_replica_is_skipped_on_all():
    mesh, settings = meshes.make(2), {"period": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    _, programs = steps_of(mesh, settings)
    with jax.set_mesh(mesh):
        state = programs.begin(model_fixtures.placed(MODEL, mesh))
        broken = jax.tree.map(lambda x: x.at[1].set(jnp.nan), state.working or state.local.parameters)
        state = state._replace(local=state.local._replace(parameters=broken))
        kept = jax.device_get(state.local.parameters)
        state, metrics = programs.train(state, put_batch(batches(1)[0], mesh))
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.local.parameters), kept)


def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path):
    """In the midst of a period, with each replica's own parameters and moments."""
    mesh, settings = meshes.make(2), {"period": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    steps, _ = steps_of(mesh, settings)
    rows = batches(5)
    _, state = train(mesh, rows[:3], settings)
    with jax.set_mesh(mesh), Checkpoints(tmp_path, 1) as saved:
        saved.save(state, None)
    _, state = train(mesh, rows[3:], settings, state=state, first=3)
    like = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    _, resumed = train(mesh, rows[3:], settings, state=restore_state(tmp_path, 3, like), first=3)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(state))
    four = meshes.make(4)
    steps, _ = steps_of(four, settings)
    like = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(four))
    with pytest.raises(InputError, match="is of 2 replicas of training.local_sgd, and the mesh has 4: set mesh.data=2"):
        restore_state(tmp_path, 3, like)


def crossing(compiled, mesh) -> list[collectives.CompiledCollective]:
    found = collectives.collectives(hlo.parse(compiled.as_text()), dict(mesh.shape))
    return [each for each in found if "data" in each.axes]


@pytest.mark.parametrize("sizes", sampled([(2, 1, 1), (2, 2, 2)], ["(2, 1, 1)"]), ids=str)
def test_parameters_cross_once_in_a_period_and_numbers_of_metrics_in_a_step(sizes):
    mesh, settings = meshes.make(*sizes), {"period": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    steps, programs = steps_of(mesh, settings)
    state = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    with jax.set_mesh(mesh):
        batch = put_batch(batches(1)[0], mesh)
        step, outer = programs.train.lower(state, batch).compile(), programs.outer.lower(state).compile()
    assert all(each.kind == "all-reduce" and each.bytes <= 64 for each in crossing(step, mesh))
    layout = meshes.layout(*sizes)
    work = replace(workload("train", MODEL, 8, 32), layout=layout, local_sgd=LocalSGDConfig(**settings))
    (counted,) = (each for each in traffic.collectives(work) if "data" in each.axes)
    assert (counted.kind, counted.times, counted.axes) == ("all-reduce", 1 / 2, ("data",))
    sent = crossing(outer, mesh)
    assert sum(each.count * each.bytes for each in sent) == counted.bytes and {each.kind for each in sent} == {
        "all-reduce"
    }


def test_a_plan_counts_the_outer_step_and_what_replicas_keep():
    target, layout = Target.parse("tpu-v5e:2*2x2"), meshes.layout(2, 4)
    whole = workload("train", config.load("llama3.2-1b").model, 8, 1024, remat="full", layout=layout)
    local = replace(whole, local_sgd=LocalSGDConfig(period=10))
    plans = [plan(each, target) for each in (whole, local)]
    assert plans[0].flops == plans[1].flops
    numbers = sum(local_shapes.stored(whole, d.axes, d.shape) for d in whole.parameters.values())
    kept = [memory.trained(each.work).optimizer for each in plans]
    assert kept[1] - kept[0] == 8 * numbers
    row = plans[1].row()["outer_step"]
    assert row["replicas"] == 2 and row["bytes"] == 4 * numbers
    exposed = [each.time.parts["exposed all-reduce over data"].seconds for each in plans]
    assert 0 < exposed[1] < exposed[0] and plans[1].time.expected < plans[0].time.expected
    products = [[op.flops for op in operations.step(each.work)] for each in plans]
    assert products[0] == products[1]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["training.ema_decay=0.9"], "training.ema_decay averages the parameters of each step"),
        (["records.norms_every=5"], "records.norms_every looks at one model"),
        (["mesh.pipeline=2"], "training.local_sgd is of whole models: leave it out, or set mesh.pipeline to 1"),
        (["training.local_sgd.outer_momentum=1.0"], "outer_momentum"),
    ],
)
def test_what_replicas_do_not_do_is_refused_in_a_line(overrides, line):
    with pytest.raises(InputError, match=line) as refused:
        config.load("quickstart", ["training.local_sgd.period=5", "mesh.fsdp=1", *overrides])
    assert "\n" not in str(refused.value)


def test_one_replica_is_refused_in_a_line():
    experiment = config.load("quickstart", ["training.local_sgd.period=5"])
    with pytest.raises(InputError, match="trains a replica for each shard of mesh.data, and there is 1: set it to"):
        mesh_layout.layout(experiment, 2)
    assert mesh_layout.layout(config.load("quickstart", ["training.local_sgd.period=5", "mesh.data=2"]), 2)["data"] == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_is_killed_in_a_period_ends_in_the_bits_of_one_that_is_not(tmp_path):
    settings = ("training.local_sgd.period=7", "training.steps=40", "mesh.data=2", "checkpoint.every=5")
    text = tmp_path / "text"
    text.mkdir()
    path = runs.write_config(text, *settings, "evaluation.every=10")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    runs.finish(runs.start(path, whole, devices=2))
    for step in (9, 23):
        process = runs.start(path, killed, devices=2)
        runs.wait_for_step(process, killed, step)
        process.kill()
        process.communicate()
    runs.finish(runs.start(path, killed, devices=2))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert runs.losses(killed, name) == runs.losses(whole, name)
