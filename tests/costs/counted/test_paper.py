"""The recording of a model's forward pass, and what follows from its edges."""

import random

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from matrices import sampled
from workload_fixtures import workload

from jaxlm.costs.counted import operations, paper
from jaxlm.costs.jaxpr.count import count
from jaxlm.models import doors
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.rows import Auxiliary
from jaxlm.parallel.layout import AXES
from jaxlm.training.step import TrainStep

NAMES = ("query", "key", "value", "attention", "up", "gate")
PATTERNS = (
    "layers/*",
    "layers/feed_forward/*",
    "layers/attention/*",
    "layers/feed_forward/down",
    "embedding",
    "*norm*",
)


def drawn(seed):
    """Return a family, the names that are kept and the pattern that is frozen."""
    draw = random.Random(seed)
    family = draw.choice(sorted(model_fixtures.FAMILIES))
    kept = tuple(draw.sample(NAMES, draw.randint(1, 5)))
    return family, draw.choice(["none", "full", kept, kept, kept]), [draw.choice(PATTERNS)]


CHIPS = {"gpu": AbstractDevice("NVIDIA H200", 1, "gpu"), "tpu": AbstractDevice("TPU v5 lite", 1, "tpu")}


def assert_counted(model, remat, patterns, platform):
    """Assert that the jaxpr of a step and its count have the same FLOPs, of products and of kernels."""
    groups = [{"pattern": pattern, "learning_rate_scale": 0.0} for pattern in patterns]
    training = model_fixtures.training(remat=remat, kernels="auto", dtype="bfloat16")
    steps = TrainStep(model, training, model_fixtures.optimization(groups=groups))
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    mesh = AbstractMesh((1, 1, 1), AXES, (AxisType.Auto,) * 3, abstract_device=CHIPS[platform])
    with jax.sharding.use_abstract_mesh(mesh):
        read = count(steps.train, jax.eval_shape(steps.init), batch)
    changes = {"remat": remat, "frozen": patterns, "kernels": "auto", "platform": platform}
    ops = operations.step(workload("train", model, 8, model_fixtures.CONTEXT, **changes))
    assert sum(op.times * op.flops for op in ops if not op.kernel) == read.matmul_flops
    assert sum(op.times * (op.flops + op.elementwise) for op in ops if op.kernel) == read.kernel_flops
    return any(op.kernel and op.product for op in ops)


@pytest.mark.parametrize("seed", sampled(range(60), {"1", "4", "5"}))
def test_kernels_of_frozen_steps_declare_what_is_counted(seed):
    """With any names kept and anything frozen."""
    family, remat, patterns = drawn(seed)
    settings = model_fixtures.FAMILIES[family]
    model = model_fixtures.model(settings, attention={**settings["attention"], "head_dim": 16})
    assert_counted(model, remat, patterns, ("gpu", "tpu")[seed % 2])


@pytest.mark.parametrize(
    "form",
    sampled(
        [pytest.param(form, id="-".join(form.values())) for form in model_fixtures.BLOCKS],
        ["before-parallel_shared_norm", "after-sequential", "both-parallel"],
    ),
)
def test_kernels_of_every_form_of_a_block_declare_what_is_counted(form):
    attention = {**model_fixtures.LLAMA["attention"], "head_dim": 16}
    assert assert_counted(model_fixtures.model(**form, attention=attention), ("query", "up"), [], "gpu")


@pytest.mark.parametrize(("platform", "runs"), [("gpu", False), ("tpu", True)])
def test_a_kernel_for_attention_is_counted_where_it_runs(platform, runs):
    """Triton's takes head dims that 16 divides, Mosaic's any."""
    model = model_fixtures.model(attention={"num_heads": 8, "num_kv_heads": 4, "head_dim": 24})
    assert assert_counted(model, ("query", "attention"), [], platform) == runs


def test_a_layer_is_recorded_once_and_knows_how_often_it_runs():
    model = model_fixtures.model(model_fixtures.QWEN3)
    found = paper.record(model, "train", 16, False)
    linear = [use for use in found.uses if use.name == "linear"]
    assert {use.times for use in linear} == {model.num_layers} and len(linear) == 7
    assert {found.names.get(value) for use in found.uses for value in use.results} > set(NAMES)
    assert found.uses[-1].name == "cross_entropy" and found.uses[-1].times == 1


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_a_recording_knows_nothing_of_a_mesh_around(kind):
    """Key/value heads that the mesh does not divide are neither refused nor copied."""
    model = model_fixtures.model(model_fixtures.QWEN3)
    record = paper.record.__wrapped__
    with jax.set_mesh(meshes.make(tensor=8)):
        inside = record(model, kind, 16, False)
    assert inside == record(model, kind, 16, False)


def test_a_product_outside_of_the_operations_is_refused(monkeypatch):
    def call(self, x, rows):
        return jnp.einsum("BTD,DF,FE->BTE", x, self.up[...], self.down[...]), Auxiliary()

    monkeypatch.setattr(DenseFeedForward, "__call__", call)
    with pytest.raises(ValueError, match="layers.* multiplies outside of the operations of a model"):
        paper.record(model_fixtures.model(num_layers=5), "train", 16, False)


def test_nothing_is_recorded_outside_of_a_recording():
    x = jnp.ones((1, 2, 4))
    assert "door" not in str(jax.make_jaxpr(lambda x: doors.add(x, x))(x))
