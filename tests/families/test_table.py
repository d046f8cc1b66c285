"""Names of stored tensors, and the arrays of the tree."""

import math
import re
from pathlib import Path

import jax
import pytest

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.families import table
from jaxlm.families.family import families
from jaxlm.families.safetensors import StoredTensor
from jaxlm.families.settings import family_of, model_of
from jaxlm.models import tree

MODELS = Path(__file__).parents[2] / "configs" / "models"
NAMES = Path(__file__).parents[3] / "shared" / "research" / "hf_names.txt"
TINY = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 10,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64,
}  # fmt: skip


def stored(expected):
    return {name: StoredTensor(Path("x"), jax.numpy.dtype("float32"), held.shape, 0) for name, held in expected.items()}


@pytest.mark.parametrize("name", ["gpt2-124m", "qwen3-0.6b", "gemma3-1b", "llama3.1-405b"])
def test_all_parameters_are_stored_once(name):
    model = config.load(MODELS / f"{name}.toml").model
    expected = table.tensors(model, family_of(model).rules)
    assert sum(math.prod(held.shape) for held in expected.values()) == tree.parameter_count(model)
    table.check(expected, stored(expected), (), name)


def test_names_and_shapes_are_those_that_are_published():
    model = model_of(TINY | {"model_type": "llama"}, "config.json")
    expected = table.tensors(model, families()["llama"].rules)
    assert expected["model.layers.1.self_attn.q_proj.weight"].shape == (60, 48)
    assert expected["model.layers.0.self_attn.o_proj.weight"].shape == (48, 60)
    assert expected["lm_head.weight"].shape == (96, 48)
    assert not any("bias" in name for name in expected)
    biased = model_of(TINY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}, "config.json")
    more = table.tensors(biased, families()["llama"].rules).keys() - expected.keys()
    assert len(more) == 2 * 7 and all(name.endswith(".bias") for name in more)


@pytest.mark.parametrize("family", ["llama", "granite", "smollm3", "seed_oss", "arcee", "starcoder2"])
def test_every_bias_that_a_configuration_can_ask_for_is_stored(family):
    keys = {key: True for key in families()[family].config if key.endswith("bias")}
    biased = model_of(TINY | {"model_type": family} | keys, "config.json")
    expected = table.tensors(biased, families()[family].rules)
    assert sum(math.prod(held.shape) for held in expected.values()) == tree.parameter_count(biased)
    assert sum(".self_attn." in name and name.endswith("bias") for name in expected) == 2 * 4
    assert sum(".mlp." in name and name.endswith("bias") for name in expected) == 2 * (2 + biased.feed_forward.gated)


def test_layers_of_several_structures_keep_their_numbers():
    keys = dict(TINY, model_type="qwen3", num_hidden_layers=5)
    model = model_of(keys, "config.json").model_dump(exclude_none=True)
    pattern = ({"name": "plain", "layers": 2, "attention": {"qk_norm": "none"}}, {"name": "normed"})
    mixed = type(model_of(keys, "x")).model_validate({**model, "pattern": pattern})
    expected = table.tensors(mixed, families()["qwen3"].rules)
    normed = {re.findall(r"\d+", name)[0] for name in expected if "q_norm" in name}
    assert normed == {"2"}  # plain plain normed plain plain
    assert {place.path for place in expected["model.layers.3.mlp.up_proj.weight"].places} == {
        "layers/plain/feed_forward/up"
    }
    assert expected["model.layers.3.mlp.up_proj.weight"].places[0].index == (2,)


def test_all_differences_are_listed_with_the_nearest_names():
    model = model_of(TINY | {"model_type": "llama"}, "config.json")
    expected = table.tensors(model, families()["llama"].rules)
    found = stored(expected)
    found["model.layers.0.mlp.upper_proj.weight"] = found.pop("model.layers.0.mlp.up_proj.weight")
    del found["model.norm.weight"]
    found["model.layers.1.mlp.down_proj.weight"] = StoredTensor(Path("x"), jax.numpy.dtype("float32"), (80, 48), 0)
    found["model.layers.1.rotary_emb.inv_freq"] = found["lm_head.weight"]
    with pytest.raises(InputError) as error:
        table.check(expected, found, ["model.layers.1.rotary_emb.inv_freq"], "there")
    said = str(error.value)
    assert "model.layers.0.mlp.up_proj.weight is missing (there is model.layers.0.mlp.upper_proj.weight)" in said
    assert "model.norm.weight is missing" in said and "inv_freq" not in said
    assert "model.layers.1.mlp.down_proj.weight is [80, 48], and the configuration says [48, 80]" in said


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn"])
def test_a_parameter_in_a_dtype_that_needs_scales_is_refused(dtype):
    model = model_of(TINY | {"model_type": "llama"}, "config.json")
    expected = table.tensors(model, families()["llama"].rules)
    found = stored(expected)
    name = "model.norm.weight"
    found[name] = StoredTensor(Path("x"), jax.numpy.dtype(dtype), found[name].shape, 0)
    with pytest.raises(InputError, match=f"{name} is .*, and a parameter is one of BF16, F16, F32, F64"):
        table.check(expected, found, [], "there")


def test_a_family_without_a_rule_for_a_parameter_is_no_family():
    model = model_of(TINY | {"model_type": "qwen3"}, "config.json")
    with pytest.raises(ValueError, match="no rule, or more than one, for layers/attention/key_norm/scale"):
        table.tensors(model, [rule for rule in families()["qwen3"].rules if "k_norm" not in rule.name])
