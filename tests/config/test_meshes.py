"""The mesh of an experiment, and what it divides."""

import meshes
import pytest
from config_fixtures import SMALL

from jaxlm.config import load, mesh_layout
from jaxlm.config.mesh_layout import check_layout, divided_by_mesh
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.parameters import parameters
from jaxlm.parallel.rules import TRAIN


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        ([], 1, (1, 1, 1)),
        ([], 8, (1, 8, 1)),
        (["mesh.data=2", "mesh.tensor=2"], 8, (2, 2, 2)),
        (["mesh.data=2", "mesh.tensor=4"], 8, (2, 1, 4)),
        (["mesh.data=4", "mesh.fsdp=2"], 8, (4, 2, 1)),
        (["mesh.fsdp=2"], 8, (1, 2, 1)),  # fewer than there are
        (["mesh.fsdp=all", "mesh.tensor=8"], 16, (1, 2, 8)),
        # The width is 256: fsdp has the most devices that divide it, and data the others.
        ([], 3, (3, 1, 1)),
        ([], 6, (3, 2, 1)),
        ([], 512, (2, 256, 1)),
        (["mesh.tensor=2"], 12, (3, 2, 2)),
    ],
)
def test_the_mesh_factors_the_devices(mesh, devices, sizes):
    experiment = load(SMALL, [*mesh, f"training.batch={devices}"])
    assert mesh_layout.layout(experiment, devices) == meshes.layout(*sizes)


def test_a_line_says_that_fewer_devices_shard_the_model():
    experiment = load(SMALL)
    said = mesh_layout.say_layout(experiment, mesh_layout.layout_of_any_batch(experiment, 6))
    assert said == "mesh.fsdp = 6 does not divide model.d_model = 256: the mesh has mesh.data=3 mesh.fsdp=2"
    assert mesh_layout.say_layout(experiment, mesh_layout.layout_of_any_batch(experiment, 8)) is None


@pytest.mark.parametrize(
    ("overrides", "devices", "says"),
    [
        (["mesh.tensor=8"], 12, ["mesh.tensor = 8 does not divide 12 devices"]),
        (["mesh.data=2", "mesh.tensor=4"], 4, ["mesh.data × mesh.tensor = 8", "4 devices", "mesh.fsdp"]),
        (["mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2"], 8, ["16 devices, and there are 8; lower"]),
        (["mesh.fsdp=2"], 1, ["2 devices, and there is 1; lower"]),
        (["mesh.fsdp=3"], 3, ["mesh.fsdp = 3 does not divide model.d_model = 256: set mesh.data=3 mesh.fsdp=1"]),
        (["mesh.fsdp=6"], 6, ["mesh.fsdp = 6 does not divide model.d_model = 256: set mesh.data=3 mesh.fsdp=2"]),
        (["mesh.data=2"], 6, ["mesh.fsdp = 3 does not divide model.d_model = 256: set mesh.data=3 mesh.fsdp=2"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(overrides, devices, says):
    with pytest.raises(InputError) as refused:
        mesh_layout.layout(load(SMALL, overrides, None), devices)
    said = str(refused.value)
    assert "\n" not in said and not [part for part in says if part not in said], said


@pytest.mark.parametrize(
    ("overrides", "sizes", "key"),
    [
        ([], (1, 1, 16), "model.attention.num_heads = 8"),
        (["model.feed_forward.d_ff=772"], (1, 1, 8), "model.feed_forward.d_ff = 772"),
        (["model.vocab_size=4100"], (1, 1, 8), "model.vocab_size = 4100"),
        ([], (1, 6, 1), "model.d_model = 256"),
    ],
)
def test_a_mesh_divides_heads_feed_forward_vocabulary_and_width(overrides, sizes, key):
    experiment = load(SMALL, overrides)
    check_layout(experiment, meshes.layout())
    with pytest.raises(InputError) as refused:
        check_layout(experiment, meshes.layout(*sizes))
    assert key in str(refused.value)


def test_only_training_asks_that_a_mesh_divides_the_rows_of_a_microbatch():
    overrides = ["training.batch=7", "training.microbatches=2", "mesh.data=4"]
    with pytest.raises(InputError, match="training.microbatches = 2 does not divide training.batch = 7"):
        load(SMALL, overrides)
    experiment = load(SMALL, overrides, None)
    assert mesh_layout.layout(experiment, 8, "decode") == meshes.layout(4, 2, 1)
    with pytest.raises(InputError, match="the 3 rows of a microbatch"):
        mesh_layout.layout(experiment, 8)
    check_layout(experiment, meshes.layout(fsdp=3), "decode")  # the width stays whole


def test_every_step_asks_that_a_mesh_divides_the_heads():
    experiment = load(SMALL, kind=None)
    for kind in ("train", "prefill", "decode"):
        with pytest.raises(InputError, match="mesh.tensor = 7 does not divide model.attention.num_heads = 8: set mesh"):
            check_layout(experiment, meshes.layout(tensor=7), kind)


def test_inference_has_no_axis_that_shards_nothing():
    with pytest.raises(InputError, match=r"^mesh\.pipeline = 2 shards nothing in inference: set it to 1$"):
        mesh_layout.layout(load(SMALL, ["mesh.pipeline=2"], None), 2, "decode")


def test_each_device_of_a_sequence_has_two_chunks_of_it():
    overrides = ["mesh.context=2", "training.sequence=30"]
    with pytest.raises(InputError, match=r"2 × mesh\.context = 4 does not divide .*training\.sequence to 32$"):
        mesh_layout.layout(load(SMALL, overrides, None), 2)


def test_two_axes_cannot_both_take_the_rest():
    with pytest.raises(InputError, match="mesh.fsdp and mesh.tensor are both"):
        mesh_layout.layout(load(SMALL, ["mesh.tensor=all"]), 8)


@pytest.mark.parametrize("name", ["llama3.1-8b", "gpt2-124m", "gemma3-1b", "olmo2-7b"])
def test_every_size_that_a_mesh_divides_has_a_key(name):
    """Layers name the axes of their sizes, and their parameters declare the same."""
    model = load(name).model
    keys = {(each.axis, each.size) for each in divided_by_mesh(model)}
    declared = {pair for d in parameters(model).values() for pair in zip(d.axes, d.shape, strict=True)}
    assert {(axis, size) for axis, size in declared if TRAIN.over(axis) and axis not in TRAIN.may_stay_whole} == keys
