"""Keys of published config.json files: those that change no result are taken, and all others refused."""

import json
import re
from pathlib import Path

import loud
import pytest
from test_settings import BASES, LLAMA, NEOX

from jaxlm.core.errors import InputError
from jaxlm.families import inert
from jaxlm.families.family import families
from jaxlm.families.settings import inert_keys, model_of

ENTRIES = json.loads(Path(__file__).with_name("published_config_keys.json").read_text(encoding="utf-8"))["entries"]
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
TINY = {**BASES, "llama": LLAMA, "gpt2": GPT2, "gpt_neox": NEOX} | {
    name: {key: value for key, value in LLAMA.items() if key != "hidden_act"} | {"model_type": name}
    for name in families()
    if name not in (*BASES, "llama", "gpt2", "gpt_neox")
}
TINY["mamba2"] = {
    "model_type": "mamba2", "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 5, "num_heads": 8, "head_dim": 12,
}  # fmt: skip
TINY["granitemoehybrid"] |= {"mamba_n_heads": 6}
TINY["nemotron_h"] |= {"hybrid_override_pattern": "M-*EM", "mamba_num_heads": 8, "mamba_head_dim": 12}
for name in ("lfm2", "lfm2_moe", "starcoder2"):
    TINY[name].pop("rms_norm_eps")
for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):  # every head has keys of its own
    TINY[name] |= {"num_key_value_heads": LLAMA["num_attention_heads"]}


def read(family, **keys):
    return model_of(TINY[family] | keys, "config.json")


def opened():
    for entry in ENTRIES:
        for family in families() if entry["family"] == "any" else [entry["family"]]:
            yield pytest.param(family, entry["keys"], id=f"{family} as {entry['like']}")


@pytest.mark.parametrize(("family", "keys"), list(opened()))
def test_keys_of_published_files_open(family, keys):
    sized = {"num_hidden_layers": 2} if "layer_types" in keys else {}
    read(family, **{**sized, **keys})


def test_a_key_that_asks_for_nothing_changes_nothing_and_is_listed():
    keys = {"use_mrope": False, "clip_qkv": None, "num_experts": 0, "expert_layers": [], "vision": {}, "mup_scale": 1.0}
    assert read("qwen2", **keys) == read("qwen2")
    assert inert_keys(TINY["qwen2"] | keys | {"use_cache": True, "attention_dropout": 0.0}, "x") == sorted(keys)
    named = {"is_llama_config": True, "unsloth_version": "2025.1", "id2label": {"0": "A"}, "attention_dropout": 0.1}
    assert read("llama", **named) == read("llama") and inert_keys(LLAMA | named, "x") == sorted(named)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen2", {"use_mrope": True}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"num_experts": 8}),
        ("llama", {"clip_qkv": 8.0}),
        ("llama", {"logit_scale": 0.5}),
        ("llama", {"is_encoder_decoder": True}),
        ("llama", {"pruned_heads": {"0": [1]}}),
        ("llama", {"transformers_weights": "other.safetensors"}),
        ("llama", {"is_causal": False}),
        ("llama", {"use_rope": False}),
        ("llama", {"quantization": {"bits": 4, "group_size": 64}}),
        ("qwen3", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
        ("llama", {"layer_types": ["sliding_attention"] * 5}),
    ],
)
def test_a_key_that_may_change_a_result_is_refused_by_name(family, keys):
    with pytest.raises(InputError, match=f"config.json: {next(iter(keys))}: jaxlm knows no such key of {family}"):
        read(family, **keys)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "gpt_neox",
            {"rotary_emb_base": 1e4, "rope_theta": 5e5},
            "rotary_emb_base = 10000.0 and rope_theta = 500000.0",
        ),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, "rotary_pct = 0.5 and partial_rotary_factor"),
        ("gpt2", {"hidden_size": 96}, "hidden_size = 96 and n_embd = 48 are two names of one setting; leave one out"),
        ("gpt2", {"max_position_embeddings": 32}, "max_position_embeddings = 32 and n_positions = 64"),
        ("llama", {"n_layer": 3}, "n_layer = 3 and num_hidden_layers = 5 are two names of one setting"),
        ("gemma2", {"sliding_window": 9, "sliding_window_size": 8}, "sliding_window_size = 8 and sliding_window = 9"),
        ("llama", {"activation": "geglu"}, "activation = 'geglu' and hidden_act = 'silu'"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act = 'relu', and jaxlm has gemma with 'gelu_pytorch_tanh' or"),
    ],
)
def test_two_names_of_one_setting_that_differ_are_refused(family, keys, message):
    with pytest.raises(InputError) as error:
        read(family, **keys)
    assert message in str(error.value)


def test_two_names_of_one_setting_that_agree_are_taken():
    assert read("gpt2", hidden_size=48, num_hidden_layers=2, n_ctx=64) == read("gpt2")
    without = {key: value for key, value in GPT2.items() if key != "n_embd"}
    assert model_of(without | {"hidden_size": 48}, "x") == read("gpt2")
    assert read("llama", n_layer=5, d_model=48, activation="swiglu") == read("llama")
    assert read("gpt_neox", rotary_pct=0.5, partial_rotary_factor=0.5).position.fraction == 0.5


def test_activations_of_the_tanh_form_are_one():
    names = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh", "gelu_accurate")
    assert {read("gpt_neox", hidden_act=name).feed_forward.activation for name in names} == {"gelu_tanh"}
    assert {read("gpt2", activation_function=name).feed_forward.activation for name in names} == {"gelu_tanh"}
    assert read("gpt2", activation_function="gelu").feed_forward.activation == "gelu"


LINEAR, YARN = {"rope_type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 4.0}


def scaling(family, **keys):
    return [layer.position.scaling and layer.position.scaling.kind for layer in read(family, **keys).layers]


def test_rope_type_goes_before_type_and_rope_scaling_before_rope_parameters():
    assert set(scaling("llama", rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0})) == {"dynamic"}
    assert set(scaling("llama", rope_scaling=YARN, rope_parameters={"rope_type": "default"})) == {"yarn"}
    assert set(scaling("llama", rope_scaling={}, rope_parameters=LINEAR)) == {"linear"}
    both = read("llama", rope_scaling=LINEAR, rope_parameters={"rope_theta": 5e5}, rope_theta=5e5)
    assert both.position.theta == 5e5 and both.position.scaling.kind == "linear"
    with pytest.raises(InputError, match="rope_scaling goes before rope_parameters, whose rope_theta would be lost"):
        read("llama", rope_scaling=LINEAR, rope_parameters={"rope_theta": 5e5})


def test_rope_scaling_is_of_the_layers_without_a_window_where_kinds_have_their_own():
    kinds = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    own = {"sliding_window": 9, "sliding_window_pattern": 3}
    assert scaling("gemma3_text", rope_scaling=YARN, **own) == [None, None, "yarn", None, None]
    # What a kind has goes before, key by key.
    named = kinds | {"full_attention": LINEAR}
    assert scaling("gemma3_text", rope_scaling={"factor": 8.0}, rope_parameters=named, **own)[2] == "linear"
    local = read("gemma3_text", rope_parameters={"full_attention": LINEAR}, rope_local_base_freq=500.0, **own)
    assert [layer.position.theta for layer in local.layers] == [500.0, 500.0, 1e6, 500.0, 500.0]
    with pytest.raises(InputError, match="rope_parameters must have a table for each of full_attention, sliding"):
        read("gemma3_text", rope_parameters=LINEAR, **own)


def test_a_scaling_takes_keys_that_it_does_not_compute_with():
    plain = read("llama", rope_scaling=LINEAR)
    assert read("llama", rope_scaling=LINEAR | {"original_max_position_embeddings": 32, "finetuned": True}) == plain
    with pytest.raises(InputError, match="have to be tables, or null"):
        read("llama", rope_scaling=2.0)


@pytest.mark.parametrize(
    ("keys", "context"),
    [
        ({"type": "dynamic", "factor": 2.0}, 128),
        ({"type": "yarn", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "linear", "factor": 4.0}, 64),
    ],
)
def test_the_context_is_the_stretched_one_where_the_file_gives_the_original(keys, context):
    from jaxlm.families.settings import config_of, family_of

    model = read("llama", rope_scaling=keys)
    assert model.context_length == context
    written = config_of(model, family_of(model))
    assert written["max_position_embeddings"] == (64 if keys["type"] == "dynamic" else context)
    assert model_of(written, "x") == model


def test_sizes_that_are_left_out_have_the_defaults_of_the_family():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    model = model_of({"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}}, "x")
    assert (model.attention.num_heads, model.attention.num_kv_heads, model.attention.head_dim) == (8, 4, 256)
    assert model.vocab_size == 262208 and model.context_length == 131072


@pytest.mark.parametrize("name", loud.names())
def test_a_value_of_another_type_is_refused_in_one_line_whatever_the_key(name):
    """A text is no number and no switch, in any key that the family computes with, also one that says a number."""
    settings = loud.read(name)[0]["config"]
    of_family = families()[settings["model_type"]]
    whole = {**of_family.defaults, **settings}
    for key, value in whole.items():
        if isinstance(value, bool | int | float) and not inert.is_inert(key, "4") and key not in of_family.inert:
            for other in (str(value), "x", [4], {"a": 1}):
                with pytest.raises(InputError) as refused:
                    model_of(settings | {key: other}, "config.json")
                assert key in str(refused.value) and "\n" not in str(refused.value), (key, other)
    table = settings.get("rope_parameters") or {}
    for key, value in table.items():
        if isinstance(value, bool | int | float):
            with pytest.raises(InputError, match=re.escape(f"rope_parameters.{key} = '{value}'; it must be ")):
                model_of(settings | {"rope_parameters": table | {key: str(value)}}, "config.json")
