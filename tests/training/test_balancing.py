"""Selection biases: how far, and by whom they are moved."""

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from pydantic import ValidationError
from workload_fixtures import changed, workload

from jaxlm.costs.plan import parameter_counts
from jaxlm.models import tree
from jaxlm.models.lora_config import LoraConfig
from jaxlm.training import balancing

BIASED = {"kind": "mixture", "num_experts": 6, "experts_per_token": 2, "d_ff": 16, "router": {"selection_bias": True}}
BIAS = "layers/feed_forward/selection_bias"


def mixture(**keys):
    return model_fixtures.model(feed_forward=BIASED | keys, num_layers=2)


def moved(counts, scale=1.0, experts=6):
    """Return the biases of two layers after these counts."""
    model = mixture(num_experts=experts)
    parameters = {"layers": {"feed_forward": {"selection_bias": jnp.zeros((2, experts))}}}
    (_, abstract), counts = tree.abstract(model), {"selection_bias": jnp.asarray(counts, jnp.float32)}
    call = jax.jit(lambda p, c: balancing.moved(model, abstract, p, c, {BIAS: scale}))
    return np.asarray(call(parameters, counts)["layers"]["feed_forward"]["selection_bias"])


@pytest.mark.parametrize("experts", [6, 7, 30, 60, 896])
@pytest.mark.parametrize("tokens", [3, 7, 101, 98304])
def test_equal_counts_move_nothing(experts, tokens):
    assert not moved(np.full((2, experts), tokens), experts=experts).any()


def test_each_bias_moves_towards_the_mean_of_its_layer():
    """The second layer's mean, 2.5, is no whole number."""
    found = moved([[5, 5, 5, 6, 4, 5], [2, 3, 2, 3, 2, 3]], scale=0.5)
    step = np.float32(0.0005)
    np.testing.assert_array_equal(found, [[0, 0, 0, -step, step, 0], [step, -step, step, -step, step, -step]])


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_frozen_layer_keeps_its_bias(scale):
    groups = [{"pattern": "*feed_forward*", "learning_rate_scale": scale}]
    optimizer = model_fixtures.optimization(groups=groups)
    batch = model_fixtures.batch()
    _, state = model_fixtures.run_steps(mixture(), model_fixtures.sections(), [batch], meshes.make(), optimizer)
    assert np.asarray(state.parameters["layers"]["feed_forward"]["selection_bias"]).any() == bool(scale)


@pytest.mark.parametrize("changes", [{"frozen": ("*feed_forward*",)}, {"lora": LoraConfig(rank=2)}], ids=str)
def test_plans_count_what_trains_beside_a_bias(changes):
    counts = parameter_counts(changed(workload("train", mixture(), 2, 8), **changes))
    assert counts["state"] == 12 and 0 < counts["trainable"] < counts["total"]


def test_layers_with_a_bias_have_as_many_experts():
    pattern = [{"name": "a"}, {"name": "b", "feed_forward": {"num_experts": 4}}]
    with pytest.raises(ValidationError, match="has layers of 4 and of 6 experts with router.selection_bias"):
        model_fixtures.model(feed_forward=BIASED, num_layers=2, pattern=pattern)
    pattern[0]["feed_forward"] = {"router": {"selection_bias": False}}
    model = model_fixtures.model(feed_forward=BIASED, num_layers=2, pattern=pattern)
    assert [layer.feed_forward.bias_rate for layer in model.layers] == [0.0, 0.001]


def test_a_pattern_may_have_mixtures_without_a_width_of_their_own():
    pattern = [{"name": "a"}, {"name": "b", "feed_forward": {"kind": "mixture", "num_experts": 4}}]
    model = model_fixtures.model(d_model=768, num_layers=2, pattern=pattern)
    assert model.layers[1].feed_forward.d_ff == 1024  # 8/3 · 768 / 2
