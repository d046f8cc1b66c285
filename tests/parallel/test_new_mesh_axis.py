"""A mesh axis of one's own: a name and a rule are all that placement, counting and training ask for.

An axis that is split in two is the axis: whatever it sharded, both shard together. So a step on the split mesh has the
numbers, the memory and the collectives of the step on the whole one.
"""

import math
from collections import Counter

import jax
import model_fixtures
import pytest
from matrices import sampled
from workload_fixtures import changed, workload

from jaxlm.costs import local_shapes
from jaxlm.costs.counted import operations, traffic
from jaxlm.costs.counted.memory import memory
from jaxlm.lowering import collectives, hlo
from jaxlm.models import tree
from jaxlm.parallel import layout
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.layout_choice import layouts
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.partition import using_rules
from jaxlm.parallel.rules import TRAIN, Rules
from jaxlm.training.step import TrainStep

NEW = "mine"  # the outer half of the axis that is split
SPLIT = {"data": Layout(data=4, fsdp=2), "fsdp": Layout(fsdp=4, tensor=2), "tensor": Layout(fsdp=2, tensor=4)}
MODEL = model_fixtures.model(attention={"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}, vocab_size=512)


def split(axis: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Rules, Layout]:
    """Add an axis just outside of another; return the rules by which both shard what that one did, and the layout."""
    at = layout.AXES.index(axis)
    monkeypatch.setattr(layout, "AXES", (*layout.AXES[:at], NEW, *layout.AXES[at:]))
    mesh_axes = {
        name: tuple(each for whole in over for each in ((NEW, whole) if whole == axis else (whole,)))
        for name, over in TRAIN.mesh_axes.items()
    }
    whole = SPLIT[axis]
    return Rules(mesh_axes, TRAIN.may_stay_whole), whole.replace(**{NEW: 2, axis: whole[axis] // 2})


def counted(rules: Rules, mesh: Layout, **changes):
    """Return the counted figures of a step of two microbatches, with the axis that was split by its old name."""
    work = changed(
        workload("train", MODEL, 16, model_fixtures.CONTEXT, layout=mesh, microbatches=2, own_rules=rules), **changes
    )
    sent = Counter()
    for each in traffic.collectives(work):
        sent[each.kind, each.axes, each.bytes, each.of] += each.times
    return sent, memory(work), [(op.product, op.times, op.most_bytes) for op in operations.step(work)]


@pytest.mark.parametrize("changes", [{}, {"remat": "full", "kernels": "xla"}, {"optimizer": "muon"}], ids=str)
@pytest.mark.parametrize("axis", SPLIT)
def test_an_axis_in_two_is_counted_as_one(axis, changes, monkeypatch):
    expected, *others = counted(TRAIN, SPLIT[axis], **changes)
    found, *of_split = counted(*split(axis, monkeypatch), **changes)
    assert of_split == others
    moves = {key: times for key, times in found.items() if key[-1] != "optimizer"}  # it goes one axis after the other
    both = {
        (kind, tuple(each for each in axes if each != NEW), size, of): n for (kind, axes, size, of), n in moves.items()
    }
    assert both == {key: times for key, times in expected.items() if key[-1] != "optimizer"}
    assert all((NEW in axes) == (axis in axes) for _, axes, _, _ in moves)


def test_two_rules_of_one_mesh_are_counted_apart():
    """Whatever was asked of the first."""
    mesh = Layout(fsdp=2, tensor=2)
    whole = Rules({**TRAIN.mesh_axes, "feed_forward": (), "act_feed_forward": ()}, TRAIN.may_stay_whole)
    by_rules = {rules: counted(rules, mesh) for rules in (TRAIN, whole)}
    (sent, held, ops), (of_whole, more, larger) = by_rules.values()
    assert held.total < more.total and sum(sent.values()) > sum(of_whole.values())
    flops, more_flops = (sum(product.flops for product, *_ in each if product) for each in (ops, larger))
    assert flops < more_flops


def compiled(rules: Rules, mesh: jax.sharding.Mesh) -> Counter:
    """Return the collectives of a compiled step of two microbatches, and the bytes of its state on each device."""
    sections = model_fixtures.sections(batch=16, microbatches=2, kernels="xla")
    step = TrainStep(MODEL, *sections, model_fixtures.optimization())
    with jax.set_mesh(mesh), using_rules(rules):
        shapes = tree.placed(jax.eval_shape(step.init), step.shardings(mesh))
        batch = put_batch(model_fixtures.batch(16, vocabulary=512), mesh)
        program = hlo.parse(step.jitted(mesh).train.lower(shapes, batch).compile().as_text())
    held = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(shapes))
    found = Counter()
    for each in collectives.collectives(program, dict(mesh.shape)):
        axes = tuple(axis for axis in each.axes if axis != NEW)
        found[each.kind, axes, each.bytes, each.in_loop] += each.count
    return found, held


@pytest.mark.parametrize("axis", SPLIT)
def test_a_step_on_it_is_compiled_to_the_same_collectives(axis, monkeypatch):
    expected, bytes_expected = compiled(TRAIN, make_mesh(SPLIT[axis]))
    rules, mesh = split(axis, monkeypatch)
    found, held = compiled(rules, make_mesh(mesh))
    assert found == expected and held == bytes_expected
    work = workload("train", MODEL, 16, model_fixtures.CONTEXT, layout=mesh, microbatches=2, own_rules=rules)
    state = 3 * sum(4 * local_shapes.stored(work, d.axes, d.shape) for d in work.parameters.values())
    assert 0 <= held - state < 64  # counts of steps


@pytest.mark.parametrize(
    "mesh_axes, mesh",
    sampled(
        [
            pytest.param(
                {"feed_forward": ("tensor", NEW), "act_feed_forward": ("tensor", NEW)},
                {"data": 2, "tensor": 2, NEW: 2},
                id="feed-forward",
            ),
            pytest.param({"batch": ("data", NEW, "fsdp")}, {"fsdp": 2, "tensor": 2, NEW: 2}, id="replicas"),
            pytest.param(
                {"batch": ("data", "fsdp", NEW), "embed": ("fsdp", NEW)},
                {"data": 2, "fsdp": 2, NEW: 2},
                id="parameters",
            ),
            pytest.param({"vocab": (NEW,), "act_vocab": (NEW,)}, {"fsdp": 2, "tensor": 2, NEW: 2}, id="vocabulary"),
        ],
        ["feed-forward", "parameters", "vocabulary"],  # "parameters" has replicas too
    ),
)
def test_losses_and_gradients_do_not_depend_on_it(mesh_axes, mesh, monkeypatch):
    expected_loss, expected = model_fixtures.first_gradients(MODEL, make_mesh(Layout()), microbatches=2)
    monkeypatch.setattr(layout, "AXES", (*layout.AXES, NEW))
    rules, mesh = Rules({**TRAIN.mesh_axes, **mesh_axes}, TRAIN.may_stay_whole), Layout(mesh)
    with using_rules(rules):
        loss, gradients = model_fixtures.first_gradients(MODEL, make_mesh(mesh), microbatches=2)
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


def test_a_dimension_on_two_axes_and_an_axis_on_two_dimensions():
    """Both shard the first; the second dimension that asks for an axis stays without it."""
    both, mesh = Rules({**TRAIN.mesh_axes, "feed_forward": ("fsdp", "tensor"), "embed": ()}), Layout(fsdp=4, tensor=2)
    assert both.stored(("embed", "feed_forward"), (256, 256), mesh) == 256 * 256 // 8
    twice = Rules({**TRAIN.mesh_axes, "embed": ("tensor",)})
    assert twice.placed(("embed", "feed_forward"), (256, 256), mesh) == (("tensor",), ())
    assert twice.stored(("embed", "feed_forward"), (256, 255), mesh) == 128 * 255
    with pytest.raises(ValueError, match="tensor = 2 does not divide embed = 255"):
        twice.placed(("embed",), (255,), mesh, exact=True)


def test_a_search_lays_devices_along_it(monkeypatch):
    """Not where it is another axis by a second name, which shards the same."""
    monkeypatch.setattr(layout, "AXES", (*layout.AXES, NEW))
    own = {**TRAIN.mesh_axes, "feed_forward": ("tensor", NEW)}
    second = {name: (*over, NEW) if "tensor" in over else over for name, over in TRAIN.mesh_axes.items()}
    for mesh_axes, sizes in ((own, {1, 2, 4}), (second, {1})):
        assert {each[NEW] for each in layouts(4, Rules(mesh_axes, TRAIN.may_stay_whole))} == sizes
