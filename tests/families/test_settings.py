"""Keys of config.json and keys of [model], both ways."""

import json
import re
from pathlib import Path

import loud
import pytest

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.families.family import families
from jaxlm.families.nearest import computed
from jaxlm.families.settings import config_of, family_of, model_of
from jaxlm.models.config import ModelConfig

MODELS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.toml"))
FAMILY_OF = {"gpt2": "gpt2", "llama2": "llama", "llama3.1": "llama", "mistral": "mistral", "qwen3": "qwen3"}
FAMILY_OF |= {"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo2": "olmo2", "olmo3": "olmo3"}
FAMILY_OF |= {"llama3.2": "llama", "qwen2.5": "qwen2", "smollm3": "smollm3"}
FAMILY_OF |= {"ministral": "mistral", "pythia": "gpt_neox", "command": "cohere2", "afm": "arcee"}
FAMILY_OF |= {name: name for name in ("glm4", "exaone4", "starcoder2", "nanochat")} | {"granite3.3": "granite"}
FAMILY_OF |= {"mixtral": "mixtral", "olmoe": "olmoe"} | dict.fromkeys(("qwen3-30b-a3b", "qwen3-235b-a22b"), "qwen3_moe")
FAMILY_OF |= {"qwen3-next-80b-a3b": "qwen3_next", "qwen3.5-35b-a3b": "qwen3_next"}  # both have their layers
FAMILY_OF |= {"lfm2-1.2b": "lfm2", "lfm2-8b-a1b": "lfm2_moe", "mamba2": "mamba2", "codestral": "mamba2"}
FAMILY_OF |= {"qwen3.5-27b": "qwen3_5_text", "nemotron3": "nemotron_h"}
FAMILY_OF |= {"gpt-oss-20b": "gpt_oss", "gpt-oss-120b": "gpt_oss"}
FAMILY_OF |= {"glm-4.5-air": "glm4_moe", "minimax-m2": "minimax_m2"}
FAMILY_OF |= {"deepseek-v2": "deepseek_v2", "deepseek-v2-lite": "deepseek_v2", "deepseek-v3": "deepseek_v3"}
# Without LongRoPE, or biases of the output, they have no part that these lack.
FAMILY_OF |= {"phi3": "mistral", "phi4": "llama", "seed": "qwen2"}
# The keys of config.json as they are published, but for nanochat's, which are those that transformers converts to.
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8"))
LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
QWEN3, GEMMA3 = LLAMA | {"model_type": "qwen3"}, LLAMA | {"model_type": "gemma3_text", "query_pre_attn_scalar": 168}
GEMMA2 = LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 168, "hidden_act": "gelu_pytorch_tanh"}
GEMMA3 = {key: value for key, value in GEMMA3.items() if key != "hidden_act"}
NEOX = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "rms_norm_eps", "hidden_act")}
NEOX |= {"model_type": "gpt_neox"}
COHERE2 = {"layer_norm_eps" if key == "rms_norm_eps" else key: value for key, value in LLAMA.items()}
COHERE2 |= {"model_type": "cohere2"}
BASES = {"gemma2": GEMMA2, "gemma3_text": GEMMA3, "cohere2": COHERE2}
BASES |= {name: LLAMA | {"model_type": name} for name in ("exaone4", "olmo3", "smollm3", "ministral")}


def read(base=LLAMA, **keys):
    return model_of(base | keys, "config.json")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_model_here_is_published_and_read_again(path):
    model = config.load(path).model
    family = family_of(model)
    assert family.name == (FAMILY_OF.get(path.stem) or FAMILY_OF[path.stem.partition("-")[0]])
    written = config_of(model, family)
    again = model_of(written, "config.json")
    assert (
        list(map(computed, again.layers)) == list(map(computed, model.layers)) and config_of(again, family) == written
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_model_here(name):
    model, here = model_of(PUBLISHED[name], name), config.load(MODELS[0].with_name(f"{name}.toml")).model
    family = families()[PUBLISHED[name]["model_type"]]
    assert list(map(computed, model.layers)) == list(map(computed, here.layers))
    assert config_of(model, family) == config_of(here, family)


def test_what_is_left_out_has_the_family_s_default():
    assert read(num_key_value_heads=None).attention.num_kv_heads == 6
    assert read().attention.head_dim == 8 and read(head_dim=10).attention.head_dim == 10
    assert read().position.theta == 10_000 and not read().tied_embeddings
    gemma = read(GEMMA3, num_hidden_layers=7)
    assert gemma.tied_embeddings and [layer.position.theta for layer in gemma.layers] == [1e4] * 5 + [1e6, 1e4]
    assert windows(gemma) == [4096] * 5 + [None, 4096]
    assert windows(read(GEMMA2)) == [4096, None, 4096, None, 4096]
    glm4, arcee = LLAMA | {"model_type": "glm4"}, LLAMA | {"model_type": "arcee", "hidden_act": "relu2"}
    assert read(glm4).attention.qkv_bias and read(glm4).position.fraction == 0.5
    assert read({key: value for key, value in arcee.items() if key != "rms_norm_eps"}).norm.epsilon == 1e-5
    gpt2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": 96}
    assert read(gpt2).feed_forward.d_ff == 192 and read(gpt2, n_inner=80).feed_forward.d_ff == 80


def test_rotary_positions_are_read_in_both_spellings():
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert old == read(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3})
    assert old == read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    # The new spelling goes first.
    assert read(rope_theta=1.0, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).position.theta == 5e5
    written = config_of(old, families()["llama"])
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    assert written["rope_scaling"] == {"rope_type": "llama3", **LLAMA3}


def windows(model):
    return [layer.window for layer in model.layers]


def test_a_factor_that_does_not_follow_from_the_lengths_is_written():
    """transformers 5 reads Phi-3's `rope_scaling` before its `rope_parameters`."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi3 = LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 16}
    told = {"rope_type": "longrope", **factors}
    for more in ({}, {"factor": 4.0}, {"factor": 8.0}, {"attention_factor": 1.5}):
        model = read(phi3, rope_parameters=told | more | {"rope_theta": 5e5})
        written = config_of(model, families()["phi3"])
        plain = more in ({}, {"factor": 4.0})
        assert written["rope_scaling"] == (
            {"type": "longrope", **factors}
            if plain
            else told | {"factor": 4.0} | more | {"original_max_position_embeddings": 16}
        )
        assert read(written) == model == read({key: written[key] for key in written if key != "rope_parameters"})


def test_windows_are_those_of_the_layer_types():
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    mistral = LLAMA | {"model_type": "mistral"}
    assert windows(read(mistral)) == [4096] * 5 and windows(read(mistral, sliding_window=None)) == [None] * 5
    ministral = read(LLAMA | {"model_type": "ministral"}, sliding_window=9, layer_types=kinds)
    assert windows(ministral) == [9, 9, None, 9, 9]
    assert windows(read(QWEN3, sliding_window=9, max_window_layers=3)) == [None] * 5  # use_sliding_window is not set
    assert windows(read(QWEN3, sliding_window=9, max_window_layers=3, use_sliding_window=True)) == [None] * 3 + [9] * 2
    gemma = read(GEMMA3, sliding_window=9, sliding_window_pattern=3)
    assert windows(gemma) == [9, 9, None, 9, 9]
    assert [layer.position.theta for layer in gemma.layers] == [1e4, 1e4, 1e6, 1e4, 1e4]


def test_kinds_of_layers_have_their_own_rotary_positions():
    nested = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}
    nested["sliding_attention"] = {"rope_theta": 1e4, "rope_type": "default"}
    gemma = read(GEMMA3, sliding_window=9, sliding_window_pattern=3, rope_parameters=nested)
    assert [layer.position.scaling is not None for layer in gemma.layers] == [False, False, True, False, False]
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert read(GEMMA3, sliding_window=9, sliding_window_pattern=3, **old) == gemma
    assert config_of(gemma, families()["gemma3_text"])["rope_parameters"] == nested


def rotates(model):
    return [layer.position.kind == "rope" for layer in model.layers]


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("cohere2", {}, [True, True, True, False, True]),
        ("cohere2", {"sliding_window": None}, [False] * 5),
        ("cohere2", {"layer_types": ["full_attention"] * 5}, [False] * 5),
        ("exaone4", {}, [True, True, True, False, True]),
        ("exaone4", {"sliding_window": None}, [True] * 5),
        ("exaone4", {"layer_types": ["full_attention"] * 5}, [False] * 5),
        ("smollm3", {}, [True, True, True, False, True]),
        ("smollm3", {"no_rope_layers": [0] * 5}, [False] * 5),
    ],
)
def test_layers_rotate_that_the_family_says(family, keys, expected):
    model = read(BASES[family], **keys)
    assert rotates(model) == expected
    written = config_of(model, families()[family])
    assert read(written).layers == model.layers


def test_windows_of_smollm3_are_of_the_layers_that_do_not_rotate():
    smollm3 = LLAMA | {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9}
    assert windows(read(smollm3)) == [None, None, None, 9, None]
    assert windows(read(smollm3, layer_types=["sliding_attention"] + ["full_attention"] * 4)) == [9] + [None] * 4


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo3", "cohere2", "ministral"])
def test_an_export_without_windows_says_the_kind_of_each_layer(family):
    """transformers makes up kinds that are not listed, and asks for the size of a window even if no layer has one."""
    written = config_of(read(BASES[family], sliding_window=None), families()[family])
    assert written["layer_types"] == ["full_attention"] * 5 and written["sliding_window"] == 4096
    assert windows(read(written)) == [None] * 5


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_an_export_names_the_rotary_positions_of_both_kinds_of_layers(family):
    same = {"rope_theta": 5e5, "rope_local_base_freq": 5e5}
    written = config_of(read(BASES[family], layer_types=["full_attention"] * 5, **same), families()[family])
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    assert written["rope_parameters"] == {"full_attention": rope, "sliding_attention": rope}
    assert written["rope_theta"] == written["rope_local_base_freq"] == 5e5


def test_an_export_says_that_all_of_a_head_rotates_where_the_family_s_default_is_a_part():
    glm4 = read(LLAMA | {"model_type": "glm4"}, partial_rotary_factor=1.0)
    assert config_of(glm4, families()["glm4"])["rope_parameters"]["partial_rotary_factor"] == 1.0
    neox = read(NEOX, rotary_pct=1.0, hidden_act="gelu_new")
    written = config_of(neox, families()["gpt_neox"])
    assert written["rotary_pct"] == 1.0 and written["hidden_act"] == "gelu_pytorch_tanh"
    assert neox.feed_forward.activation == "gelu_tanh" and read(written) == neox


def test_the_family_of_an_export_has_what_its_class_in_transformers_asks_for():
    assert family_of(read()).name == "llama" and family_of(read(head_dim=10)).name == "llama"
    assert family_of(read(hidden_size=50, head_dim=10)).name == "mistral"  # 6 heads do not divide 50
    part = {"position": {"kind": "rope", "fraction": 0.5}}
    assert family_of(ModelConfig.model_validate(read().model_dump() | part)).name == "phi3"  # Llama's ignores the key
    granite = config_of(read(), families()["granite"])
    assert granite["attention_multiplier"] == 8**-0.5
    # Two kinds of rotary positions are none of Mistral's.
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    kinds = ["full_attention"] + ["sliding_attention"] * 4
    two = read(LLAMA | {"model_type": "ministral"}, rope_parameters=nested, layer_types=kinds, sliding_window=9)
    with pytest.raises(InputError, match="is of no family"):
        family_of(two)


@pytest.mark.parametrize(
    ("base", "keys", "message"),
    [
        ({}, {}, "config.json has model_type None; jaxlm reads llama, gpt2, gpt_neox, cohere2, exaone4"),
        (LLAMA, {"model_type": "rwkv"}, "has model_type 'rwkv'"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act = 'relu', and jaxlm has llama with 'silu' alone"),
        (NEOX, {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu', and jaxlm has 'gelu' or 'gelu_python' or"),
        (LLAMA, {"hidden_sizes": 9}, "hidden_sizes: jaxlm knows no such key of llama"),
        (LLAMA, {"sliding_window": 9}, "sliding_window: jaxlm knows no such key of llama"),
        (
            LLAMA,
            {"rope_scaling": {"type": "mrope", "factor": 2}},
            "rope_type 'mrope' is a scaling that jaxlm does not have",
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "su", "factor": 2}},
            "describes no model: position.scaling.short_factors",
        ),
        (LLAMA, {"num_key_value_heads": 4}, "describes no model: attention: model.attention.num_kv_heads = 4 does not"),
        (LLAMA, {"hidden_size": 47, "head_dim": None}, "describes no model: model.attention.num_heads = 6 does not"),
        (LLAMA, {"no_rope_layers": [1]}, "no_rope_layers: jaxlm knows no such key"),
        (BASES["smollm3"], {"no_rope_layers": [1]}, "no_rope_layers = [1]; it must be a list of 5 layers"),
        (GEMMA2, {"sliding_window": 9, "sliding_window_pattern": "4"}, "sliding_window_pattern = '4'; it must be"),
        (QWEN3, {"layer_types": [1] * 5}, "it must be a list of the kinds of the layers"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2, "odd": 1}},
            "odd: jaxlm knows no such key of rope_type",
        ),
        (QWEN3, {"layer_types": ["full_attention"] * 4}, "layer_types names 4 layers, and num_hidden_layers = 5"),
        (QWEN3, {"layer_types": ["linear_attention"] * 5}, "layer_types has linear_attention, which jaxlm does not"),
    ],
)
def test_what_jaxlm_does_not_know_is_refused(base, keys, message):
    with pytest.raises(InputError) as error:
        read(base, **keys)
    assert message in str(error.value)


def test_a_model_of_no_family_is_refused():
    model = read().model_copy(update={"logit_soft_cap": 5.0})
    why = ": it differs from the nearest family, llama, in model.logit_soft_cap = 5.0 and not none"
    with pytest.raises(InputError, match=rf"this \[model\] is of no family, and cannot be exported{why}$"):
        family_of(model)


def test_every_family_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in families())


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0; it must be a whole number above 0"),
        ("qwen3_moe", {"decoder_sparse_step": None}, "decoder_sparse_step = None; it must be a whole number"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1; it must be a list of layers from 0 to 2"),
        ("qwen3_moe", {"mlp_only_layers": [7]}, "it must be a list of layers from 0 to 2"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "it must be a list of layers from 0 to 2"),
        ("qwen3_moe", {"num_hidden_layers": 0}, "gives 0 as the number of layers; it must be a whole"),
        ("qwen3_moe", {"num_hidden_layers": 10**9}, "it must be a whole number from 1 to 100,000"),
        ("qwen3_moe", {"num_hidden_layers": "3"}, "num_hidden_layers = '3'; it must be a number"),
        ("mixtral", {"num_local_experts": "a"}, "num_local_experts = 'a'; it must be a number"),
        ("glm4_moe", {"n_shared_experts": "2"}, "n_shared_experts = '2'; it must be a number"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts_per_token = 9 is more than"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "it must be a whole number from 0 up"),
    ],
)
def test_numbers_that_describe_no_layers_are_refused(name, changes, message):
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        model_of(loud.read(name)[0]["config"] | changes, "config.json")
    assert "\n" not in str(refused.value)


def test_a_mixture_that_is_of_no_family_is_compared_with_one():
    model = model_of(loud.read("mixtral")[0]["config"], "config.json")
    layer = model.feed_forward.model_dump(exclude_none=True) | {"shared": {"d_ff": 9}}
    other = type(model).model_validate(model.model_dump(exclude_none=True) | {"feed_forward": layer})
    with pytest.raises(InputError, match="the nearest family, mixtral, in model.feed_forward.shared = "):
        family_of(other)
