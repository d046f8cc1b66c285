"""A feed-forward kind with a door of its own: all that they need stands in this file."""

import platform
import sys
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from matrices import sampled
from workload_fixtures import workload

from jaxlm import config
from jaxlm.core.schema import Count
from jaxlm.costs.counted import operations, traffic
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.plan import plan
from jaxlm.lowering import report, targets
from jaxlm.models import config as models
from jaxlm.models import feed_forward
from jaxlm.models.doors import linear
from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, LocalArray, Product, Saved
from jaxlm.models.doors.door import DOORS, Signature, door
from jaxlm.models.logical_axes import HEADS
from jaxlm.models.parameters import Module, axes_of, normal, param
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.parallel.layout import Layout
from jaxlm.training.step import TrainStep
from kernels_pallas import flash_attention


def _signature(x_BTNH, matrix) -> Signature:
    operands, y = [(x_BTNH, HEADS), (matrix[...], axes_of(matrix))], jax.ShapeDtypeStruct(x_BTNH.shape, x_BTNH.dtype)
    return Signature(operands, [(y, HEADS)], of=matrix)


def _declare(local: Local) -> DoorCost:
    (x, matrix), (y,) = local.operands, local.results
    (B, T, N, H), (_, _, E) = x.shape, matrix.shape
    product = DoorProduct(Product(N, B * T, H, E), x.bytes + matrix.bytes + y.bytes, weight=1)
    return DoorCost((product,), saved=Saved((0,) if matrix.is_trained else ()))


@door(_signature, _declare)
def blocks(x_BTNH: jax.Array, matrix) -> jax.Array:
    """Return each of N parts of x times a matrix of its own, [B, T, N, E]: a block-diagonal product."""
    return jnp.einsum("BTNH,NHE->BTNE", x_BTNH, matrix[...])


class BlocksConfig(models.LayerConfig):
    """A block-diagonal layer between two projections."""

    activations: ClassVar = ("inner",)
    logical_axes: ClassVar = {"parts": "heads"}

    kind: Literal["blocks"] = "blocks"
    parts: Count
    width: Count


class Blocks(Module):
    """max(blocks(x·W_in), 0)·W_out."""

    def __init__(self, model, rngs):
        settings, initial = model.feed_forward, normal(model.initializer_std)
        D, N, H = model.d_model, settings.parts, settings.width
        self.inner = param(rngs, (D, N, H), "embed -> heads head_dim", initial)
        self.blocks = param(rngs, (N, H, H), "heads head_dim channels", initial)
        self.outer = param(rngs, (N, H, D), "heads head_dim -> embed", initial)

    def __call__(self, x_BTD: jax.Array, rows: RowContext):
        (x_BTNH,) = linear(x_BTD, self.inner, names=("inner",))
        (y_BTD,) = linear(jnp.maximum(blocks(x_BTNH, self.blocks), 0), self.outer)
        return y_BTD, Auxiliary()


@pytest.fixture(autouse=True, scope="module")
def kind_is_registered():
    feed_forward.register(BlocksConfig, Blocks)
    yield
    feed_forward.unregister(BlocksConfig)


@pytest.fixture
def model():
    return model_fixtures.model(feed_forward={"kind": "blocks", "parts": 4, "width": 16})


def test_it_trains_and_does_not_depend_on_the_mesh(model):
    batches = [model_fixtures.batch(seed=seed, vocabulary=model.vocab_size) for seed in (0, 0)]
    metrics, _ = model_fixtures.run_steps(model, model_fixtures.sections(), batches)
    assert metrics[1]["loss"] < metrics[0]["loss"]
    expected_loss, expected = model_fixtures.first_gradients(model, meshes.make())
    loss, gradients = model_fixtures.first_gradients(model, meshes.make(fsdp=2, tensor=4))
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.parametrize("remat", ["none", "full", ("inner",)], ids=str)
def test_it_is_counted_to_the_last_flop(model, remat):
    steps = TrainStep(model, *model_fixtures.sections(remat=remat, kernels="xla"), model_fixtures.optimization())
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    work = workload("train", model, 8, model_fixtures.CONTEXT, remat=remat, kernels="xla")
    traced = count(steps.train, jax.eval_shape(steps.init), batch).matmul_flops
    assert sum(op.times * op.flops for op in operations.step(work)) == traced


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_it_is_planned_on_a_mesh(model, kind):
    """Each device multiplies its own parts, and sums nothing for it."""
    whole = workload(kind, model, 8, 16, kernels="xla")
    layout = Layout(data=2, tensor=2)
    work = workload(kind, model, 8, 16, kernels="xla", layout=layout)

    def own(work):
        return sum(op.times * op.flops for op in operations.step(work) if op.scope.endswith("feed_forward/blocks"))

    parts = 4 if kind == "train" else 2  # the engine fills up its steps on each shard
    assert own(whole) >= parts * own(work) > 0
    assert "adapters" not in {each.of for each in traffic.collectives(work)}
    assert plan(work, Target.parse("h200-sxm:4")).memory.total > 0
    (use,) = (use for use in device_step(work).recording.uses if use.name == "blocks")
    assert device_step(work).local(use).operands[1].shape == (2, 16, 16)


FILE = """
[model]
vocab_size = 4096
context_length = 512
num_layers = 2
d_model = 256

[model.norm]
kind = "rms"

[model.position]
kind = "rope"

[model.attention]
kind = "gqa"
num_heads = 4

[model.feed_forward]
kind = "blocks"
parts = 4
width = 128
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.parametrize("kind", sampled(["train", "prefill"], ["prefill"]))  # train compiles for twice as long
def test_it_is_compiled_as_it_is_counted(kind, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    experiment = config.load(path, ["training.batch=8", "execution.kernels=xla"])
    target = Target.parse("h200-sxm:2")
    compiled = report.compile(experiment, kind, target, meshes.make(1, 1, 2, devices=targets.devices(target)), False)
    assert compiled.report.flops == compiled.report.counted_flops


@pytest.mark.parametrize("platform, kernels", [("gpu", False), ("cpu", False), ("gpu", True)])
@pytest.mark.parametrize("value_dim", [16, 64])
def test_attention_is_counted_with_values_of_their_own_width(platform, kernels, value_dim):
    """A mixer of one's own may have values that are wider than its keys."""
    B, T, N, K, H = 2, 64, 4, 2, 32
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, value_dim), (B, T, N, value_dim)
    *operands, result = (LocalArray(shape, "float32", (False,) * 4) for shape in shapes)
    options = ("soft_cap", None), ("window", None), ("is_causal", True), ("sinks", False)
    cost = DOORS["attention"].declare(Local(tuple(operands), (result,), options, platform, None, kernels, True, True))
    assert (cost.kernel is not None) == kernels

    def plain(query, key, value):
        return flash_attention(query, key, value, is_causal=True, implementation="xla")

    counted = sum(each.times * each.product.flops for each in cost.products)
    assert counted == count(plain, *(each.abstract for each in operands), platform=platform).matmul_flops
