"""Families with Mamba-2: spellings of their keys, what is refused, published sizes."""

import json
import math
from pathlib import Path

import pytest
from matrices import sampled
from test_settings import PUBLISHED as CONFIGS
from workload_fixtures import workload

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.costs.plan import parameter_counts
from jaxlm.families.family import families
from jaxlm.families.settings import config_of, family_of, model_of
from jaxlm.models.config import ModelConfig

MODELS = Path(__file__).parents[2] / "configs" / "models"
MAMBA = {
    "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80,
    "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2, "tie_word_embeddings": True, "use_bias": False,
    "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, math.inf], "conv_kernel": 4,
}  # fmt: skip
CODESTRAL = MAMBA | {
    "vocab_size": 32768, "hidden_size": 4096, "num_heads": 128, "n_groups": 8, "tie_word_embeddings": False,
    "intermediate_size": 8192, "norm_before_gate": True, "rms_norm": True, "time_step_rank": 256,
}  # fmt: skip
PUBLISHED = {"mamba2-2.7b": MAMBA, "codestral-mamba-7b": CODESTRAL}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_here_are_the_published_ones(name):
    model, here = model_of(PUBLISHED[name], name), config.load(MODELS / f"{name}.toml").model
    assert config_of(model, families()[PUBLISHED[name]["model_type"]]) == config_of(here, family_of(here))
    assert model.entries[0][1].feed_forward.kind == "none" or model.pattern == here.pattern


def limits(found):
    return model_of(json.loads(json.dumps(MAMBA | {"time_step_limit": found})), "x").attention.time_limits


def test_limits_of_time_steps_are_read_as_every_version_of_transformers_writes_them():
    infinity = {"__float__": "Infinity"}
    assert limits([0.0, math.inf]) is limits([0.0, infinity]) is limits(None) is None
    assert limits([0.5, math.inf]) == limits([0.5, infinity]) == (0.5, math.inf)
    assert limits([0, 2]) == (0.0, 2.0)
    for found in ([0.0, math.inf], [0.25, 2.0]):
        model = model_of(MAMBA | {"time_step_limit": found}, "x")
        assert config_of(model, families()["mamba2"])["time_step_limit"] == found


def test_a_context_is_written_under_a_key_that_transformers_does_not_read():
    model = model_of(MAMBA | {"max_position_embeddings": 4096}, "x")
    assert model.context_length == 4096 and model_of(MAMBA, "x").context_length == 262144
    assert config_of(model, families()["mamba2"])["max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expand": 3}, "expand = 3, and with the file's other keys it can be 2 alone"),
        ({"intermediate_size": 4096}, "intermediate_size = 4096, and with the file's other keys it can be 5120 alone"),
        ({"use_bias": True}, "use_bias = True, and jaxlm has mamba2 with False alone"),
        ({"rms_norm": False}, "rms_norm = False, and jaxlm has mamba2 with True alone"),
        ({"n_groups": 3}, "num_groups = 3 does not divide"),
        ({"time_step_limit": [0.1]}, "time_step_limit = [0.1]; it must be a list of the least and the greatest"),
        ({"time_step_limit": [0.1, "inf"]}, "time_step_limit = [0.1, 'inf']; it must be a list of the least"),
        ({"time_step_limit": [2.0, 1.0]}, "must be a lower and a higher limit"),
        ({"conv_kernel": 1}, "taps"),
        ({"layer_types": ["full_attention"] * 64}, "layer_types: jaxlm knows no such key of mamba2"),
    ],
)
def test_keys_that_describe_no_model_are_refused(changes, message):
    with pytest.raises(InputError) as error:
        model_of(MAMBA | changes, "config.json")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_whose_heads_are_no_multiple_of_the_stream_is_not_exported():
    with pytest.raises(InputError, match="mamba2 has heads whose channels are together a multiple of d_model"):
        model = model_of(MAMBA, "x")
        config_of(model.model_copy(update={"d_model": 2048}), families()["mamba2"])


TYPES = [*["mamba"] * 5, *["attention", *["mamba"] * 9] * 3, "attention", *["mamba"] * 4]
TINY = {
    "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512,
    "shared_intermediate_size": 1024, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
    "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
    "position_embedding_type": "nope", "tie_word_embeddings": True, "layer_types": TYPES,
}  # fmt: skip
SMALL = TINY | {
    "hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "total", "active"),
    sampled(
        [
            pytest.param(SMALL, 32_207_337_984, 8_803_121_664, id="Granite-4.0-H-Small"),
            pytest.param(TINY, 6_939_037_248, 1_465_470_528, id="Granite-4.0-H-Tiny"),
            pytest.param(CONFIGS["nemotron3-nano-30b-a3b"], 31_577_937_344, 3_580_073_408, id="Nemotron-3-Nano"),
        ],
        ["Granite-4.0-H-Small", "Nemotron-3-Nano"],
    ),
)
def test_counts_are_those_of_transformers_modules(settings, total, active):
    model = model_of(settings, "config.json")
    counts = parameter_counts(workload("train", model, batch=8, sequence=1024))
    assert (counts["total"], counts["active"]) == (total, active)
    assert family_of(model).name == settings["model_type"]


def test_a_mixture_with_mamba2_from_scratch_is_of_granite_s_family():
    """With the scale of scores that attention has by itself; a layer cannot be dense among others."""
    mixture = {"kind": "mixture", "num_experts": 8, "d_ff": 16, "shared": {"d_ff": 16}}
    mixture |= {"router": {"scores": "softmax_of_chosen"}}
    state_space = {"kind": "mamba2", "num_heads": 4, "head_dim": 16}
    keys = {"vocab_size": 64, "context_length": 64, "num_layers": 4, "d_model": 32, "attention": {"num_heads": 4}}
    keys |= {"feed_forward": mixture, "pattern": [{"name": "mamba", "attention": state_space}, {"name": "full"}]}
    for positions in ("none", "rope"):
        assert (
            family_of(ModelConfig.model_validate(keys | {"position": {"kind": positions}})).name == "granitemoehybrid"
        )
    keys["pattern"][0] |= {"feed_forward": {"kind": "dense", "d_ff": 16}}
    with pytest.raises(InputError, match="this \\[model\\] is of no family"):
        family_of(ModelConfig.model_validate(keys))


def test_layers_of_granite_are_read_in_every_spelling_and_written_in_both():
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    newer = TINY | {"layer_types": [names[each] for each in TYPES]}
    older = {key: value for key, value in TINY.items() if key != "layer_types"} | {"layers_block_type": TYPES}
    model = model_of(TINY, "x")
    assert model_of(newer, "x") == model_of(older, "x") == model_of(TINY | {"mamba_d_head": "auto"}, "x") == model
    written = config_of(model, families()["granitemoehybrid"])
    assert written["layer_types"] == written["layers_block_type"] == TYPES
    with pytest.raises(InputError, match="mamba_n_heads = 48 times mamba_d_head = 32 is not mamba_expand = 2 times"):
        model_of(TINY | {"mamba_d_head": 32}, "x")


NEMOTRON = {"model_type": "nemotron_h", "vocab_size": 96, "hidden_size": 48, "mamba_num_heads": 8, "mamba_head_dim": 12}


def test_layers_of_nemotron_are_read_in_every_spelling_and_written_in_both():
    kinds = ["mamba", "mlp", "attention", "moe", "mamba"]
    newer = ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]
    model = model_of(NEMOTRON | {"hybrid_override_pattern": "M-*EM"}, "x")
    assert [(layer.attention.kind, layer.feed_forward.kind) for layer in model.layers] == [
        *(("mamba2", "none"), ("none", "dense"), ("gqa", "none"), ("none", "mixture"), ("mamba2", "none"))
    ]
    for keys in ({"layers_block_type": kinds}, {"layer_types": newer}, {"layers_block_type": newer}):
        assert model_of(NEMOTRON | keys, "x") == model
    written = config_of(model, families()["nemotron_h"])
    assert (written["hybrid_override_pattern"], written["layers_block_type"]) == ("M-*EM", newer)
    assert family_of(model).name == "nemotron_h"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has X, and jaxlm has M, *, -, E here"),
        ({"layers_block_type": ["conv"]}, "layers_block_type has conv, and jaxlm has linear_attention, full_attention"),
        ({"hybrid_override_pattern": "M*", "num_hidden_layers": 3}, "names 2 layers, and num_hidden_layers = 3"),
        ({"hybrid_override_pattern": "M*", "layers_block_type": ["mamba", "mlp"]}, "= 'M*' differ; leave one out"),
        ({"hybrid_override_pattern": "M*", "time_step_limit": [0.1, 1.0]}, "time_step_limit = [0.1, 1.0], and jaxlm"),
        ({"hybrid_override_pattern": "M-", "mlp_bias": True}, "mlp_bias = True, and jaxlm has nemotron_h with False"),
        ({}, "gives None as the number of layers"),
    ],
)
def test_layers_of_nemotron_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError) as error:
        model_of(NEMOTRON | changes, "config.json")
    assert message in str(error.value) and "\n" not in str(error.value)
