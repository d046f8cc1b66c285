"""Experts on devices of their own: what is sent, what is kept, and where a search uses the axis."""

import math
from collections import Counter

import jax
import model_fixtures
from workload_fixtures import workload

from jaxlm.costs import local_shapes, search
from jaxlm.costs.counted import traffic
from jaxlm.lowering import collectives, hlo
from jaxlm.models import tree
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh
from jaxlm.training.step import TrainStep
from kernels_pallas.grouped_matmul import xla

# Experts of four times the width of the tokens, so that no matrix has as many numbers as the rows of a device.
MODEL = model_fixtures.model(
    {
        **model_fixtures.LLAMA,
        "feed_forward": {"kind": "mixture", "num_experts": 8, "experts_per_token": 2, "d_ff": 128},
    },
    num_layers=2,
)
LAYOUT = Layout(expert=4)
ROWS = 16
GATHER = {"expert_parallel": "gather"}


def compiled() -> hlo.HloProgram:
    """Return a training step on devices that share out the experts; loops over tiles run once."""
    sections = model_fixtures.sections(batch=ROWS, kernels="xla", **GATHER)
    step = TrainStep(MODEL, *sections, model_fixtures.optimization())
    mesh = make_mesh(LAYOUT)
    with jax.set_mesh(mesh):
        shapes = tree.placed(jax.eval_shape(step.init), step.shardings(mesh))
        text = step.jitted(mesh).train.lower(shapes, put_batch(model_fixtures.batch(ROWS), mesh)).compile().as_text()
    trips = {xla.loop_name(2**n): 1 for n in range(12)} | {xla.loop_name(2 * n, n): 1 for n in range(1, 129)}
    return hlo.parse(text, trips=trips)


def test_tokens_are_sent_and_experts_stay():
    """The residual is gathered and its sums are scattered as often as counted; no matrix of experts is gathered. The
    choices of tokens are gathered with them."""
    found = Counter()
    for each in collectives.collectives(compiled(), LAYOUT):
        found[each.kind, each.bytes] += each.count
    work = workload("train", MODEL, ROWS, model_fixtures.CONTEXT, "float32", layout=LAYOUT, kernels="xla", **GATHER)
    counted = Counter()
    for each in traffic.collectives(work):
        if each.of in ("residual", "routes"):
            counted[each.kind, each.bytes] += each.times
    residual = 4 * ROWS * model_fixtures.CONTEXT * MODEL.d_model
    assert counted["all-gather", residual] == found["all-gather", residual] == 2 * MODEL.num_layers
    # Backward a CPU sums the whole, of which each device takes its part.
    assert counted["reduce-scatter", residual] == 2 * MODEL.num_layers
    assert found["reduce-scatter", residual] == MODEL.num_layers
    of_choices = 2 * 4 * ROWS * model_fixtures.CONTEXT  # bytes of the experts that tokens choose, and of their weights
    assert 0 < counted["all-gather", of_choices] == 2 * MODEL.num_layers <= found["all-gather", of_choices]
    experts = math.prod((8, 128, MODEL.d_model)) * 4
    assert not any(kind == "all-gather" and size >= experts for kind, size in found if size != residual)


def test_each_device_keeps_its_own_experts_alone():
    dense, mixture = (
        workload("train", model, ROWS, model_fixtures.CONTEXT, layout=LAYOUT)
        for model in (model_fixtures.model(), MODEL)
    )
    stored = {path: local_shapes.stored(mixture, d.axes, d.shape) for path, d in mixture.parameters.items()}
    sizes = {path: math.prod(d.shape) for path, d in mixture.parameters.items()}
    of_experts = [path for path, d in mixture.parameters.items() if "experts" in d.axes]
    assert of_experts and all(stored[path] == sizes[path] // 4 for path in of_experts)
    assert all(
        local_shapes.gathered_over(mixture, mixture.parameters[p].axes, mixture.parameters[p].shape) == ()
        for p in of_experts
    )
    # Elsewhere, and in a dense model, the axis is more of fsdp.
    d = next(d for d in dense.parameters.values() if d.axes[-1] == "embed" or "embed" in d.axes)
    assert local_shapes.gathered_over(dense, d.axes, d.shape) == ("expert",)


def test_a_search_uses_the_axis_for_mixtures_alone():
    for model, sizes in ((model_fixtures.model(), {1}), (MODEL, {1, 2, 4, 8})):
        work = workload("train", model, 16, model_fixtures.CONTEXT)
        assert {layout["expert"] for layout in search.layouts(work, 8)} == sizes
