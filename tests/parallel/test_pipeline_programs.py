"""Compiled programs of pipelines: what devices send is counted, and memory is that of any number of microbatches."""

from collections import Counter

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from markers import ELSEWHERE
from workload_fixtures import workload

from jaxlm.costs.counted import traffic
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import collectives, hlo, targets
from jaxlm.parallel.batches import PER_TOKEN, axes_of
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding
from jaxlm.training.step import TrainStep

LENGTH = 64
CHIPS = {"tpu": "tpu-v5e:2x2", "cuda": "h100-sxm5:4"}
LAYOUT = Layout(pipeline=2, fsdp=2)
SETTINGS = {"remat": "full", "kernels": "xla", "scan_layers": True, "dtype": "bfloat16"}
# Parts of matrices are wide enough that a TPU scatters the sums of their gradients. Each chunk is a loop, of two layers
# where a stage has two chunks.
MODEL = model_fixtures.model(context_length=LENGTH, num_layers=8, d_model=512)


def compiled(platform, microbatches, model=MODEL, **settings):
    """Return a compiled step whose microbatches have four rows, of two on each shard."""
    mesh = meshes.make(pipeline=2, fsdp=2, devices=targets.devices(Target.parse(CHIPS[platform])))
    rows = 4 * microbatches
    sections = model_fixtures.sections(batch=rows, sequence=LENGTH, microbatches=microbatches, **SETTINGS, **settings)
    steps = TrainStep(model, *sections, model_fixtures.optimization())
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(steps.init),
        steps.shardings(mesh),
    )
    batch = {
        name: jax.ShapeDtypeStruct(
            (rows, LENGTH), jnp.int32, sharding=named_sharding(axes_of(name), (rows, LENGTH), mesh)
        )
        for name in PER_TOKEN
    }
    with jax.set_mesh(mesh):
        return steps.jitted(mesh).train.lower(state, batch).compile()


def assert_as_counted(found, work, platform):
    """Check the bytes of each kind of collective over each axis, by kind and axes. Stages also exchange scalars of the
    loss and, with rounds, vectors of layers, which are not counted; gradients of vectors are counted one by one, in
    float32. A TPU gathers the matrices of queries and keys once more in each backward pass."""
    sent, counted = Counter(), Counter()
    for each in found:
        sent[each.kind, each.axes] += each.count * each.bytes
    for each in traffic.collectives(work):
        counted[each.kind, each.axes] += each.times * each.bytes
    if platform == "tpu" and not work.gathers_once:
        heads = MODEL.attention.num_heads + MODEL.attention.num_kv_heads
        matrices = work.itemsize * MODEL.d_model * heads * MODEL.attention.head_dim
        layers = work.stage_layers.slots * work.stage_passes
        counted["all-gather", ("fsdp",)] += layers * matrices
    scalars = 64
    vectors = sent.pop(("all-reduce", ("fsdp",))), counted.pop(("all-reduce", ("fsdp",)))
    assert 0.4 * vectors[1] <= vectors[0] <= vectors[1]
    moved = work.rounds > 1 and 3 * 4 * work.model.num_layers * work.model.d_model
    for key in sent | counted:
        more = moved if key == ("collective-permute", ("pipeline",)) else 0
        more += scalars if key[0] == "all-reduce" else 0
        assert counted[key] <= sent[key] <= counted[key] + more, key


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("platform", CHIPS)
def test_stages_send_the_residual_and_keep_their_parameters(platform):
    """Memory is that of four microbatches with eight."""
    programs = {n: compiled(platform, n) for n in (4, 8)}
    for n, program in programs.items():
        found = collectives.collectives(hlo.parse(program.as_text()), LAYOUT)
        work = workload("train", MODEL, 4 * n, LENGTH, layout=LAYOUT, microbatches=n, **SETTINGS)
        counted = [each for each in traffic.collectives(work) if each.kind == "collective-permute"]
        sent = [(each.axes, each.count, each.bytes) for each in found if each.kind == "collective-permute"]
        assert_as_counted(found, work, platform)
        residual = 2 * 2 * LENGTH * MODEL.d_model
        assert sum(each.times for each in counted) == 2 * work.ticks.passes
        assert {axes for axes, _, _ in sent} == {("pipeline",)}
        # CUDA programs may send both ways at once.
        assert {size for _, _, size in sent} <= ({residual} if platform == "tpu" else {residual, 2 * residual})
        assert sum(count * size for _, count, size in sent) == sum(each.times * each.bytes for each in counted)
        assert all(each.spans_axes for each in found if each.kind == "collective-permute")
        # What all stages have together is a table of the vocabulary, of which each has a part, and never its layers.
        gathered = {each.bytes for each in found if each.kind == "all-gather" and "pipeline" in each.axes}
        assert max(gathered, default=0) <= residual
    of_4, of_8 = (program.memory_analysis().temp_size_in_bytes for program in programs.values())
    assert of_8 == pytest.approx(of_4, rel=0.05)


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("platform", CHIPS)
@pytest.mark.parametrize("settings", [{"pipeline_rounds": 2}, {"pipeline_gather": "step"}], ids=str)
def test_rounds_and_gathers_are_those_of_the_program(platform, settings):
    """With rounds, stages also send one another chunks of layers once a step; matrices that are gathered once are
    gathered in no loop."""
    program = hlo.parse(compiled(platform, 4, **settings).as_text())
    found = collectives.collectives(program, LAYOUT)
    work = workload("train", MODEL, 16, LENGTH, layout=LAYOUT, microbatches=4, **SETTINGS, **settings)
    counted = traffic.collectives(work)
    assert_as_counted(found, work, platform)
    if "pipeline_gather" in settings:
        gathered = [each for each in found if each.kind == "all-gather"]
        (layers, table) = (
            next(c.bytes for c in counted if c.kind == "all-gather" and c.of == of) for of in ("layers", "embedding")
        )
        assert sum(each.count * each.bytes for each in gathered if not each.in_loop) == layers + table
        assert {each.bytes for each in gathered if each.in_loop} == {table}  # the unembedding


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_mixture_in_chunks_of_one_layer_compiles():
    """XLA for a GPU did not partition `axis_index` there."""
    model = model_fixtures.model(model_fixtures.MIXTURE, context_length=LENGTH, num_layers=5)
    compiled("cuda", 4, model, pipeline_rounds=2)
