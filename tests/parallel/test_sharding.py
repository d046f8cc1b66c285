"""The same losses and gradients on every mesh, and the collectives that each may contain."""

import functools
import math
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.parallel import mesh as mesh_module
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.layout import AXES
from jaxlm.parallel.layout_choice import factorings
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.partition import constrain, partition
from jaxlm.parallel.rules import TRAIN
from jaxlm.training.step import TrainStep

LAYOUTS = list(factorings(8, AXES))
MESHES = [(d, f, t) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * f * t == 8]
LATENT = {**model_fixtures.LATENT, "attention": {**model_fixtures.LATENT["attention"], "num_heads": 8}}  # divided by 8
FAMILIES = {**model_fixtures.FAMILIES, "latent": LATENT, "mixture": model_fixtures.MIXTURE}


@functools.cache
def on_one_device(family):
    return model_fixtures.first_gradients(model_fixtures.model(FAMILIES[family]), meshes.make())


def test_all_ways_to_factor_eight_are_there():
    assert len(set(LAYOUTS)) == len(LAYOUTS) == math.comb(3 + len(AXES) - 1, 3)
    assert len(MESHES) == 10


OPTIONS = {"whole": {}, "microbatches": {"microbatches": 2, "remat": "full"}}


@pytest.mark.parametrize(
    "family, layout, options",
    sampled(
        [
            pytest.param(family, layout, options, id=f"{family}-{layout}-{name}")
            for family in ("llama", "gpt2", "latent", "mixture")
            for layout in LAYOUTS
            for name, options in OPTIONS.items()
        ],
        [
            "gpt2-data 2 × fsdp 2 × tensor 2-microbatches",
            "llama-fsdp 2 × context 2 × tensor 2-whole",
            "mixture-expert 4 × context 2-microbatches",
            "llama-pipeline 4 × fsdp 2-whole",  # with microbatches in test_pipeline.py
        ],
    ),
)
def test_losses_and_gradients_are_those_of_one_device(family, layout, options):
    """Rows hold several documents; one device computes the whole batch and keeps all activations."""
    expected_loss, expected = on_one_device(family)
    options = {**options, "microbatches": min(options.get("microbatches", 1), 8 // layout.over(TRAIN.over("batch")))}
    loss, gradients = model_fixtures.first_gradients(
        model_fixtures.model(FAMILIES[family]), make_mesh(layout), **options
    )
    # The tolerances of DESIGN: sums are added in another order, in float32.
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 1, 2)], ids=str)
def test_microbatches_on_a_mesh_are_the_whole_batch(mesh):
    expected_loss, expected = on_one_device("llama")
    loss, gradients = model_fixtures.first_gradients(model_fixtures.model(), meshes.make(*mesh), microbatches=2)
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


def all_that_is_new(mesh):
    """(metrics, state) after three steps of a run with everything that acts on parameters turned on."""
    return model_fixtures.run_steps(
        model_fixtures.model(num_layers=2),
        model_fixtures.sections(z_loss=1e-2, ema_decay=0.5),
        [model_fixtures.batch(seed=seed) for seed in range(3)],
        mesh,
        model_fixtures.optimization(
            kind="muon",
            groups=[
                {"pattern": "embedding", "learning_rate_scale": 0.0},
                {"pattern": "*norm/scale", "weight_decay": 0.3},
                {"pattern": "*/key", "learning_rate_scale": 0.5},
            ],
        ),
    )


@pytest.fixture(scope="module")
def all_that_is_new_on_one_device():
    return all_that_is_new(meshes.make())


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_muon_groups_average_and_z_loss_are_those_of_one_device(all_that_is_new_on_one_device, mesh):
    expected_metrics, expected = all_that_is_new_on_one_device
    metrics, state = all_that_is_new(meshes.make(*mesh))
    for name in ("loss", "z_loss", "grad_norm"):
        model_fixtures.assert_same_numbers([m[name] for m in metrics], [m[name] for m in expected_metrics], 1e-5)
    model_fixtures.assert_same_numbers(state.parameters, expected.parameters, 1e-4)
    model_fixtures.assert_same_numbers(state.average, expected.average, 1e-4)


COLLECTIVE = re.compile(
    r"= (?P<shapes>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


@functools.cache
def training_step(model, mesh, **training):
    """The text of the compiled training step."""
    steps = TrainStep(model, *model_fixtures.sections(**training), model_fixtures.optimization())
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(steps.init),
        steps.shardings(mesh),
    )
    with jax.set_mesh(mesh):
        batch = put_batch(model_fixtures.batch(), mesh)
        return steps.jitted(mesh).train.lower(state, batch).compile().as_text()


def collectives(model, mesh, **training):
    """{kind: shapes of its results} in the compiled training step."""
    found: dict[str, set] = {}
    for line in training_step(model, mesh, **training).splitlines():
        if match := COLLECTIVE.search(line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", match["shapes"])
            sizes = {tuple(int(n) for n in shape.split(",") if n) for shape in shapes}
            found.setdefault(match["kind"], set()).update(sizes)
    return found


# `reduce-scatter` is what accelerators make of an all-reduce of which each device keeps a part; the CPU does not.
CONTRACT = {
    (1, 1, 1): set(),
    (8, 1, 1): {"all-reduce"},
    (1, 8, 1): {"all-gather", "all-reduce"},
    (1, 1, 4): {"all-gather", "all-reduce"},
    (2, 2, 1): {"all-gather", "all-reduce"},
    (2, 1, 4): {"all-gather", "all-reduce"},
    (2, 2, 2): {"all-gather", "all-reduce"},
    (1, 4, 2): {"all-gather", "all-reduce"},
}


@pytest.mark.parametrize("mesh", sampled(CONTRACT, ["(2, 2, 2)"]), ids=str)
def test_a_mesh_contains_its_collectives_and_no_other(mesh):
    assert set(collectives(model_fixtures.model(), meshes.make(*mesh))) == CONTRACT[mesh]


@pytest.mark.parametrize("mesh", sampled([(1, 8, 1), (1, 1, 4), (2, 2, 2)], ["(2, 2, 2)"]), ids=str)
def test_only_parameters_and_the_stream_are_gathered(mesh):
    """Gathers over fsdp are of parameters, over tensor of the residual [B, T, D]; of no other activation, and of no
    vocabulary that the tensor axis shards."""
    model = model_fixtures.model()
    data, fsdp, tensor = mesh
    stream = (len(model_fixtures.batch()["tokens"]) // (data * fsdp), model_fixtures.CONTEXT, model.d_model)
    D, F, V = model.d_model, model.feed_forward.d_ff // tensor, model.vocab_size // tensor
    heads, kv_heads = model.attention.num_heads // tensor, model.attention.num_kv_heads // tensor
    H = model.attention.head_dim
    matrices = {(V, D), (D, heads, H), (D, kv_heads, H), (heads, H, D), (D, F)}
    flat = {(D, heads * H), (D, kv_heads * H)}
    allowed = {tuple(sorted(shape)) for shape in matrices | flat | ({stream} if tensor > 1 else set())}
    gathered = collectives(model, meshes.make(*mesh))["all-gather"]
    strange = {shape for shape in gathered if tuple(sorted(n for n in shape if n != 1)) not in allowed}
    assert not strange


def test_each_device_keeps_its_part_of_the_stream_between_layers():
    """All that layers keep for the backward pass under full rematerialisation is [L, B, T / tensor, D]."""
    model = model_fixtures.model()
    stream = f"f32[{model.num_layers},{len(model_fixtures.batch()['tokens'])},{{}},{model.d_model}]"
    whole, part = stream.format(model_fixtures.CONTEXT), stream.format(model_fixtures.CONTEXT // 4)
    text = training_step(model, meshes.make(tensor=4), remat="full")
    assert part in text and whole not in text
    assert whole in training_step(model, meshes.make(), remat="full")


def test_a_sequence_that_does_not_divide_stays_whole():
    mesh = meshes.make(tensor=4)
    assert partition(("batch", "residual", "act_embed"), (8, 1, 32), mesh) == P(None, None, None)


@dataclass(frozen=True)
class Device:
    """A GPU in one of several fast networks."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    process_index: int = 0


@pytest.mark.parametrize(
    ("mesh", "slices"),
    [
        ((2, 4, 1), [[[0], [0], [0], [0]], [[1], [1], [1], [1]]]),
        ((1, 8, 1), [[[0], [0], [0], [0], [1], [1], [1], [1]]]),
        ((1, 2, 4), [[[0, 0, 0, 0], [1, 1, 1, 1]]]),
        ((2, 1, 4), [[[0, 0, 0, 0]], [[1, 1, 1, 1]]]),
    ],
    ids=str,
)
def test_the_slow_network_between_slices_carries_data_then_fsdp(monkeypatch, mesh, slices):
    arranged = []
    monkeypatch.setattr(mesh_module, "_mesh", arranged.append)
    mixed = [Device(id=i, slice_index=i % 2) for i in range(8)]
    meshes.make(*mesh, devices=mixed)
    (devices,) = arranged
    assert np.vectorize(lambda device: device.slice_index, otypes=[int])(devices).reshape(mesh).tolist() == slices


def test_tensor_and_context_do_not_reach_over_slices_of_a_tpu():
    devices = [Device(id=i, slice_index=i // 4, platform="tpu", device_kind="TPU v5 lite") for i in range(8)]
    for axis in ("expert", "context", "tensor"):
        with pytest.raises(InputError, match="fsdp = 1 × 1 × 1 does not divide over 2 slices"):
            meshes.make(devices=devices, **{axis: 8})


def test_any_axis_reaches_over_nodes_of_gpus(monkeypatch):
    arranged = []
    monkeypatch.setattr(mesh_module, "_mesh", arranged.append)
    meshes.make(context=4, tensor=2, devices=[Device(id=i, slice_index=i // 4) for i in range(8)])
    (devices,) = arranged
    slices = np.vectorize(lambda device: device.slice_index, otypes=[int])(devices).reshape(4, 2)
    assert slices.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_uneven_kv_heads_are_replicated():
    mesh = meshes.make(tensor=8)
    assert partition(("embed", "kv_heads", "head_dim"), (32, 4, 4), mesh) == P(None, None, None)
    assert partition(("embed", "kv_heads", "head_dim"), (32, 8, 4), mesh) == P(None, "tensor", None)


def test_other_uneven_dimensions_are_refused():
    with pytest.raises(ValueError, match="tensor = 8 does not divide vocab = 65"):
        partition(("vocab", "embed"), (65, 32), meshes.make(tensor=8))


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="needs 16 devices; 8 are here"):
        meshes.make(data=16)


def test_batches_go_to_the_devices_that_use_them():
    mesh = meshes.make(data=2, fsdp=2, tensor=2)
    host = model_fixtures.batch()
    placed = put_batch(host, mesh)["tokens"]
    np.testing.assert_array_equal(placed, host["tokens"])
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, model_fixtures.CONTEXT)}


@pytest.mark.exhaustive
def test_bfloat16_on_a_mesh_with_microbatches_is_one_device_s_to_its_precision():
    sections = model_fixtures.sections(dtype="bfloat16", microbatches=2, remat="full")
    one, _ = model_fixtures.run_steps(model_fixtures.model(), sections, [model_fixtures.batch()] * 3)
    many, _ = model_fixtures.run_steps(
        model_fixtures.model(), sections, [model_fixtures.batch()] * 3, meshes.make(2, 2, 2)
    )
    # Eight bits of mantissa, and sums between devices that round in another order.
    np.testing.assert_allclose([m["loss"] for m in many], [m["loss"] for m in one], rtol=2e-2)


@pytest.mark.parametrize(
    ("names", "kind"), [(("x",), AxisType.Auto), (AXES, AxisType.Explicit)], ids=["names", "explicit"]
)
def test_a_mesh_of_another_make_is_refused_in_words(names, kind):
    mesh = jax.make_mesh((2, *(1,) * (len(names) - 1)), names, axis_types=(kind,) * len(names))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="that jaxlm.parallel.mesh.make_mesh makes.* has the axes"),
    ):
        constrain(jnp.ones((8, 8)), "batch", None)
