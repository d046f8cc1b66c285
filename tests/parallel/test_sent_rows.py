"""Rows that are sent to the devices of their experts: the same numbers whatever tokens choose, and what is sent."""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from markers import ELSEWHERE
from matrices import sampled
from workload_fixtures import workload

from jaxlm import config
from jaxlm.costs.counted import traffic
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import collectives, hlo, report, targets
from jaxlm.models import kernels, tree
from jaxlm.models.doors import Dropout
from jaxlm.models.doors.sent_rows import _room, _slots
from jaxlm.models.expert_parallel import way
from jaxlm.models.feed_forward.mixture import MixtureFeedForward
from jaxlm.models.feed_forward.passes import FURTHER, summed_passes
from jaxlm.models.masks import OneDocumentMask
from jaxlm.models.rows import RowContext
from jaxlm.parallel.batches import PER_TOKEN, axes_of
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import constrain, named_sharding
from jaxlm.training.step import TrainStep
from kernels_pallas.grouped_matmul import xla

B, T, D, E, K = 8, 16, 32, 8, 2
PLAIN = {"kind": "mixture", "num_experts": E, "experts_per_token": K, "d_ff": 128}
VARIANTS = {
    "plain": {},
    "biases": {"bias": True, "router": {"bias": True}},
    "ungated": {"gated": False, "activation": "relu_squared"},
    "latent": {"latent_dim": 16, "shared": {"d_ff": 16}},
}
SKEWS = {"even": 0.0, "skewed": 0.5, "one": 9.0}  # added to what the router says of the first two experts
LAYOUTS = ({"expert": 8}, {"expert": 4, "tensor": 2}, {"expert": 2, "context": 2, "fsdp": 2}, {"data": 2, "expert": 4})


def model(variant="plain", **changes):
    return model_fixtures.model(feed_forward={**PLAIN, **VARIANTS[variant]}, num_layers=1, **changes)


def arrays(settings, skew):
    """Return drawn parameters, tokens of which the last of each row are padding, and which are none."""
    draw = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: MixtureFeedForward(settings, nnx.Rngs(0))))
    parameters = jax.tree.map(lambda x: 0.2 * draw.standard_normal(x.shape, np.float32), nnx.to_pure_dict(state))
    x = draw.standard_normal((B, T, D), np.float32)
    # A channel that is 1 in all tokens, which the router alone reads.
    x[..., 0] = 1.0
    for name in ("gate", "up"):
        if name in parameters and parameters[name].shape[-1] == D:
            parameters[name][..., 0] = 0.0
    parameters["router"][0, :2] += skew
    is_token = np.ones((B, T), bool)
    is_token[:, -3:] = False
    return graph, parameters, x, is_token


def gradients(settings, skew="even", layout=None, ways="all_to_all", change=lambda x: x):
    """Return the result of a layer, its statistics, and all gradients of a sum over it."""
    graph, parameters, x, is_token = arrays(settings, SKEWS[skew])
    x = change(x)
    mesh = meshes.make(**(layout or {}))

    def output(parameters, x):
        mask, positions = OneDocumentMask(T), jnp.zeros((B, T), jnp.int32)
        rows = RowContext(positions, mask, None, Dropout(), ~jnp.asarray(is_token))
        return nnx.merge(graph, parameters)(constrain(x, "batch", "residual", "act_embed"), rows)

    def run(parameters, x):
        y, back, auxiliary = jax.vjp(output, parameters, x, has_aux=True)
        return y, auxiliary.statistics, back(jnp.cos(y))

    abstract = nnx.state(nnx.eval_shape(lambda: MixtureFeedForward(settings, nnx.Rngs(0))))
    placed = jax.device_put(parameters, tree.shardings(abstract, mesh))
    with jax.set_mesh(mesh), kernels.using_kernels("xla", expert_parallel=ways):
        return jax.device_get(jax.jit(run)(placed, x))


@functools.cache
def on_one_device(variant, skew):
    return gradients(model(variant), skew)


CASES = [
    pytest.param(variant, skew, layout, id=f"{variant}-{skew}-{Layout(layout)}")
    for variant, skew, layout in itertools.product(VARIANTS, SKEWS, LAYOUTS)
]
SAMPLE = ("biases-one-expert 8",)


@pytest.mark.parametrize("variant, skew, layout", sampled(CASES, SAMPLE))
def test_outputs_and_gradients_are_those_of_one_device(variant, skew, layout):
    """Also where all tokens choose two experts of one device, whose rows then take several passes."""
    y, statistics, of_all = gradients(model(variant), skew, layout)
    expected, expected_statistics, expected_of_all = on_one_device(variant, skew)
    assert skew != "one" or statistics["expert_overflow"] == 1.0
    assert statistics.keys() - expected_statistics.keys() == {"expert_overflow"}
    model_fixtures.assert_same_numbers(y, expected, 1e-5)
    model_fixtures.assert_same_numbers(of_all, expected_of_all, 1e-4)


@pytest.mark.exhaustive
def test_a_token_that_is_nan_reaches_no_other():
    """Not the padding either, whose numbers nobody sends."""
    whole, _, (_, d_x) = gradients(model("biases"), "skewed", {"expert": 4})

    def changed(x):
        x[1, 2] = x[3, -2] = np.nan
        return x

    y, _, (_, other) = gradients(model("biases"), "skewed", {"expert": 4}, change=changed)
    assert np.isnan(y[1, 2]).all()
    for found, expected in ((y, whole), (other, d_x)):
        is_other = np.ones((B, T), bool)
        is_other[1, 2] = is_other[3, -2] = False
        np.testing.assert_array_equal(found[is_other], expected[is_other])


@pytest.mark.parametrize("devices", sampled([2, 4, 8], ["4"]))
def test_passes_send_each_row_once_and_in_order(devices):
    draw = np.random.default_rng(devices)
    for share in (np.ones(devices + 1), np.arange(devices + 1) ** 4 + 0.1):
        owner = draw.choice(devices + 1, 100, p=share / share.sum()).astype(np.int32)  # the last of none
        room, sent = _room(100, devices), []
        for number in range(-(-np.bincount(owner, minlength=devices)[:devices].max() // room)):
            choice, slot = map(np.asarray, _slots(jnp.asarray(owner), devices, number))
            taken = np.flatnonzero(choice < 100)
            assert (owner[choice[taken]] == taken // room).all()  # to the device of its expert
            assert (slot[choice[taken]] == taken).all() and (slot < devices * room).sum() == len(taken)
            sent += [*choice[taken]]
        assert sorted(sent) == list(np.flatnonzero(owner < devices))
    assert _room(100, devices) * devices >= 125


def test_a_sum_over_passes_has_the_gradient_of_a_sum():
    def one(number, operands):
        x, scale = operands
        return jnp.sin(x * scale * (number + 1))

    def expected(x, passes):
        return sum(jnp.sin(x * 0.5 * (i + 1)) for i in range(passes))

    x, d = jnp.linspace(-1, 1, 7), jnp.linspace(2, 1, 7)
    for passes in (1, 2, 4):
        summed = jax.jit(lambda x, passes: summed_passes(one, passes, (x, jnp.float32(0.5))))
        y, back = jax.vjp(lambda x, n=passes, summed=summed: summed(x, jnp.int32(n)), x)
        other, other_back = jax.vjp(lambda x, n=passes: expected(x, n), x)
        np.testing.assert_allclose(y, other, rtol=1e-6)
        np.testing.assert_allclose(back(d)[0], other_back(d)[0], rtol=1e-5, atol=1e-6)


def test_rows_are_sent_where_that_is_fewer_bytes():
    """8 devices gather 8 numbers, and send 5 / 4 for each of two experts."""
    for devices, expected in ((1, "gather"), (2, "gather"), (4, "all_to_all"), (8, "all_to_all")):
        assert way("auto", model(), devices) == expected
    assert way("auto", model_fixtures.model(), 8) == "gather"
    assert way("gather", model(), 8) == "gather" and way("all_to_all", model(), 2) == "all_to_all"


def hidden_rows(way_, expert):
    """Return the rows of hidden numbers on a device, as they are counted, over an equal share."""
    work = workload("train", model(context_length=64), 8, 64, layout=Layout(expert=expert), expert_parallel=way_)
    step = device_step(work)
    (up,) = [use for use in step.recording.uses if use.scope.endswith("feed_forward/up")]
    return step.local(up).results[0].numbers / 128 / (8 * 64 * K / expert)


def test_a_device_has_room_for_five_quarters_of_its_share():
    assert [hidden_rows("all_to_all", n) for n in (2, 4, 8)] == [1.25] * 3
    assert [hidden_rows("gather", n) for n in (2, 4, 8)] == [2, 4, 8]


CHIPS = {
    "cpu": lambda: jax.devices()[:4],
    "tpu": lambda: targets.devices(Target.parse("tpu-v5e:2x2")),
    "cuda": lambda: targets.devices(Target.parse("h100-sxm5:4")),
}
PROGRAMS = [
    pytest.param(platform, remat, marks=[] if platform == "cpu" else [ELSEWHERE, pytest.mark.slow])
    for platform in CHIPS
    for remat in ("none", "full")
]


@pytest.mark.parametrize("platform, remat", sampled(PROGRAMS, ["cpu-full"]))
def test_rows_are_sent_as_is_counted(platform, remat):
    """Experts stay, and tokens are not gathered."""
    settings = model_fixtures.model(feed_forward=PLAIN, num_layers=2)
    # XLA's CPU compiler aborts on some products of bfloat16 under a shard_map.
    execution = {"dtype": "float32" if platform == "cpu" else "bfloat16", "remat": remat, "kernels": "xla"}
    execution |= {"expert_parallel": "all_to_all", "scan_layers": True}
    step = TrainStep(settings, *model_fixtures.sections(batch=16, **execution), model_fixtures.optimization())
    layout = Layout(expert=4)
    mesh = meshes.make(**layout, devices=CHIPS[platform]())
    shape = 16, model_fixtures.CONTEXT
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=named_sharding(axes_of(name), shape, mesh))
        for name in PER_TOKEN
    }
    with jax.set_mesh(mesh):
        shapes = tree.placed(jax.eval_shape(step.init), step.shardings(mesh))
        text = step.jitted(mesh).train.lower(shapes, batch).compile().as_text()
    trips = {xla.loop_name(tile): 1 for tile in range(1, 257)} | {FURTHER: 0}
    trips |= {xla.loop_name(2 * first, first): 1 for first in range(1, 129)}
    found, counted = Counter(), Counter()
    for each in collectives.collectives(hlo.parse(text, trips=trips), layout):
        found[each.kind, each.axes] += each.count * each.bytes
        assert each.kind != "all-gather" or each.bytes < 8 * 128 * D * 2
    work = workload("train", settings, *shape, layout=layout, **execution)
    for each in traffic.collectives(work):
        counted[each.kind, each.axes] += each.times * each.bytes
    sent = "all-to-all", ("expert",)
    assert found[sent] == counted[sent] > 0


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("chips", ["h100-sxm5:16", "tpu-v5p:2x2x4", "tpu-v5e:4x4"])
def test_a_mixture_on_sixteen_devices_is_compiled_as_counted(chips):
    """Four layers of 64 experts as wide as those of Mixtral 8x7B together."""
    target = Target.parse(chips)
    sizes = "model.num_layers=4", "model.feed_forward.num_experts=64", "model.feed_forward.d_ff=1792"
    run = "training.batch=16", "training.sequence=4096", "execution.remat=full"
    experiment = config.load("mixtral-8x7b", [*sizes, *run])
    mesh = meshes.make(expert=16, devices=targets.devices(target))
    found = report.compile(experiment, "train", target, mesh).report
    assert (found.flops, found.kernel_flops) == (found.counted_flops, found.counted_kernel_flops)
    assert found.memory.peak == pytest.approx(found.plan.memory.total, rel=0.1)
    counted = [each for each in traffic.collectives(found.work) if each.kind == "all-to-all"]
    sent = [each for each in found.collectives if each.kind == "all-to-all"]
    assert sum(c.times * c.bytes for c in counted) == sum(c.count * c.bytes for c in sent) > 0
