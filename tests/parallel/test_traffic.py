"""Traffic between devices, on every compiler: gradients cross the `data` axis once per step, outside the loops over
microbatches and layers; the residual crosses the `tensor` axis by gathers and scatters, so that each device holds its
shard; and nothing moves that the sharding rules do not ask for."""

import functools
import math
import platform
import sys
from collections import Counter
from typing import Literal

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import collectives, hlo, targets
from jaxlm.models import tree as model_tree
from jaxlm.parallel.partition import named_sharding
from jaxlm.training.step import TrainStep

VOCABULARY = 2048


@functools.cache
def training_step(
    mesh,
    dtype: str,
    context: int = model_fixtures.CONTEXT,
    microbatches: int = 4,
    scan_layers: bool | Literal["auto"] = "auto",
    **model,
) -> hlo.HloProgram:
    """The compiled step on a mesh, perhaps of devices that are not here."""
    of_step = {"dtype": dtype, "microbatches": microbatches, "scan_layers": scan_layers}
    sections = model_fixtures.sections(batch=32, sequence=context, kernels="xla", **of_step)
    steps = TrainStep(model_fixtures.model(context_length=context, **model), *sections, model_fixtures.optimization())
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(steps.init),
        steps.shardings(mesh),
    )
    lies = named_sharding(("batch", "sequence"), (32, context), mesh)
    names = ("tokens", "targets", "segments", "positions")
    batch = {name: jax.ShapeDtypeStruct((32, context), jnp.int32, sharding=lies) for name in names}
    with jax.set_mesh(mesh):
        return hlo.parse(steps.jitted(mesh).train.lower(state, batch).compile().as_text())


def sent(program: hlo.HloProgram, mesh) -> list[collectives.CompiledCollective]:
    return collectives.collectives(program, dict(mesh.shape))


# Where programs for TPU and CUDA can be compiled without either.
elsewhere = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="its compilers are for Linux on x86-64"
)
four = {
    "cpu": lambda: jax.devices()[:4],
    "tpu": lambda: targets.devices(Target.parse("tpu-v5e:2x2")),
    "cuda": lambda: targets.devices(Target.parse("h200-sxm:4")),
}
PLATFORMS = ["cpu", *(pytest.param(name, marks=[elsewhere, pytest.mark.slow]) for name in ("tpu", "cuda"))]
on = pytest.mark.parametrize("platform", PLATFORMS)


def on_every_platform(*shapes):
    """Return each shape of a mesh with each platform, as parameters of a test."""
    return [
        pytest.param(
            shape,
            *(platform.values if hasattr(platform, "values") else [platform]),
            marks=getattr(platform, "marks", ()),
        )
        for shape in shapes
        for platform in PLATFORMS
    ]


on_cpu = pytest.mark.parametrize("platform", sampled(PLATFORMS, ["cpu"]))
# XLA's CPU compiler aborts on some products of bfloat16 under a shard_map.
DTYPES = {"cpu": "float32", "tpu": "bfloat16", "cuda": "bfloat16"}


def assert_gradients_cross_data_once(found):
    crossing = [c for c in found if "data" in c.axes]
    assert not [c for c in crossing if c.in_loop]
    assert any(c.kind == "all-reduce" for c in crossing)


@pytest.mark.parametrize(
    "shape, platform",
    sampled(
        on_every_platform((4, 1, 1), (2, 2, 1), (2, 1, 2)),
        ["(2, 1, 2)-cpu"],
    ),
    ids=str,
)
def test_gradients_cross_data_once_per_step(shape, platform):
    mesh = meshes.make(*shape, devices=four[platform]())
    found = sent(training_step(mesh, DTYPES[platform]), mesh)
    assert_gradients_cross_data_once(found)
    assert any(c.in_loop for c in found) == (shape != (4, 1, 1))


@pytest.mark.parametrize(
    "shape, platform",
    sampled(
        on_every_platform((4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)),
        ["(1, 2, 2)-cpu", "(1, 2, 2)-tpu"],
    ),
    ids=str,
)
def test_a_step_holds_these_kinds_of_collectives_and_no_others(shape, platform):
    """Over `data` sums; over `fsdp` gathers of parameters and sums of gradients; over `tensor` gathers and sums of the
    stream. No all-to-all and no permutation: nothing lies where it is not needed. A TPU gathers and scatters some
    parameters during their products, by permutations over `fsdp`."""
    mesh = meshes.make(*shape, devices=four[platform]())
    found = sent(training_step(mesh, DTYPES[platform], microbatches=1, vocab_size=VOCABULARY), mesh)
    sums = {"all-reduce", "reduce-scatter"}
    allowed = {("data",): sums, ("fsdp",): {"all-gather"} | sums, ("tensor",): {"all-gather"} | sums}
    if platform == "tpu":
        windowed = [c for c in found if c.kind == "collective-permute" and c.axes == ("fsdp",)]
        assert all(c.scope.endswith("dot_general") for c in windowed)
        found = [c for c in found if c not in windowed]
    # Scalars, and the gradients of vectors that every device has, are summed over several axes at once.
    strange = [c for c in found if c.kind not in allowed.get(c.axes, {"all-reduce"}) or not c.spans_axes]
    assert not strange
    over_many = [c for c in found if len(c.axes) > 1]
    assert all(c.bytes <= 4 * (VOCABULARY + 64 * 32) for c in over_many if c.axes != ("data", "fsdp"))
    for axis, size in mesh.shape.items():
        assert any(axis in c.axes for c in found) == (size > 1)


@on
@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_table_is_never_gathered_over_tensor(tied, platform):
    """Each device looks up what it has, and what they find is added."""
    mesh = meshes.make(1, 2, 2, devices=four[platform]())
    program = training_step(mesh, DTYPES[platform], vocab_size=VOCABULARY, tied_embeddings=tied)
    width = {"float32": 4, "bfloat16": 2}[DTYPES[platform]]
    table = VOCABULARY * 32 * width
    gathers = [c for c in sent(program, mesh) if c.kind == "all-gather"]
    assert any(c.axes == ("fsdp",) and c.bytes >= table // 2 for c in gathers)  # half of the rows, whole in width
    assert not [c for c in gathers if "tensor" in c.axes and c.bytes >= table // 2]


@on_cpu
def test_no_parameter_above_a_size_is_whole_on_every_device(platform):
    mesh = meshes.make(1, 2, 2, devices=four[platform]())
    _, tree = model_tree.abstract(model_fixtures.model(vocab_size=VOCABULARY))
    limit = 3 * 64  # vectors of three layers; every matrix has more numbers
    for path, declared in model_tree.paths(model_tree.dimensions(tree)).items():
        if (size := math.prod(declared.shape)) > limit:
            lies = named_sharding(declared.axes, declared.shape, mesh)
            assert math.prod(lies.shard_shape(declared.shape)) * 4 == size, path
    program = training_step(mesh, DTYPES[platform], microbatches=1, vocab_size=VOCABULARY)
    given = Counter(p.op_name for p in program.entry.parameters if "parameters" in p.op_name)
    assert len(given) == len(model_tree.paths(model_tree.shapes(tree)))
    largest = max(a.elements for p in program.entry.parameters for a in p.arrays if "parameters" in p.op_name)
    assert largest == VOCABULARY * 32 // 4


@pytest.mark.exhaustive  # tests/lowering/test_report.py counts what crosses `tensor` there
@pytest.mark.slow
@elsewhere
def test_the_stream_is_gathered_and_scattered_on_cuda():
    """Forward: in a layer two gathers, and two sums of which each device keeps its part; one such sum behind the
    embedding and a gather before the unembedding. Backward: their transposes. No [B, T, D] is summed whole. Gradients
    leave the loops before they cross `data`."""
    mesh = meshes.make(2, 1, 2, devices=four["cuda"]())
    found = sent(training_step(mesh, "bfloat16"), mesh)
    assert_gradients_cross_data_once(found)
    stream = 2 * 4 * model_fixtures.CONTEXT * 32
    counted = Counter()
    for c in found:
        if c.in_loop and c.bytes == stream:
            counted[c.kind] += c.count
    # Six of each in a microbatch of one layer; four microbatches, three layers, the ends once per microbatch.
    each = 4 * (3 * 4 + 2)
    assert counted == {"all-gather": each, "reduce-scatter": each}


@on_cpu
def test_matrices_are_gathered_for_each_pass_alike_in_a_loop_and_written_out(platform):
    """XLA would gather once for both passes where layers are written out: the matrices of all layers would stay
    gathered from the one to the other."""
    mesh, model = meshes.make(1, 4, 1, devices=four[platform]()), {"num_layers": 2, "vocab_size": VOCABULARY}
    gathers = []
    for scan_layers in (True, False):
        program = training_step(mesh, DTYPES[platform], microbatches=1, scan_layers=scan_layers, **model)
        found = [c for c in sent(program, mesh) if c.kind == "all-gather" and "layers/" in c.scope]
        gathers.append(Counter((c.bytes, "backward" in c.scope) for c in found for _ in range(c.count)))
    in_a_loop, written_out = gathers
    assert in_a_loop == written_out and {backward for _, backward in written_out} == {False, True}


@pytest.mark.exhaustive
@pytest.mark.slow
@elsewhere
def test_the_stream_is_gathered_and_scattered_on_tpu():
    """There, a sum of which each device keeps its part is an all-reduce in a fusion of that name."""
    mesh = meshes.make(1, 1, 4, devices=four["tpu"]())
    found = sent(training_step(mesh, "bfloat16", context=512, d_model=256), mesh)
    stream = 2 * 8 * 512 * 256
    kinds = {c.kind for c in found if c.bytes == stream and c.dtype == "bf16"}
    assert kinds == {"all-gather", "reduce-scatter"}


@elsewhere
@pytest.mark.slow
def test_two_slices_of_a_tpu_are_joined_by_data():
    from jax.experimental import topologies

    targets.devices(Target.parse("tpu-v5e:2x2"))  # sets up libtpu where there is no machine
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2).devices
    mesh = meshes.make(2, 2, 2, devices=devices)
    assert [{device.slice_index for device in part.flat} for part in mesh.devices.reshape(2, -1)] == [{0}, {1}]


@elsewhere
@pytest.mark.slow
def test_an_axis_that_shares_links_of_the_torus_is_said():
    with pytest.warns(UserWarning, match="a mesh of fsdp 8 × tensor 8 axes share links"):
        meshes.make(1, 8, 8, devices=targets.devices(Target.parse("tpu-v5p:4x4x4")))
