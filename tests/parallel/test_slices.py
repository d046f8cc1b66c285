"""Several slices of a TPU: which axes cross the network between them, in plans and in compiled programs."""

import jax
import jax.numpy as jnp
import model_fixtures
import pytest
from matrices import sampled
from test_traffic import elsewhere, training_step

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.placement import say_slices
from jaxlm.lowering import collectives, hlo, targets
from jaxlm.models import tree as model_tree
from jaxlm.parallel.batches import PER_TOKEN
from jaxlm.parallel.layout import AXES, OVER_SLICES, Layout, over_slices
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.partition import named_sharding
from jaxlm.training.step import TrainStep

TWO = Target.parse("tpu-v5e:2*2x2")


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis not in OVER_SLICES])
def test_other_axes_are_refused(axis):
    with pytest.raises(InputError, match="does not divide over 2 slices: these axes alone may cross") as refused:
        over_slices(Layout({axis: 8}), 2)
    assert "\n" not in str(refused.value)
    assert over_slices(Layout({"data": 2, axis: 4}), 2)["data"] == 2


def test_plan_and_compile_refuse_what_a_mesh_refuses():
    experiment = config.load("quickstart", ["training.batch=32"])
    for command in (api.plan, api.compile):
        with pytest.raises(InputError, match="does not divide over 2 slices"):
            command(experiment, str(TWO), mesh="fsdp=1,tensor=8")


def test_parameters_that_cross_in_every_layer_are_said():
    assert say_slices(TWO, Layout(data=2, fsdp=4)) is None
    assert say_slices(Target.parse("tpu-v5e:4x4"), Layout(fsdp=16)) is None
    said = say_slices(TWO, Layout(fsdp=8))
    assert said.startswith("mesh.fsdp = 8 crosses the network between 2 slices in every layer")
    assert said.endswith("with mesh.data=2") and "\n" not in said


def test_a_search_takes_meshes_that_may_cross():
    experiment = config.load("quickstart", ["training.batch=32"])
    plans, _ = api.plan(experiment, str(TWO), mesh="auto")
    assert plans and all(over_slices(each.work.layout, 2).size == 2 for each in plans)


def test_a_sum_over_slices_and_within_them_crosses_in_parts():
    """Each of the n devices of a slice sends one part of n to the other slices."""
    network, size = Network(TWO, Layout(data=2, fsdp=4)), 1e12  # bytes, for which latency is negligible
    once = network.seconds("all-reduce", size, "data")
    assert once == network.seconds_between_domains("all-reduce", size)
    assert once == 2 * (size / 2) / TWO.chip.figure("scale_out_bytes_per_s")
    assert network.seconds("all-reduce", size, ("data", "fsdp")) == max(
        network.seconds_between_domains("all-reduce", size / 4), network.seconds("all-reduce", size, "fsdp")
    )


@elsewhere
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    sampled(
        [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "tensor": 2}, {"pipeline": 2, "fsdp": 2, "tensor": 2}],
        ["{'data': 4, 'tensor': 2}"],
    ),
    ids=str,
)
def test_only_gradients_and_stages_cross_between_slices_of_a_compiled_program(sizes):
    """Gradients are summed within each slice and then across, once a step; all groups of devices are within a slice.
    Between stages go activations, in each tick."""
    mesh = make_mesh(Layout(sizes), targets.devices(TWO))
    program, outer = training_step(mesh, "bfloat16", num_layers=4), over_slices(Layout(sizes), 2)
    found = collectives.collectives(program, dict(mesh.shape), outer)
    crossing = [each for each in found if each.crosses_slices]
    within = [each for each in found if not each.crosses_slices]
    crosses = {axis for axis, over in outer.items() if over > 1}
    assert {axis for each in crossing for axis in each.axes} == crosses < {"pipeline", "data"}
    assert {axis for each in within for axis in each.axes} == {a for a, n in mesh.shape.items() if n > outer[a]}
    assert not [each for each in found if "data" in each.axes and each.in_loop]
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if collectives.kind_of(instruction):
                assert collectives.groups(instruction, 4).max() < 4
    kinds = {each.kind for each in crossing}
    if "pipeline" in crosses:
        assert kinds == {"all-reduce", "collective-permute"}
        return
    # Each device of a slice sends a part of the sum of its slice; XLA pads them.
    assert kinds == {"all-reduce"}
    numbers = model_tree.parameter_count(model_fixtures.model(num_layers=4))
    sent = sum(each.count * each.bytes for each in crossing if each.dtype == "f32") / 4
    assert numbers / 4 <= sent <= 8 * numbers / 4


@elsewhere
@pytest.mark.exhaustive
@pytest.mark.slow
def test_replicas_that_train_by_themselves_send_parameters_once_in_a_period():
    """In a step two tiles of numbers cross, for its metrics; in the outer step each device's part of the parameters."""
    layout = Layout(data=2, fsdp=2, tensor=2)
    mesh, model = make_mesh(layout, targets.devices(TWO)), model_fixtures.model(num_layers=2)
    sections = model_fixtures.sections(
        local_sgd={"period": 2}, batch=32, dtype="bfloat16", kernels="xla", microbatches=2
    )
    steps = TrainStep(model, *sections, model_fixtures.optimization(), replicas=2)
    state = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    lies = named_sharding(("batch", "sequence"), (32, model_fixtures.CONTEXT), mesh)
    batch = {name: jax.ShapeDtypeStruct((32, model_fixtures.CONTEXT), jnp.int32, sharding=lies) for name in PER_TOKEN}
    sent = []
    with jax.set_mesh(mesh):
        programs = steps.jitted(mesh)
        for lowered in (programs.train.lower(state, batch), programs.outer.lower(state)):
            program = hlo.parse(lowered.compile().as_text())
            found = collectives.collectives(program, dict(mesh.shape), over_slices(layout, 2))
            sent.append([each for each in found if each.crosses_slices])
    in_step, outer = (sum(each.count * each.bytes for each in found) for found in sent)
    assert {each.kind for found in sent for each in found} == {"all-reduce"}
    assert in_step <= 1024 and outer >= 4 * model_tree.parameter_count(model) / 4
