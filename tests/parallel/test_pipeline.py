"""A pipeline of stages: its schedule, and steps on it, which have the numbers of one device."""

import re

import jax
import meshes
import model_fixtures
import numpy as np
import pytest

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.models import tree as model_tree
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.ticks import Ticks
from jaxlm.training.checkpoints import Checkpoints, restore_state
from jaxlm.training.step import TrainStep

SIZES = range(1, 17)


def simulated(ticks, forward, backward):
    """Return the time of a step in which each stage does what the schedule says, when its inputs are there."""
    done, free, last = {}, [0.0] * ticks.stages, ticks.stages - 1
    for tick in range(ticks.passes + ticks.alone):
        for stage in range(ticks.stages):
            for index, name, seconds in (
                (ticks.forward(stage, tick), "forward", forward),
                (ticks.backward(stage, tick), "backward", backward),
            ):
                if index is None:
                    continue
                if name == "forward":
                    needs = [("forward", index, stage - 1)] if stage else []
                else:
                    needs = [("forward", index, stage)] + [("backward", index, stage + 1)] * (stage < last)
                free[stage] = max([free[stage], *(done[each] for each in needs)]) + seconds
                done[name, index, stage] = free[stage]
    assert len(done) == 2 * ticks.stages * ticks.microbatches
    return max(free)


@pytest.mark.parametrize("stages", SIZES)
def test_the_closed_form_of_a_step_is_its_simulation(stages):
    """Each pass waits for what it reads, and no stage does two things at once."""
    for ticks in (Ticks(stages, microbatches) for microbatches in SIZES):
        for forward, backward in ((1, 1), (1, 2)):
            assert simulated(ticks, forward, backward) == ticks.passes * (forward + backward)
            assert ticks.bubble == pytest.approx(1 - ticks.microbatches / ticks.passes)


@pytest.mark.parametrize("stages", SIZES)
def test_a_kept_input_is_read_before_another_takes_its_place(stages):
    ticks = Ticks(stages, 3 * stages)
    for stage in range(stages):
        held = {}
        for tick in range(ticks.passes + ticks.alone):
            if (index := ticks.forward(stage, tick)) is not None:
                assert held.setdefault(index % ticks.kept, index) == index
            if (index := ticks.backward(stage, tick)) is not None:
                assert held.pop(index % ticks.kept) == index
        assert not held


def model(**changes):
    return model_fixtures.model(**{"num_layers": 4, **changes})


FAMILIES = {"llama": model_fixtures.LLAMA, "gemma": model_fixtures.GEMMA, "mixture": model_fixtures.MIXTURE}


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        (Layout(pipeline=2), 8),
        (Layout(pipeline=4), 4),
        (Layout(pipeline=2, data=2, fsdp=2), 2),
        (Layout(pipeline=2, fsdp=2, tensor=2), 4),
        (Layout(pipeline=4, tensor=2), 1),
        (Layout(pipeline=2, expert=2, context=2), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [4, 5])
def test_losses_and_gradients_are_those_of_one_device(family, layers, layout, microbatches, remat):
    """Rows hold several documents; of five layers some stages have one less, or the first is of another kind."""
    of_family = model(**FAMILIES[family], num_layers=layers)
    expected_loss, expected = model_fixtures.first_gradients(of_family, meshes.make())
    mesh = make_mesh(layout)
    loss, gradients = model_fixtures.first_gradients(of_family, mesh, microbatches=microbatches, remat=remat)
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_is_that_of_one_device(family):
    def evaluated(mesh, microbatches):
        of_family = model(**FAMILIES[family], num_layers=5)
        with jax.set_mesh(mesh):
            sections = model_fixtures.sections(microbatches=microbatches)
            steps = model_fixtures.jitted(of_family, sections, mesh, model_fixtures.optimization())
            batch = put_batch(model_fixtures.batch(), mesh)
            return jax.device_get(steps.evaluate(model_fixtures.placed(of_family, mesh), batch))

    loss, count = evaluated(make_mesh(Layout(pipeline=2, fsdp=2)), 2)
    expected_loss, expected_count = evaluated(meshes.make(), 1)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert count == expected_count


@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [4, 5])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path, layers):
    mesh, of_layers = make_mesh(Layout(pipeline=2, data=2, fsdp=2)), model(num_layers=layers)
    sections, optimizer = model_fixtures.sections(microbatches=2, dropout=0.1), model_fixtures.optimization()
    steps = TrainStep(of_layers, *sections, optimizer)
    batches = [model_fixtures.batch(seed=seed) for seed in range(3)]
    with jax.set_mesh(mesh):
        programs, placed = steps.jitted(mesh), [put_batch(each, mesh) for each in batches]
        state, _ = programs.train(programs.begin(model_fixtures.placed(of_layers, mesh)), placed[0])
        with Checkpoints(tmp_path, 1) as saved:
            saved.save(state, None)
        like = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
        restored = restore_state(tmp_path, 1, like)
        for batch in placed[1:]:
            state, _ = programs.train(state, batch)
            restored, _ = programs.train(restored, batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))


def compiled(layout, rows, microbatches, **changes):
    """Return the compiled step of a float32 model."""
    mesh, sections = make_mesh(layout), model_fixtures.sections(batch=rows, microbatches=microbatches)
    steps = TrainStep(model(**changes), *sections, model_fixtures.optimization())
    state = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    with jax.set_mesh(mesh):
        batch = put_batch(model_fixtures.batch(rows), mesh)
        return steps.jitted(mesh).train.lower(state, batch).compile()


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_number_of_microbatches():
    of_8, of_32 = (compiled(Layout(pipeline=4), n, n, d_model=128).memory_analysis() for n in (8, 32))
    assert of_32.temp_size_in_bytes == pytest.approx(of_8.temp_size_in_bytes, rel=0.01)
    assert of_32.argument_size_in_bytes > of_8.argument_size_in_bytes


@pytest.mark.exhaustive
def test_loops_have_the_ticks_of_the_schedule_and_no_branch():
    text = compiled(Layout(pipeline=4), 8, 8).as_text()
    trips = re.findall(r'body=%?([\w.\-]+).*?"known_trip_count":\{"n":"(\d+)"', text)
    permutes = {}
    for body, n in trips:
        computation = re.search(rf"^%?{re.escape(body)} .*?^}}", text, re.M | re.S)[0]
        if count := len(re.findall(r" collective-permute(?:-start)?\(", computation)):
            permutes[int(n), count] = permutes.get((int(n), count), 0) + 1
            assert " conditional(" not in computation
    assert permutes == {(3, 1): 2, (8, 2): 1}


def test_what_a_pipeline_does_not_run_is_refused_in_a_line():
    mesh = make_mesh(Layout(pipeline=2))
    with pytest.raises(InputError, match=r"execution.dtype = 'bfloat16'.* set float32"):
        model_fixtures.jitted(model(), model_fixtures.sections(dtype="bfloat16"), mesh, model_fixtures.optimization())
    mixed = model_fixtures.model(model_fixtures.MIXED)
    with pytest.raises(InputError, match=r"layers of one structure that follow one another.* set mesh.pipeline to 1"):
        model_fixtures.jitted(mixed, model_fixtures.sections(), mesh, model_fixtures.optimization())
    for changes, key in (({"norms_every": 1}, "records.norms_every"),):
        experiment = model_fixtures.experiment(model())
        experiment = experiment.model_copy(update={"records": experiment.records.model_copy(update=changes)})
        with pytest.raises(InputError, match=key):
            config.check_layout(experiment, Layout(pipeline=2))
