"""A pipeline of stages: its schedule, and steps on it, which have the numbers of one device."""

import re

import jax
import meshes
import model_fixtures
import numpy as np
import pytest
from matrices import sampled

from jaxlm.config import mesh_layout
from jaxlm.core.errors import InputError
from jaxlm.models import tree as model_tree
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.ticks import Ticks, moves
from jaxlm.training.checkpoints import Checkpoints, restore_state
from jaxlm.training.step import TrainStep

SIZES = range(1, 17)


def schedules(stages):
    """Return the schedules of so many stages, of all microbatches and rounds up to 16."""
    several = SIZES if stages > 1 else (1,)
    return [Ticks(stages, m, rounds) for m in SIZES for rounds in several if rounds == 1 or m % stages == 0]


def work_of(ticks, stage, tick):
    """Return what a stage does in a tick: its direction, the microbatch and the chunk, in the order of layers."""
    forward, back = ticks.item_forward(stage, tick), ticks.item_back(stage, tick)
    done = []
    if 0 <= forward < ticks.items:
        done.append(("forward", ticks.microbatch(forward), ticks.round_forward(forward) * ticks.stages + stage))
    if 0 <= back < ticks.items:
        done.append(("backward", ticks.microbatch(back), ticks.round_back(back) * ticks.stages + stage))
    return done


def simulated(ticks, forward, backward):
    """Return the time of a step in which each stage does what the schedule says, when its inputs are there."""
    done, free, last = {}, [0.0] * ticks.stages, ticks.stages * ticks.rounds - 1
    for tick in range(ticks.ticks):
        for stage in range(ticks.stages):
            for name, index, chunk in work_of(ticks, stage, tick):
                if name == "forward":
                    needs, seconds = [("forward", index, chunk - 1)] if chunk else [], forward
                else:
                    seconds = backward
                    needs = [("forward", index, chunk)] + [("backward", index, chunk + 1)] * (chunk < last)
                free[stage] = max([free[stage], *(done[each] for each in needs)]) + seconds
                done[name, index, chunk] = free[stage]
    assert len(done) == 2 * ticks.stages * ticks.rounds * ticks.microbatches
    return max(free)


@pytest.mark.parametrize("stages", SIZES)
def test_the_closed_form_of_a_step_is_its_simulation(stages):
    """Each pass through a chunk waits for what it reads, and no stage does two things at once."""
    for ticks in schedules(stages):
        assert simulated(ticks, 1, 2) == ticks.passes * (1 + 2)
        assert ticks.bubble == pytest.approx(1 - ticks.rounds * ticks.microbatches / ticks.passes)


@pytest.mark.parametrize("stages", SIZES)
def test_phases_have_the_ticks_in_which_the_ends_of_the_model_have_work(stages):
    for ticks in schedules(stages):
        spans = [span for times, of_phase in ticks.phases for span in of_phase * times]
        each = [span for span in spans for _ in range(span.ticks)]
        assert len(each) == ticks.ticks
        assert sum(span.goes_forward for span in each) == sum(span.goes_back for span in each) == ticks.passes
        # What enters the first stage is computed a tick ahead, once before the first; what leaves it, a tick later.
        assert 1 + sum(span.goes_forward and span.at_ends for span in each) == ticks.at_ends
        assert 1 + sum(span.goes_back and span.at_ends for span in each) == ticks.at_ends
        for tick, span in enumerate([*each, None]):
            first, last = 0, ticks.stages * ticks.rounds - 1
            before = work_of(ticks, 0, tick - 1)
            if any((name, chunk) == ("backward", first) for name, _, chunk in before):
                assert span is None or (span.goes_back and span.at_ends)
            if span is None:
                continue
            entering = [chunk for name, _, chunk in work_of(ticks, 0, tick + 1) if name == "forward"]
            assert first not in entering or (span.goes_forward and span.at_ends)
            ended = [work for work in work_of(ticks, stages - 1, tick) if work[2] == last]
            both = span.goes_forward and span.goes_back and span.at_ends
            assert ended == ([(name, ended[0][1], last) for name in ("forward", "backward")] if both else [])


@pytest.mark.parametrize("stages", SIZES)
def test_a_kept_input_is_read_before_another_takes_its_place(stages):
    for ticks in (Ticks(stages, 3 * stages, rounds) for rounds in SIZES):
        assert ticks.kept == Ticks(stages, 6 * stages, ticks.rounds).kept == (ticks.rounds + 1) * stages - 1
        for stage in range(stages):
            held = {}
            for tick in range(ticks.ticks):
                item = ticks.item_forward(stage, tick)
                if 0 <= item < ticks.items:
                    assert held.setdefault(ticks.places[item], item) == item
                item = ticks.item_back(stage, tick)
                if 0 <= item < ticks.items:
                    assert held.pop(ticks.places[ticks.as_forward(item)]) == ticks.as_forward(item)
            assert not held


@pytest.mark.parametrize("stages", SIZES)
def test_moves_bring_each_chunk_to_the_stage_that_runs_it(stages):
    for rounds in SIZES:
        runs = {}
        for pairs, taken, placed in moves(stages, rounds):
            assert sorted(sender for sender, _ in pairs) == sorted(to for _, to in pairs) == list(range(stages))
            runs |= {(to, placed[to]): sender * rounds + taken[sender] for sender, to in pairs}
        assert runs == {(chunk % stages, chunk // stages): chunk for chunk in range(stages * rounds)}


def model(**changes):
    return model_fixtures.model(**{"num_layers": 4, **changes})


FAMILIES = {"llama": model_fixtures.LLAMA, "gemma": model_fixtures.GEMMA, "mixture": model_fixtures.MIXTURE}


LAYOUTS = [
    pytest.param(layout, microbatches, rounds, gather, id=f"{layout}, {microbatches}, {rounds} rounds, {gather}")
    for layout, microbatches, rounds, gather in (
        (Layout(pipeline=2), 8, 2, "tick"),
        (Layout(pipeline=4), 4, 1, "tick"),
        (Layout(pipeline=2, data=2, fsdp=2), 2, 2, "step"),
        (Layout(pipeline=2, fsdp=2, tensor=2), 4, 1, "tick"),
        (Layout(pipeline=4, tensor=2), 1, 1, "tick"),
        (Layout(pipeline=2, expert=2, context=2), 2, 3, "step"),
    )
]


@pytest.mark.parametrize("remat", sampled(["none", "full"], ["none"]))
@pytest.mark.parametrize(
    ("layout", "microbatches", "rounds", "gather"), sampled(LAYOUTS, lambda layout, *_: layout["data"] > 1)
)
@pytest.mark.parametrize("family", sampled(FAMILIES, ["llama"]))
@pytest.mark.parametrize("layers", sampled([4, 5], ["4"]))
def test_losses_and_gradients_are_those_of_one_device(family, layers, layout, microbatches, rounds, gather, remat):
    """Rows hold several documents; of five layers some chunks have one less, or the first is of another kind."""
    of_family = model(**FAMILIES[family], num_layers=layers)
    expected_loss, expected = model_fixtures.first_gradients(of_family, meshes.make())
    mesh = make_mesh(layout)
    changes = {"microbatches": microbatches, "remat": remat, "pipeline_rounds": rounds, "pipeline_gather": gather}
    loss, gradients = model_fixtures.first_gradients(of_family, mesh, **changes)
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_is_that_of_one_device(family):
    def evaluated(mesh, microbatches, rounds=1):
        of_family = model(**FAMILIES[family], num_layers=5)
        with jax.set_mesh(mesh):
            sections = model_fixtures.sections(microbatches=microbatches, pipeline_rounds=rounds)
            steps = model_fixtures.jitted(of_family, sections, mesh, model_fixtures.optimization())
            batch = put_batch(model_fixtures.batch(), mesh)
            return jax.device_get(steps.evaluate(model_fixtures.placed(of_family, mesh), batch))

    expected_loss, expected_count = evaluated(meshes.make(), 1)
    for rounds in (1, 2):
        loss, count = evaluated(make_mesh(Layout(pipeline=2, fsdp=2)), 4, rounds)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        assert count == expected_count


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layers", "rounds"), [(4, 1), (5, 1), (4, 2)])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path, layers, rounds):
    mesh, of_layers = make_mesh(Layout(pipeline=2, data=2, fsdp=2)), model(num_layers=layers)
    sections = model_fixtures.sections(microbatches=2, dropout=0.1, pipeline_rounds=rounds)
    optimizer = model_fixtures.optimization()
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


def compiled(layout, microbatches, rounds, **changes):
    """Return the compiled step of a float32 model, of a row in each microbatch."""
    mesh = make_mesh(layout)
    sections = model_fixtures.sections(batch=microbatches, microbatches=microbatches, pipeline_rounds=rounds)
    steps = TrainStep(model(**changes), *sections, model_fixtures.optimization())
    state = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    with jax.set_mesh(mesh):
        batch = put_batch(model_fixtures.batch(microbatches), mesh)
        return steps.jitted(mesh).train.lower(state, batch).compile()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rounds", [1, 2])
def test_memory_does_not_grow_with_the_number_of_microbatches(rounds):
    of_8, of_32 = (
        compiled(Layout(pipeline=4), n, rounds, d_model=128, num_layers=8).memory_analysis() for n in (8, 32)
    )
    assert of_32.temp_size_in_bytes == pytest.approx(of_8.temp_size_in_bytes, rel=0.01)
    assert of_32.argument_size_in_bytes > of_8.argument_size_in_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stages", "microbatches", "rounds"), [(4, 8, 1), (4, 8, 2), (4, 12, 3), (8, 8, 2)])
def test_loops_have_the_ticks_of_the_schedule_and_no_branch(stages, microbatches, rounds):
    """A stage sends one array in each forward pass, and one in each backward pass."""
    text = compiled(Layout(pipeline=stages), microbatches, rounds, num_layers=stages * rounds).as_text()
    computations = {
        name: body for name, body in re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^}", text, re.M | re.S)
    }

    def permutes(name, in_loop):
        """Return how many arrays are sent in the loops of a computation, or in all of it."""
        body = computations[name]
        sent = in_loop * len(re.findall(r" collective-permute(?:-start)?\(", body))
        assert not sent or " conditional(" not in body
        for line in body.splitlines():
            if loop := re.search(r'body=%?([\w.\-]+).*?"known_trip_count":\{"n":"(\d+)"', line):
                sent += int(loop[2]) * permutes(loop[1], True)
        return sent

    (entry,) = re.findall(r"^ENTRY %?([\w.\-]+) ", text, re.M)
    assert permutes(entry, False) == 2 * Ticks(stages, microbatches, rounds).passes


def test_what_a_pipeline_does_not_run_is_refused_in_a_line():
    mesh = make_mesh(Layout(pipeline=2))
    with pytest.raises(InputError, match=r"execution.dtype = 'bfloat16'.* set float32"):
        model_fixtures.jitted(model(), model_fixtures.sections(dtype="bfloat16"), mesh, model_fixtures.optimization())
    mixed = model_fixtures.model(model_fixtures.MIXED)
    with pytest.raises(InputError, match=r"layers of one structure that follow one another.* set mesh.pipeline to 1"):
        model_fixtures.jitted(mixed, model_fixtures.sections(), mesh, model_fixtures.optimization())
    mesh_layout.check_layout(model_fixtures.experiment(model(), microbatches=4, pipeline_rounds=2), Layout(pipeline=4))
    with pytest.raises(InputError, match=r"set training.microbatches to 4, or execution.pipeline_rounds to 1"):
        mesh_layout.check_layout(
            model_fixtures.experiment(model(), microbatches=2, pipeline_rounds=2), Layout(pipeline=4)
        )
    both = r"= 2, which go .*, and 4 microbatches of 3 shards do not divide training.batch = 16: set training.micro"
    with pytest.raises(InputError, match=both + "batches to 4 and training.batch to 24$"):
        few = model_fixtures.experiment(model(), batch=16, microbatches=2, pipeline_rounds=2)
        mesh_layout.check_layout(few, Layout(pipeline=4, data=3))
    for key, value, axis in (
        ("pipeline_rounds", 2, "pipeline"),
        ("pipeline_gather", "step", "pipeline"),
        ("context_parallel", "ring", "context"),
    ):
        with pytest.raises(InputError, match=rf"^execution.{key} = {value} needs mesh.{axis} above 1: "):
            mesh_layout.layout(model_fixtures.experiment(model(), **{key: value}), 1)
    for changes, key in (({"norms_every": 1}, "records.norms_every"),):
        experiment = model_fixtures.experiment(model())
        experiment = experiment.model_copy(update={"records": experiment.records.model_copy(update=changes)})
        with pytest.raises(InputError, match=key):
            mesh_layout.check_layout(experiment, Layout(pipeline=2))
