"""The recording of a model's forward pass, and what follows from its edges."""

import random
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from jax.extend.core import Var
from jax.sharding import AbstractDevice
from matrices import sampled
from workload_fixtures import workload

from jaxlm.core.schema import Count
from jaxlm.costs.counted import operations, recorder
from jaxlm.costs.counted.axes import dimensions, through
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.plan import plan
from jaxlm.models import attention, doors
from jaxlm.models.doors import linear
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.layer_config import AttentionConfig
from jaxlm.models.parameters import Module, normal, param
from jaxlm.models.rows import Auxiliary
from jaxlm.parallel.layout import Layout
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
    sections = model_fixtures.sections(remat=remat, kernels="auto", dtype="bfloat16")
    steps = TrainStep(model, *sections, model_fixtures.optimization(groups=groups))
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    mesh = meshes.abstract(device=CHIPS[platform])
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


RECURRENT = {
    "gated_delta": {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 12},
    "mamba2": {"kind": "mamba2", "num_heads": 4, "head_dim": 6, "state_dim": 8, "num_groups": 2},
}


@pytest.mark.parametrize("remat", sampled(["none", "full"], ["full"]))
@pytest.mark.parametrize("platform", sampled(["gpu", "tpu"], ["gpu"]))
@pytest.mark.parametrize("kind", sampled(RECURRENT, ["gated_delta"]))
def test_kernels_of_linear_attention_declare_what_is_counted(kind, platform, remat):
    assert assert_counted(model_fixtures.model(attention=RECURRENT[kind]), remat, [], platform)


def test_a_layer_is_recorded_once_and_knows_how_often_it_runs():
    model = model_fixtures.model(model_fixtures.QWEN3)
    found = recorder.record(model, 16, False)
    linear = [use for use in found.uses if use.name == "linear"]
    assert {use.times for use in linear} == {model.num_layers} and len(linear) == 7
    assert {found.names.get(value) for use in found.uses for value in use.results} > set(NAMES)
    assert found.uses[-1].name == "cross_entropy" and found.uses[-1].times == 1


@pytest.mark.parametrize("kind", ["train", "engine"])
def test_a_recording_knows_nothing_of_a_mesh_around(kind):
    """Key/value heads that the mesh does not divide are neither refused nor copied."""
    model = model_fixtures.model(model_fixtures.QWEN3)
    record = {
        "train": lambda: recorder.record.__wrapped__(model, 16, False),
        "engine": lambda: recorder.record_engine.__wrapped__(model, 32),
    }[kind]
    with jax.set_mesh(meshes.make(tensor=8)):
        inside = record()
    assert inside == record()


def test_a_product_outside_of_the_operations_is_refused(monkeypatch):
    def call(self, x, rows):
        return jnp.einsum("BTD,DF,FE->BTE", x, self.up[...], self.down[...]), Auxiliary()

    monkeypatch.setattr(DenseFeedForward, "__call__", call)
    with pytest.raises(ValueError, match="layers.* multiplies outside of the doors of a model"):
        recorder.record(model_fixtures.model(num_layers=5), 16, False)


@pytest.mark.parametrize("form", ["while_loop", "cond"])
def test_a_product_whose_times_nobody_knows_is_refused(monkeypatch, form):
    def call(self, x, rows):
        def multiply(x):
            return linear(x, self.up)[0][..., : x.shape[-1]]

        if form == "cond":
            return jax.lax.cond(rows.is_token_BT.any(), multiply, lambda x: x, x), Auxiliary()
        return jax.lax.while_loop(lambda x: x.sum() > 0, multiply, x), Auxiliary()

    monkeypatch.setattr(DenseFeedForward, "__call__", call)
    with pytest.raises(ValueError, match=r"layers.* multiplies in a (while|cond), .*: use a scan") as refused:
        recorder.record(model_fixtures.model(num_layers=5), 16, False)
    assert "\n" not in str(refused.value)


class TransposedSumsConfig(AttentionConfig):
    """Sums over tokens of what a gate leaves, computed with heads before tokens."""

    kind: Literal["transposed_sums"] = "transposed_sums"
    num_heads: Count
    head_dim: Count


class TransposedSums(Module):
    """(Σ_t σ(x·W_g) ⊙ x·W_v)·W_o."""

    def __init__(self, model, rngs):
        D, N, H, initial = model.d_model, model.attention.num_heads, model.attention.head_dim, normal(0.02)
        self.gate, self.value = (param(rngs, (D, N, H), "embed -> heads head_dim", initial) for _ in range(2))
        self.output = param(rngs, (N, H, D), "heads head_dim -> embed", initial)

    def slots(self):
        return {}

    def __call__(self, x_BTD, rows, cache):
        gate_BTNH, value_BTNH = linear(x_BTD, self.gate, self.value, names=("gate", "value"))
        value_BNTH = jnp.swapaxes(value_BTNH, 1, 2) * jax.nn.sigmoid(jnp.swapaxes(gate_BTNH, 1, 2))
        sums_BTNH = jnp.swapaxes(jnp.cumsum(value_BNTH, axis=2), 1, 2)
        (output_BTD,) = linear(sums_BTNH, self.output)
        return output_BTD, cache, Auxiliary()


@pytest.fixture
def transposing():
    attention.register(TransposedSumsConfig, TransposedSums)
    yield model_fixtures.model(
        attention={"kind": "transposed_sums", "num_heads": 4, "head_dim": 16}, position={"kind": "none"}
    )
    attention.unregister(TransposedSumsConfig)


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_a_mixer_that_transposes_is_counted_on_a_mesh(transposing, kind):
    """Shapes of one token do not say which axis a dimension has: it follows the transposes."""
    layout = Layout(data=2, tensor=2)
    device = device_step(replace(workload(kind, transposing, 8, 16), layout=layout))
    between = [use for use in device.recording.uses if use.name == "elementwise"]
    axes = ("batch", "act_heads", "sequence", "act_head_dim")
    assert {use.marker.results[0] for use in between} == {axes} and len(between) >= 2
    rows, tokens = (4, 16) if kind == "train" else (device.work.rows(), 1)
    assert {device.local(use).results[0].shape for use in between} == {(rows, 2, tokens, 16)}
    assert plan(device.work, Target.parse("h200-sxm:4")).memory.total > 0


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (lambda x: x.transpose(2, 0, 1, 3), ("heads", "batch", "sequence", "width")),
        (lambda x: x.reshape(1, 1, -1), ("batch", "sequence", "heads·width")),
        (lambda x: x.reshape(1, 4, 6), ("batch", "sequence·heads", "width")),
        (lambda x: x[:, 0], ("batch", "heads", "width")),
        (lambda x: x[..., :3], ("batch", "sequence", "heads", "width")),
        (lambda x: x.astype(jnp.int32)[:, :, :, None], ("batch", "sequence", "heads", "", "width")),
        (lambda x: jnp.exp(x) - x.max(-1, keepdims=True), ("batch", "sequence", "heads", "width")),
        (lambda x: x.sum(2), ("batch", "sequence", "width")),
        (lambda x: x.reshape(1, 1, 12, 2), ("batch", "sequence", "", "")),
        (lambda x: x @ jnp.ones((6, 6)), None),
    ],
)
def test_axes_follow_the_equations(function, axes):
    """Arrays of one sequence and one token."""
    jaxpr = jax.make_jaxpr(function)(jnp.ones((1, 1, 4, 6))).jaxpr
    known = {jaxpr.invars[0]: dimensions(("batch", "sequence", "heads", "width"), (1, 1, 4, 6))}
    for eqn in jaxpr.eqns:
        known[eqn.outvars[0]] = through(eqn, [known.get(x) if isinstance(x, Var) else None for x in eqn.invars])
    found = known[jaxpr.outvars[0]]
    names = found and tuple("·".join(factor.axis or "" for factor in each) for each in found)
    assert names == axes


def test_nothing_is_recorded_outside_of_a_recording():
    x = jnp.ones((1, 2, 4))
    assert "door" not in str(jax.make_jaxpr(lambda x: doors.add(x, x))(x))
