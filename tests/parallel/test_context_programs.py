"""Programs of steps whose devices share sequences hold the collectives that are counted, on every compiler."""

import platform
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from matrices import sampled
from workload_fixtures import workload

from jaxlm import config
from jaxlm.costs.counted import traffic
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import collectives, hlo, report, targets
from jaxlm.parallel.batches import PER_TOKEN, axes_of
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding
from jaxlm.training.step import TrainStep

BATCH, LENGTH = 8, 64
SETTINGS = {"microbatches": 2, "remat": "full", "kernels": "xla", "scan_layers": True}
four = {
    "cpu": lambda: jax.devices()[:4],
    "tpu": lambda: targets.devices(Target.parse("tpu-v5e:2x2")),
    "cuda": lambda: targets.devices(Target.parse("h100-sxm5:4")),
}
elsewhere = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="its compilers are for Linux on x86-64"
)
# XLA's CPU compiler aborts on some products of bfloat16 under a shard_map.
DTYPES = {"cpu": "float32", "tpu": "bfloat16", "cuda": "bfloat16"}


def compiled_and_counted(platform, way, family=model_fixtures.LLAMA, **layout):
    """Return the collectives of a compiled step and those that are counted."""
    model = model_fixtures.model(family, context_length=LENGTH)
    mesh = meshes.make(**layout, devices=four[platform]())
    settings = {**SETTINGS, "dtype": DTYPES[platform], "context_parallel": way}
    sections = model_fixtures.sections(batch=BATCH, sequence=LENGTH, **settings)
    steps = TrainStep(model, *sections, model_fixtures.optimization())
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(steps.init),
        steps.shardings(mesh),
    )
    shape = BATCH, LENGTH
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=named_sharding(axes_of(name), shape, mesh))
        for name in PER_TOKEN
    }
    with jax.set_mesh(mesh):
        program = hlo.parse(steps.jitted(mesh).train.lower(state, batch).compile().as_text())
    work = workload("train", model, BATCH, LENGTH, layout=Layout(layout), **settings)
    return collectives.collectives(program, dict(mesh.shape)), traffic.collectives(work)


def bytes_over_context(found, counted):
    sent, expected = Counter(), Counter()
    for c in found:
        sent[c.kind] += c.count * c.bytes * (c.axes == ("context",))
    for c in counted:
        expected[c.kind] += c.times * c.bytes * (c.axes == ("context",))
    return sent, expected


def assert_gathers_are_as_counted(platform, sent, expected):
    # XLA may gather the embedding table for each microbatch, and a TPU a matrix for each product that reads it; a CPU
    # does not gather a vector that is not read.
    most = 1.5 if platform == "tpu" else 1.2
    assert 0.95 * expected["all-gather"] <= sent["all-gather"] <= most * expected["all-gather"]


CASES = [
    pytest.param(way, name, marks=[] if name == "cpu" else [elsewhere, pytest.mark.slow])
    for way in ("ring", "heads", "gather")
    for name in four
]


@pytest.mark.parametrize("way, platform", sampled(CASES, ["ring-cpu"]))
def test_keys_are_sent_as_is_counted(way, platform):
    """A ring has permutations and gathers no key; heads are exchanged by all-to-alls; gathers are of keys and values
    besides parameters."""
    found, counted = compiled_and_counted(platform, way, context=4)
    sent, expected = bytes_over_context(found, counted)
    for kind in ("collective-permute", "all-to-all"):
        assert sent[kind] == expected[kind]
    kinds = {c.kind for c in counted if c.of == "keys"}
    assert (
        kinds
        == {
            "ring": {"collective-permute"},
            "heads": {"all-to-all"},
            "gather": {"all-gather", "reduce-scatter"},
        }[way]
    )
    of_keys = [c for c in found if c.kind == "all-gather" and "all_gather" in c.scope]
    assert bool(of_keys) == (way == "gather")
    assert_gathers_are_as_counted(platform, sent, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family, hops", [("mistral", 3), ("gemma", 4)])
def test_a_ring_of_windows_sends_what_is_counted(family, hops):
    """A chunk has eight tokens: with windows of five in every layer one hop of four is skipped. Layers that may share a
    body with one without a window skip none."""
    found, counted = compiled_and_counted("cpu", "ring", model_fixtures.FAMILIES[family], context=4)
    sent, expected = bytes_over_context(found, counted)
    assert sent["collective-permute"] == expected["collective-permute"] > 0
    (first, *_) = [c for c in counted if c.kind == "collective-permute"]
    assert first.times % (2 * (hops - 1)) == 0


@pytest.mark.parametrize("platform", sampled([pytest.param(*p.values[1:], marks=p.marks) for p in CASES[:3]], ["cpu"]))
def test_parameters_are_gathered_and_not_the_residual(platform):
    """Beside `tensor` too, where left to itself the partitioner gathers tokens over `context`."""
    found, counted = compiled_and_counted(platform, "ring", context=2, tensor=2)
    sent, expected = bytes_over_context(found, counted)
    assert not sent["all-to-all"]
    assert_gathers_are_as_counted(platform, sent, expected)


@pytest.mark.exhaustive
@pytest.mark.slow
@elsewhere
def test_a_long_sequence_of_405b_is_compiled_as_counted():
    """Eight layers of Llama 3.1 405B at 131,072 tokens, of which each of 16 devices has some."""
    target, settings = Target.parse("h100-sxm5:64"), ["model.num_layers=8", "training.sequence=131072"]
    experiment = config.load("llama3.1-405b", [*settings, "training.batch=4", "execution.remat=full"])
    mesh = meshes.make(context=16, tensor=4, devices=targets.devices(target))
    found = report.compile(experiment, "train", target, mesh).report
    assert found.flops == found.counted_flops
    assert found.memory.peak == pytest.approx(found.plan.memory.total, rel=0.1)
    permuted = [each for each in traffic.collectives(found.work) if each.kind == "collective-permute"]
    sent = [each for each in found.collectives if each.kind == "collective-permute"]
    assert sum(c.times * c.bytes for c in permuted) == sum(c.count * c.bytes for c in sent) > 0
    assert all(c.behind for c in permuted if c.times > 16)  # those that go home alone are waited for
    assert not [c for c in found.collectives if c.kind == "all-gather" and "all_gather" in c.scope]
