"""The message about a model that no published family has: the nearest family, and the keys in the way."""

import jax
import loud
import meshes
import numpy as np
import pytest

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.core.schema import merged
from jaxlm.families.directory import PublishedModel, write
from jaxlm.families.settings import family_of
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.parallel.rules import TRAIN

V3 = {
    **{"kind": "mixture", "num_experts": 8, "experts_per_token": 2, "d_ff": 16, "shared": {"d_ff": 16}},
    "router": {"scores": "sigmoid", "selection_bias": True, "epsilon": 1e-20},
}
DENSE = {"kind": "dense", "d_ff": 48}
FIRST_DENSE = [{"name": "dense", "feed_forward": DENSE}, {"name": "mixture", "layers": "rest"}]
ATTENTION = {"kind": "latent", "num_heads": 2, "latent_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}


def latent(**keys):
    base = {"vocab_size": 64, "context_length": 64, "num_layers": 3, "d_model": 32, "attention": ATTENTION}
    return ModelConfig.model_validate(base | {"feed_forward": V3} | keys)


def test_a_latent_model_from_scratch_is_published_with_the_epsilon_of_its_family():
    assert family_of(latent(pattern=FIRST_DENSE)).name == "deepseek_v3"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"feed_forward": merged(V3, {"router": {"epsilon": 0.0}}), "pattern": FIRST_DENSE},
            "it differs from the nearest family, deepseek_v3, in model.feed_forward.router.epsilon = 0.0 and not 1e-20",
        ),
        (
            {"feed_forward": DENSE},
            "it differs from the nearest family, deepseek_v2, in model.feed_forward.kind = dense and not mixture, "
            "which every family with model.attention.kind = latent has",
        ),
        (
            {"feed_forward": merged(V3, {"shared": {"d_ff": 9}})},
            "it is not of the nearest family, deepseek_v3: deepseek_v3 has shared experts as wide as the others",
        ),
        (
            {"norm": {"plus_one": True}, "norm_placement": "both", "residual_scale": 2.0, "logit_scale": 3.0},
            "it differs from the nearest family, deepseek_v3, in model.norm.plus_one = true and not false, "
            "model.norm_placement = both and not before, model.residual_scale = 2.0 and not 1.0 and 1 more keys",
        ),
    ],
    ids=["epsilon", "no mixture", "widths", "many"],
)
def test_the_keys_in_the_way_of_the_nearest_family_are_named(keys, why):
    with pytest.raises(InputError) as error:
        family_of(latent(**keys))
    assert str(error.value) == f"this [model] is of no family, and cannot be exported: {why}"


def test_a_mixture_with_a_dense_layer_is_near_no_dense_family():
    """Also where of a family no more is known than that it rotates whole heads."""
    attention = {"num_heads": 2, "head_dim": 16, "qkv_bias": True}
    with pytest.raises(InputError, match="nearest family, glm4_moe, in model.embedding_scale = 2.0 and not 1.0"):
        family_of(latent(attention=attention, position={"fraction": 0.5}, embedding_scale=2.0, pattern=FIRST_DENSE))


RECURRENT = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 2, "key_dim": 8, "value_dim": 8}
GQA = {"kind": "gqa", "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "output_gate": "sigmoid"}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"attention": {"kind": "none"}}, "model.attention.kind = none and not gqa"),
        ({"attention": RECURRENT}, "model.attention.kind = gated_delta and not gqa"),
        (
            {
                "attention": RECURRENT,
                "norm": {"kind": "layer"},
                "pattern": [{"name": "recurrent", "layers": 2}, {"name": "full", "layers": 1, "attention": GQA}],
            },
            "",
        ),
    ],
    ids=["no attention", "recurrent", "hybrid"],
)
def test_a_model_in_whose_layers_nothing_rotates_is_of_no_family(keys, why):
    """Such layers read no positions, which a family may share."""
    with pytest.raises(InputError, match=rf"of no family, and cannot be exported: it .*{why}"):
        family_of(latent(feed_forward=DENSE, **keys))


def test_a_mixture_in_an_entry_of_the_pattern_is_published_as_one_of_the_model_s_own_block(tmp_path):
    """The keys of config.json for experts are those of a block, wherever [model] has it."""
    pattern = [{"name": "dense"}, {"name": "mixture", "layers": "rest", "feed_forward": V3}]
    model, mesh = latent(feed_forward=DENSE, pattern=pattern), meshes.make(1, 1, 1)
    shapes = tree.shapes(tree.abstract(model)[1])
    parameters = jax.tree.map(lambda leaf: loud.normals(str(leaf.shape), leaf.shape).astype(leaf.dtype), shapes)
    write(tmp_path / "once", model, parameters, {"": "F32"}, {}, lambda line: None)
    published = PublishedModel(tmp_path / "once")
    assert published.family.name == "deepseek_v3" and published.config["first_k_dense_replace"] == 1
    write(tmp_path / "twice", published.model, published.load(mesh, TRAIN), {"": "F32"}, {}, lambda line: None)
    one, other = (PublishedModel(tmp_path / name).stored for name in ("once", "twice"))
    assert one.keys() == other.keys() == published.tensors.keys()
    assert all(np.array_equal(one[name].read(), other[name].read()) for name in one)


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_a_mixture_without_shared_experts_has_the_empty_tensors_that_transformers_makes(scores, tmp_path):
    """With n_shared_experts = 0, which is the only way to say that there are none."""
    router = V3["router"] if scores == "sigmoid" else {"scores": scores, "normalise": False}
    model, mesh = latent(feed_forward={**V3, "shared": None, "router": router}), meshes.make(1, 1, 1)
    shapes = tree.shapes(tree.abstract(model)[1])
    parameters = jax.tree.map(lambda leaf: loud.normals(str(leaf.shape), leaf.shape).astype(leaf.dtype), shapes)
    family = write(tmp_path / "out", model, parameters, {"": "F32"}, {}, lambda line: None)
    published = PublishedModel(tmp_path / "out")
    published.load(mesh, TRAIN)  # which takes them for nothing
    shared = {name: tensor.shape for name, tensor in published.stored.items() if "shared" in name}
    one = "model.layers.0.mlp.shared_experts"
    expected = {"gate_proj": (0, 32), "up_proj": (0, 32), "down_proj": (32, 0)}
    assert len(shared) == 9 and {name: shared[f"{one}.{name}.weight"] for name in expected} == expected
    assert published.config["n_shared_experts"] == 0 and family.name.startswith("deepseek")
    assert "intermediate_size" not in published.config  # no layer is dense


def test_of_a_hybrid_the_nearest_family_has_its_kinds_of_layers():
    for name, family in (("qwen3-next-80b-a3b", "qwen3_next"), ("lfm2-1.2b", "lfm2")):
        with pytest.raises(InputError, match=f"differs from the nearest family, {family}, in model.logit_soft_cap = 5"):
            family_of(config.load(name, ["model.logit_soft_cap=5.0"]).model)
    others = {"kind": "mamba2", "num_heads": 2, "head_dim": 8, "state_dim": 8}
    pattern = [{"name": "delta", "layers": 2, "attention": RECURRENT}, {"name": "other", "attention": others}]
    with pytest.raises(InputError, match="no family has layers with .*kind = gated_delta and others with mamba2"):
        family_of(latent(feed_forward=DENSE, pattern=pattern))
