"""Models with adapters: what is trained, what they compute, and what they are once added to what they adapt."""

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.models import tree
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.rules import TRAIN
from jaxlm.training.step import TrainStep

# The last has two stacks of parameters in three layers.
MODELS = {**model_fixtures.FAMILIES, "mixed": {**model_fixtures.MIXED, "num_layers": 3}}


def hidden(graph, parameters):
    module = nnx.merge(graph, parameters)
    tokens = jnp.asarray(model_fixtures.batch(rows=2)["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return module.hidden(tokens, positions, packed_causal_mask(positions))[0]


def trees(model, lora, scale=0.3):
    """Return (graph, base, adapters) with random adapters, both of whose matrices are there."""
    graph, _ = tree.abstract(model, lora)
    declared = tree.trained(tree.abstract(model, lora)[1])[0]
    draw = np.random.default_rng(1)
    adapters = jax.tree.map(lambda x: scale * draw.standard_normal(x.shape, np.float32), tree.shapes(declared))
    base = tree.under_adapters(model_fixtures.parameters(model), tree.targets(model, lora))
    return graph, base, adapters


@pytest.mark.parametrize("name", sampled(list(MODELS), ["gpt2"]))
def test_adapters_compute_what_their_sum_with_the_base_computes(name):
    """In float32 to the order of sums: (x·A)·B is not x·(A·B)."""
    model, lora = model_fixtures.model(MODELS[name]), LoraConfig(rank=3, alpha=6.0)
    graph, base, adapters = trees(model, lora)
    compute = jax.jit(lambda adapters: hidden(graph, tree.joined(base, adapters)))
    adapted, plain = map(np.asarray, (compute(adapters), compute(jax.tree.map(np.zeros_like, adapters))))
    merged = tree.merged(model, lora, tree.joined(base, adapters), meshes.make(), TRAIN)
    summed = jax.jit(lambda: hidden(tree.abstract(model)[0], merged))()
    largest = np.abs(adapted).max()
    np.testing.assert_allclose(summed, adapted, atol=2e-5 * largest)
    assert np.abs(adapted - plain).max() > 0.1 * largest


def test_a_run_begins_as_its_base():
    """B is zero, and A as PEFT begins it: uniform, of variance 1/3 of the inputs'."""
    model, lora = model_fixtures.model(), LoraConfig(rank=16)
    adapters, base = map(nnx.to_pure_dict, tree.trained(nnx.state(tree.build(model, 0, lora))))
    for path, leaf in tree.paths(adapters).items():
        inputs = leaf[0, ..., 0].size
        if path.endswith("/b"):
            assert not np.any(leaf)
        else:
            assert 0.9 < np.abs(leaf).max() * inputs**0.5 <= 1
            assert np.square(leaf).mean() * inputs == pytest.approx(1 / 3, rel=0.1)
    assert len({float(np.sum(leaf)) for path, leaf in tree.paths(adapters).items() if path.endswith("/a")}) == 7
    moved = tree.under_adapters(tree.parameters(tree.build(model, 0)), tree.targets(model, lora))
    jax.tree.map(np.testing.assert_array_equal, moved, base)


def steps_of(mesh, **training):
    """Return (losses and norms, first state, last state) of three steps of an adapted model on a mesh."""
    model, lora = model_fixtures.model(num_layers=2), LoraConfig(rank=4, targets=("*/attention/*", "*/down"))
    with jax.set_mesh(mesh):
        sections = model_fixtures.sections(ema_decay=0.5, **training)
        step = TrainStep(model, *sections, model_fixtures.optimization(), lora=lora)
        steps = step.jitted(mesh)
        # A base that is drawn, and adapters as a run begins them.
        base = tree.under_adapters(model_fixtures.parameters(model), tree.targets(model, lora))
        state = steps.begin(jax.device_put(base, step.shardings(mesh).base))
        first, measured = jax.device_get(state), []
        for seed in range(3):
            state, metrics = steps.train(state, put_batch(model_fixtures.batch(seed=seed), mesh))
            measured.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return measured, first, jax.device_get(state)


@pytest.fixture(scope="module")
def on_one_device():
    return steps_of(meshes.make())


def test_adapters_alone_are_trained(on_one_device):
    _, first, last = on_one_device
    jax.tree.map(np.testing.assert_array_equal, last.base, first.base)
    changed = tree.paths(jax.tree.map(lambda a, b: bool(np.any(a != b)), first.parameters, last.parameters))
    assert all(changed.values()) and len(changed) == 2 * 5
    assert all(np.any(leaf) for leaf in jax.tree.leaves(last.average))
    held = sum(leaf.size for leaf in jax.tree.leaves(last.optimizer) if leaf.ndim)
    assert held == 2 * sum(leaf.size for leaf in jax.tree.leaves(last.parameters))


@pytest.mark.parametrize(
    "mesh, changes",
    sampled(
        [
            pytest.param((2, 2, 2), {"microbatches": 2, "remat": "full"}, id="2-2-2"),
            pytest.param((1, 8, 1), {"scan_layers": False}, id="1-8-1"),
            pytest.param((1, 1, 8), {"remat": ("query", "up")}, id="1-1-8"),
            pytest.param((8, 1, 1), {}, id="8-1-1"),
        ],
        ["2-2-2"],
    ),
)
def test_losses_are_those_of_one_device(on_one_device, mesh, changes):
    """Key/value heads that tensor = 8 does not divide are copied, and so are their adapters'."""
    expected, _, state = on_one_device
    measured, _, sharded = steps_of(meshes.make(*mesh), **changes)
    np.testing.assert_allclose(measured, expected, rtol=1e-5)
    model_fixtures.assert_same_numbers(sharded.parameters, state.parameters, 1e-3)  # Adam divides by what is small


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("embedding",), "lora.targets[0] = 'embedding': embedding is no matrix of a layer; adapters go with layers/"),
        (("*/query", "*norm*"), "lora.targets[1] = '*norm*': final_norm/scale is no matrix of a layer"),
        (("q_proj",), "lora.targets[0] = 'q_proj': it matches no parameter; adapters go with layers/attention/"),
        (("layers/attention/qery",), "adapters go with layers/attention/query"),
    ],
)
def test_what_is_no_matrix_of_a_layer_has_no_adapter(targets, message):
    with pytest.raises(InputError) as refused:
        tree.abstract(model_fixtures.model(), LoraConfig(targets=targets))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_scale_of_an_adapter():
    assert (
        LoraConfig(rank=4, alpha=8.0).scale == 2.0 and LoraConfig(rank=4, alpha=8.0, rank_stabilized=True).scale == 4.0
    )
