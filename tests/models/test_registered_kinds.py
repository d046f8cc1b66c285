"""An attention kind and a feed-forward kind of one's own: all that they need stands in this file."""

import platform
import sys
from collections import Counter
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import drawn

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.core.schema import Count
from jaxlm.costs.counted import operations, traffic
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.workload import Workload
from jaxlm.inference.requests import Sampling
from jaxlm.lowering import report, targets
from jaxlm.models import attention, feed_forward, tree
from jaxlm.models import config as models
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import activation, kv_heads, linear, rope
from jaxlm.models.doors import attention as attend
from jaxlm.models.grouped_query_config import GroupedQueryAttentionConfig
from jaxlm.models.logical_axes import HEADS, KV_HEADS
from jaxlm.models.parameters import Module, normal, ones, param
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.training.step import TrainStep


class GatedMultiQueryConfig(models.AttentionConfig):
    """Multi-query attention with a temperature of each head, and a gate on what it reads."""

    activations: ClassVar = ("query", "key", "value", "reading_gate", "attention")
    logical_axes: ClassVar = {"num_heads": "heads"}
    rotated: ClassVar = "head_dim"

    kind: Literal["gated_mqa"] = "gated_mqa"
    num_heads: Count
    head_dim: Count


class GatedMultiQuery(Module):
    """(σ(x·W_g) ⊙ attention(τ · x·W_q, x·w_k, x·w_v))·W_o."""

    def __init__(self, model, rngs):
        self.settings = settings = model.attention
        D, N, H, initial = model.d_model, settings.num_heads, settings.head_dim, normal(model.initializer_std)
        self.query = param(rngs, (D, N, H), "embed -> heads head_dim", initial)
        self.key = param(rngs, (D, 1, H), "embed -> kv_heads head_dim", initial)
        self.value = param(rngs, (D, 1, H), "embed -> kv_heads head_dim", initial)
        self.gate = param(rngs, (D, N, H), "embed -> heads head_dim", initial)
        self.output = param(rngs, (N, H, D), "heads head_dim -> embed", initial)
        self.temperature = param(rngs, (N,), "heads", ones)

    def slots(self) -> dict[str, Slot]:
        slot = Slot((kv_heads(1, self.settings.num_heads), self.settings.head_dim), KV_HEADS[2:])
        return {"key": slot, "value": slot}

    def __call__(self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache):
        matrices, names = (self.query, self.key, self.value, self.gate), ("query", "key", "value", "reading_gate")
        query_BTNH, key_BTKH, value_BTKH, gate_BTNH = linear(
            x_BTD, *matrices, names=names, num_query_heads=self.settings.num_heads
        )
        query_BTNH = query_BTNH * self.temperature[...][None, None, :, None]
        key_BTKH = rope(key_BTKH, KV_HEADS, rows.rope)
        cache = cache.update(rows, key=key_BTKH, value=value_BTKH)
        attended_BTNH = attend(rope(query_BTNH, HEADS, rows.rope), cache.view())
        (output_BTD,) = linear(jax.nn.sigmoid(gate_BTNH) * attended_BTNH, self.output)
        return output_BTD, cache, Auxiliary()


class BilinearConfig(models.LayerConfig):
    """The square of the positive part of a product of two projections."""

    activations: ClassVar = ("left", "right")
    logical_axes: ClassVar = {"hidden_dim": "feed_forward"}

    kind: Literal["bilinear"] = "bilinear"
    hidden_dim: Count


class Bilinear(Module):
    """relu(x·W_left ⊙ x·W_right)²·W_down."""

    def __init__(self, model, rngs):
        D, F, initial = model.d_model, model.feed_forward.hidden_dim, normal(model.initializer_std)
        self.left = param(rngs, (D, F), "embed -> feed_forward", initial)
        self.right = param(rngs, (D, F), "embed -> feed_forward", initial)
        self.down = param(rngs, (F, D), "feed_forward -> embed", initial)

    def __call__(self, x_BTD: jax.Array, rows: RowContext):
        left_BTF, right_BTF = linear(x_BTD, self.left, self.right, names=("left", "right"))
        (output_BTD,) = linear(activation("relu_squared", left_BTF * right_BTF), self.down)
        return output_BTD, Auxiliary()


@pytest.fixture(autouse=True, scope="module")
def kinds_are_registered():
    attention.register(GatedMultiQueryConfig, GatedMultiQuery)
    feed_forward.register(BilinearConfig, Bilinear)
    yield
    attention.unregister(GatedMultiQueryConfig)
    feed_forward.unregister(BilinearConfig)


FILE = """
[model]
vocab_size = 512
context_length = 32
num_layers = 2
d_model = 32
initializer_std = 0.2

[model.norm]
kind = "rms"

[model.position]
kind = "rope"

[model.attention]
kind = "gated_mqa"
num_heads = 4

[model.feed_forward]
kind = "bilinear"
hidden_dim = 48

[execution]
dtype = "float32"

[training]
batch = 8
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def load(file, *overrides):
    return config.load(file, overrides)


def test_a_resolved_file_loads_back_to_the_same(file, tmp_path):
    """With all keys, the width of a head among them that the file leaves out."""
    experiment = load(file, "model.feed_forward.hidden_dim=64")
    assert experiment.model.attention == GatedMultiQueryConfig(num_heads=4, head_dim=8)
    assert experiment.model.feed_forward == BilinearConfig(hidden_dim=64)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(experiment.to_toml())
    assert load(resolved) == experiment
    assert models.ModelConfig(**experiment.model.model_dump()) == experiment.model


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.attention.num_head=4", "unknown key model.attention.num_head; did you mean model.attention.num_heads?"),
        (
            "model.attention.soft_cap=4.0",
            "unknown key model.attention.soft_cap; it is a key of model.attention.kind = 'gqa'",
        ),
        ("model.feed_forward.hidden_dims=4", "did you mean model.feed_forward.hidden_dim?"),
        (
            "model.attention.kind=mla",
            "model.attention.kind = 'mla' is none of 'gqa', 'latent', 'gated_delta', 'short_convolution', "
            "'mamba2', 'none', 'gated_mqa'",
        ),
        (
            "model.feed_forward.kind=moe",
            "model.feed_forward.kind = 'moe' is none of 'dense', 'mixture', 'none', 'bilinear'",
        ),
        ("model.attention.num_heads=5", "model.attention.num_heads = 5 does not divide model.d_model = 32"),
        ("model.attention.head_dim=7", "model.attention.head_dim = 7: it must be even"),
        ("mesh.tensor=3", "mesh.tensor = 3 does not divide model.attention.num_heads = 4"),
        (
            "execution.remat=['up']",
            "execution.remat keeps up, which no layer of the model has; what it can keep is query",
        ),
    ],
)
def test_a_refusal_knows_the_kinds(file, override, says):
    with pytest.raises(InputError) as refused:
        load(file, override)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_an_override_changes_the_kind_and_drops_its_keys(file):
    model = load(
        file, "model.feed_forward={kind='dense', d_ff=64, activation='silu'}", "model.attention.kind=gqa"
    ).model
    assert model.attention == GroupedQueryAttentionConfig(num_heads=4, head_dim=8)
    assert model.feed_forward.kind == "dense"


def test_a_kind_has_one_section():
    class Another(models.LayerConfig):
        kind: Literal["bilinear"] = "bilinear"

    class Nameless(models.LayerConfig):
        pass

    feed_forward.register(BilinearConfig, Bilinear)  # the same again, as where a file is imported twice
    with pytest.raises(ValueError, match="kind = 'bilinear' is BilinearConfig; Another needs another"):
        feed_forward.register(Another, Bilinear)
    with pytest.raises(ValueError, match="Nameless needs a kind"):
        feed_forward.register(Nameless, Bilinear)
    with pytest.raises(ValueError, match="BilinearConfig must derive from AttentionConfig"):
        attention.register(BilinearConfig, Bilinear)


def test_it_trains(file):
    model = load(file).model
    batches = [model_fixtures.batch(seed=seed, vocabulary=model.vocab_size) for seed in (0, 0)]
    metrics, state = model_fixtures.run_steps(model, model_fixtures.sections(), batches)
    assert metrics[1]["loss"] < metrics[0]["loss"]
    moved = tree.paths(jax.tree.map(lambda m: float(np.abs(m).max()), state.optimizer[1][0].mu))
    assert min(moved.values()) > 0 and {"layers/attention/temperature", "layers/feed_forward/right"} < moved.keys()


@pytest.mark.exhaustive
def test_losses_and_gradients_do_not_depend_on_the_mesh(file):
    """Four devices have the one key head."""
    model = load(file).model
    expected_loss, expected = model_fixtures.first_gradients(model, meshes.make())
    loss, gradients = model_fixtures.first_gradients(model, meshes.make(fsdp=2, tensor=4))
    model_fixtures.assert_same_numbers(loss, expected_loss, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


REMATS = ("none", "full", ("query", "reading_gate", "left"), ("attention", "left", "right"))


def a_step(file, remat):
    """Return a training step as the Workload that is counted, and as a function with the shapes of its operands."""
    experiment = load(file, "execution.kernels=xla", f"execution.remat={list(remat) if remat in REMATS[2:] else remat}")
    steps = TrainStep.of(experiment)
    shape = jax.ShapeDtypeStruct((experiment.training.batch, experiment.training.sequence), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    return Workload.of(experiment), steps.train, (jax.eval_shape(steps.init), batch)


@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_it_is_counted_to_the_last_flop(file, remat):
    work, train, operands = a_step(file, remat)
    assert sum(op.times * op.flops for op in operations.step(work)) == count(train, *operands).matmul_flops


def test_a_cached_generation_is_the_full_forward_pass(file):
    model, mesh = load(file).model, meshes.make(data=2, tensor=2)
    parameters, graph = model_fixtures.placed(model, mesh), tree.abstract(model)[0]
    prompts = [[1, 2, 3, 4, 5], [7, 8]]
    continued = drawn(model, parameters, prompts, 8, mesh, sampling=Sampling(temperature=0.0))
    host = jax.device_get(parameters)
    for prompt, new in zip(prompts, continued, strict=True):
        logits = model_fixtures.full_logits(graph, host, [*prompt, *new[:-1]])
        assert np.argmax(logits[len(prompt) - 1 :], axis=-1).tolist() == new


LARGER = (
    *("model.d_model=512", "model.attention.num_heads=8", "model.attention.head_dim=64", "training.batch=16"),
    *("model.feed_forward.hidden_dim=1536", "model.vocab_size=4096", "model.context_length=512"),
    *("model.num_layers=4", "execution.dtype=bfloat16"),
)


@pytest.mark.exhaustive  # tests/lowering/test_report.py compiles a step of jaxlm's own kinds
@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.parametrize("sizes", [(1, 4, 1), (1, 1, 4)], ids=str)
def test_memory_and_collectives_are_those_of_the_compiled_step(file, sizes):
    target = Target.parse("h200-sxm:4")
    mesh = meshes.make(*sizes, devices=targets.devices(target))
    experiment = load(file, *LARGER, *(["execution.kernels=xla"] if sizes[2] > 1 else []))
    found = report.compile(experiment, "train", target, mesh, False).report
    assert found.flops == found.counted_flops
    assert found.plan.memory.total == pytest.approx(found.memory.peak, rel=0.1)
    sent, counted = Counter(), Counter()
    for c in found.collectives:
        sent[c.kind, c.axes] += c.count * c.bytes
    for c in traffic.collectives(found.plan.work):
        counted[c.kind, c.axes] += c.times * c.bytes
    large = [kind for kind in sent.keys() | counted.keys() if kind[0] != "all-reduce"]  # of vectors, and of the loss
    assert {kind: counted[kind] for kind in large} == {kind: sent[kind] for kind in large}
