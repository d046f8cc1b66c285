"""The recording of a model's forward pass, and what follows from its edges."""

import random

import jax
import jax.numpy as jnp
import model_fixtures
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from matrices import sampled
from workload_fixtures import workload

from jaxlm.costs import paper
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.step import operations
from jaxlm.models import operations as model_operations
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.rows import Auxiliary
from jaxlm.parallel.layout import AXES
from jaxlm.training.step import make_steps

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


@pytest.mark.parametrize("seed", sampled(range(60), {str(n) for n in range(6)}))
def test_kernels_of_frozen_steps_declare_what_is_counted(seed):
    """With any names kept and anything frozen, both counters find the same FLOPs of products and of kernels."""
    family, remat, patterns = drawn(seed)
    settings = model_fixtures.FAMILIES[family]
    model = model_fixtures.model(settings, attention={**settings["attention"], "head_dim": 16})
    groups = [{"pattern": pattern, "learning_rate_scale": 0.0} for pattern in patterns]
    training = model_fixtures.training(remat=remat, kernels="auto", dtype="bfloat16")
    steps = make_steps(model, training, model_fixtures.optimization(groups=groups))
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    device = AbstractDevice("NVIDIA H200", 1, "gpu")
    mesh = AbstractMesh((1, 1, 1), AXES, (AxisType.Auto,) * 3, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        read = count(steps.train, jax.eval_shape(steps.init), batch)
    work = workload("train", model, 8, model_fixtures.CONTEXT, remat=remat, frozen=patterns, kernels="auto")
    ops = operations.step(work)
    kernels = sum(op.times * (op.flops + op.elementwise) for op in ops if op.kernel)
    assert sum(op.times * op.flops for op in ops if not op.kernel) == read.matmul_flops
    assert kernels == read.kernel_flops


def test_a_layer_is_recorded_once_and_knows_how_often_it_runs():
    model = model_fixtures.model(model_fixtures.QWEN3)
    found = paper.record(model, "train", 16, False)
    linear = [use for use in found.uses if use.name == "linear"]
    assert {use.times for use in linear} == {model.num_layers} and len(linear) == 7
    assert {found.names.get(value) for use in found.uses for value in use.results} > set(NAMES)
    assert found.uses[-1].name == "cross_entropy" and found.uses[-1].times == 1


def test_a_product_outside_of_the_operations_is_refused(monkeypatch):
    def call(self, x, rows):
        return jnp.einsum("BTD,DF,FE->BTE", x, self.up[...], self.down[...]), Auxiliary()

    monkeypatch.setattr(DenseFeedForward, "__call__", call)
    with pytest.raises(ValueError, match="layers.* multiplies outside of the operations of a model"):
        paper.record(model_fixtures.model(num_layers=5), "train", 16, False)


def test_nothing_is_recorded_outside_of_a_recording():
    x = jnp.ones((1, 2, 4))
    assert "operation" not in str(jax.make_jaxpr(lambda x: model_operations.add(x, x))(x))
