"""Mixtures of experts as they are published: two layouts of tensors, state, further layers, exact counts."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import loud
import meshes
import ml_dtypes
import numpy as np
import pytest
from matrices import sampled
from running import logits, save
from workload_fixtures import workload

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.plan import parameter_counts
from jaxlm.families import table
from jaxlm.families.directory import PublishedModel, write
from jaxlm.families.family import families, named
from jaxlm.families.settings import config_of, model_of
from jaxlm.models import tree
from jaxlm.parallel.rules import TRAIN

MODELS = Path(__file__).parents[2] / "configs" / "models"
MIXTURES = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "minimax_m2", "glm4_moe", "deepseek_v3"]
MIXTURES += ["qwen3_next", "qwen3_5_moe", "lfm2_moe"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GLM = {
    "model_type": "glm4_moe", "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 8, "attention_bias": True, "vocab_size": 151552,
    "rope_theta": 1000000, "partial_rotary_factor": 0.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
AIR = GLM | {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
    "n_routed_experts": 128, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
GLM = GLM | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
    "n_routed_experts": 160, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608, "mtp_transformer_layers": 1,
    "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6,
    "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "pretraining_tp": 1, "tie_word_embeddings": False,
}  # fmt: skip
V2 = LATENT | {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 2, "n_routed_experts": 160, "num_experts_per_tok": 6, "q_lora_rank": 1536,
    "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0, "norm_topk_prob": False, "scoring_func": "softmax",
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V2_LITE = V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "q_lora_rank": None, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
}  # fmt: skip
V3 = LATENT | {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "q_lora_rank": 1536,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
# Kimi K2 (arXiv:2507.20534, table 2) is one of V3's configurations.
K2 = V3 | {
    "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
FLASH = {
    "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def opened(folder, settings, tensors):
    """A Hugging Face directory with these tensors."""
    folder.mkdir(exist_ok=True)
    return PublishedModel(save(folder, settings, tensors))


def loaded(published, dtype=None):
    return tree.paths(published.load(meshes.make(1, 1, 1), TRAIN, dtype))


def exported(published, folder, dtype=None, keeps_config=True, say=lambda line: None):
    """Return the model in the directory that an export writes."""
    parameters = published.load(meshes.make(1, 1, 1), TRAIN, dtype)
    kept = {"config.json": (published.folder / "config.json").read_bytes()} if keeps_config else {}
    write(folder, published.model, parameters, published.dtypes(), kept, say)
    return PublishedModel(folder)


def fused(name, weights):
    """The tensors of a fixture as `save_pretrained(save_original_format=False)` of transformers 5.24 names them."""
    block = {"mixtral": "block_sparse_moe.", "minimax_m2": "block_sparse_moe.", "lfm2_moe": "feed_forward."}.get(name)
    other = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"} if block else {}
    found, block = {}, block or "mlp."
    now = block.replace("block_sparse_moe", "mlp")
    for key, x in weights.items():
        layer, dot, rest = key.partition(f".{block}experts.")
        if not dot:
            found[key.replace(".block_sparse_moe.", ".mlp.")] = x
        elif rest.startswith("0."):
            number = sum(key.startswith(f"{layer}.{block}experts.") for key in weights) // 3

            def stack(part, start=f"{layer}.{block}experts", number=number):
                return np.stack([weights[f"{start}.{e}.{other.get(part, part)}.weight"] for e in range(number)])

            gate_up = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
            found |= {
                f"{layer}.{now}experts.gate_up_proj": gate_up,
                f"{layer}.{now}experts.down_proj": stack("down_proj"),
            }
    return found


@pytest.mark.parametrize("name", sampled(MIXTURES, ["qwen2_moe", "minimax_m2"]))
def test_both_layouts_of_experts_are_read_and_the_hub_s_is_written(name, tmp_path):
    facts, _ = loud.read(name)
    weights = loud.weights(facts, "loud")
    second = opened(tmp_path / "fused", facts["config"], fused(name, weights))
    assert not any(".experts.0." in key for key in second.tensors)
    first = loaded(opened(tmp_path / "hub", facts["config"], weights))
    for path, x in loaded(second).items():
        np.testing.assert_array_equal(x, first[path])
    back = exported(second, tmp_path / "out")
    assert back.stored.keys() == weights.keys()
    for key, x in weights.items():
        np.testing.assert_array_equal(back.stored[key].read(), x)


def test_a_file_in_two_layouts_is_refused(tmp_path):
    facts, _ = loud.read("mixtral")
    weights = loud.weights(facts, "loud")
    key = "model.layers.0.mlp.experts.down_proj"
    mixed = opened(tmp_path / "mixed", facts["config"], weights | {key: fused("mixtral", weights)[key]})
    with pytest.raises(InputError, match=r"model.layers.0.mlp.gate.weight is missing"):
        _ = mixed.tensors


@pytest.mark.parametrize("layout", [lambda name, weights: weights, fused], ids=["hub", "fused"])
def test_more_experts_than_the_files_hold_are_refused_before_they_are_listed(layout, tmp_path):
    """A billion names would take hours and all memory."""
    facts, _ = loud.read("mixtral")
    settings = facts["config"] | {"num_local_experts": 10**9}
    huge = opened(tmp_path / "huge", settings, layout("mixtral", loud.weights(facts, "loud")))
    assert table.matrices(huge.model) > 10**9
    with pytest.raises(InputError, match=r"describes [0-9,]{14,} parameters, and \d+ tensors hold [0-9,]+: check"):
        _ = huge.tensors


def test_matrices_are_counted_as_they_are_listed():
    model, family = model_of(loud.read("mixtral")[0]["config"], "here"), named("mixtral", "here")
    assert table.matrices(model) == sum("layers." in name for name in table.tensors(model, family.rules))


@pytest.mark.parametrize("layout", [lambda name, weights: weights, fused], ids=["hub", "fused"])
def test_dtypes_are_kept_by_the_names_of_an_export(layout, tmp_path):
    facts, _ = loud.read("mixtral")
    weights = {key: x if "gate" in key else x.astype(BFLOAT16) for key, x in loud.weights(facts, "loud").items()}
    found = opened(tmp_path / "in", facts["config"], layout("mixtral", weights))
    back = exported(found, tmp_path / "out")
    assert {key: back.stored[key].dtype for key in weights} == {key: x.dtype for key, x in weights.items()}
    assert found.dtypes()["model.layers.1.block_sparse_moe.gate.weight"] == "F32"


@pytest.mark.parametrize("stored", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_state_is_float32_in_memory_and_in_an_export(stored, tmp_path):
    """Beside bfloat16 parameters, loaded as they are or in bfloat16."""
    facts, _ = loud.read("glm4_moe_air")
    weights = {
        key: x.astype(stored if loud.is_state(key) else BFLOAT16) for key, x in loud.weights(facts, "loud").items()
    }
    found = opened(tmp_path / "in", facts["config"], weights)
    key, path = "model.layers.2.mlp.gate.e_score_correction_bias", "layers/mixture/feed_forward/selection_bias"
    for dtype in (None, "bfloat16"):
        leaves = loaded(found, dtype)
        assert leaves[path].dtype == jnp.float32 and leaves["final_norm/scale"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaves[path][1], weights[key].astype(np.float32))
        back = exported(found, tmp_path / f"out {dtype}", dtype).stored
        assert back[key].dtype == np.float32 and back["model.norm.weight"].dtype == BFLOAT16
        np.testing.assert_array_equal(back[key].read(), weights[key].astype(np.float32))


def test_experts_are_mapped_and_fetched_many_at_a_time(tmp_path, monkeypatch):
    """A call for each of the 18,432 matrices of Qwen3-30B took most of the time of an import and an export."""
    settings = loud.read("qwen3_moe")[0]["config"] | {"num_experts": 128, "num_local_experts": 128}
    expected = table.tensors(model_of(settings, "config.json"), families()["qwen3_moe"].rules)
    found = opened(tmp_path / "in", settings, {key: np.zeros(x.shape, np.float32) for key, x in expected.items()})
    made, fetched = [], []
    maps, fetch = np.memmap, jax.device_get
    monkeypatch.setattr(np, "memmap", lambda *arguments: made.append(arguments) or maps(*arguments))
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(x.shape) or fetch(x))
    exported(found, tmp_path / "out")
    experts = [key for key in expected if ".experts." in key]
    assert len(experts) == 2 * 3 * 128 and len(made) == 1
    assert len(fetched) == len(expected) - len(experts) + 2 * 3


def test_an_import_keeps_layers_for_multi_token_prediction_and_an_export_gives_them_back(tmp_path):
    facts, _ = loud.read("glm4_moe_air")
    weights, last = loud.weights(facts, "loud"), facts["config"]["num_hidden_layers"]
    further = {f"model.layers.{last}.{key}": np.ones((2, 2), np.float32) for key in ("eh_proj.weight", "enorm.weight")}
    has = facts["config"] | {"num_nextn_predict_layers": 1}
    found = opened(tmp_path / "in", has, weights | further)
    assert found.tensors.keys() == weights.keys() and found.dropped == list(further)
    said, written = [], "2 tensors of layers for multi-token prediction are written as they were read"
    api.import_run(tmp_path / "in", tmp_path / "run", say=said.append)
    assert said[:2] == [
        "2 tensors are of layers for multi-token prediction, after layer 2: nothing is computed with them, and an "
        "import keeps them for an export",
        "keys of config.json that change no result, kept for an export: output_router_logits",
    ]
    for place in ("in", "run"):
        api.export(tmp_path / place, tmp_path / f"of {place}", say=said.append)
        back = PublishedModel(tmp_path / f"of {place}")
        assert written in said and back.config == has and back.stored.keys() == weights.keys() | further.keys()
        for key in weights | further:
            assert back.stored[key].read().tobytes() == found.stored[key].read().tobytes(), key
        said.clear()
    # As of a run that was trained further: these layers are of the weights before.
    back = exported(found, tmp_path / "out", say=said.append)
    assert said[0] == "the export has no layers for multi-token prediction, and config.json had: they are set to 0"
    assert back.config == has | {"num_nextn_predict_layers": 0} and back.stored.keys() == weights.keys()
    assert exported(found, tmp_path / "plain", keeps_config=False).config["num_nextn_predict_layers"] == 0
    without = opened(tmp_path / "no key", facts["config"], weights | further)
    with pytest.raises(InputError, match=f"model.layers.{last}.eh_proj.weight is none of the model's"):
        _ = without.tensors


def test_a_fixture_notices_that_experts_of_other_groups_are_masked_by_zero(monkeypatch, tmp_path):
    """Their scores with the bias are below zero at times, and zero would win."""
    facts, arrays = loud.read("glm4_moe")
    published = opened(tmp_path, facts["config"], loud.weights(facts, "loud"))
    parameters = published.load(meshes.make(1, 1, 1), TRAIN)
    route = importlib.import_module("jaxlm.models.doors.route")
    masked, errors = route._in_kept_groups, []
    for change in (lambda x: x, lambda x: jnp.where(jnp.isneginf(x), 0.0, x)):
        monkeypatch.setattr(route, "_in_kept_groups", lambda x, choice, change=change: change(masked(x, choice)))
        with jax.set_mesh(meshes.make(1, 1, 1)):
            found = logits(published.model, parameters, facts["sequences"])
        given = np.asarray(found)[:, facts["positions"]]
        errors.append(np.abs(given - arrays["loud"]).max() / facts["largest"]["loud"])
    assert errors[0] <= facts["tolerance"] and errors[1] >= 30 * facts["tolerance"]


@pytest.mark.parametrize(
    ("settings", "total", "active", "state"),
    [
        pytest.param(AIR, 106_852_245_504, 13_424_123_904, 5_760, id="GLM-4.5-Air"),
        pytest.param(GLM, 352_797_814_784, 33_632_251_904, 14_240, id="GLM-4.5"),
        pytest.param(MINIMAX, 228_689_748_992, 11_030_537_216, 15_872, id="MiniMax-M2"),
        pytest.param(V2_LITE, 15_706_484_224, 2_661_150_208, 0, id="DeepSeek-V2-Lite"),
        pytest.param(V2, 235_741_434_880, 21_375_800_320, 0, id="DeepSeek-V2"),
        pytest.param(V3, 671_026_404_352, 37_552_282_624, 14_848, id="DeepSeek-V3"),
        pytest.param(K2, 1_026_408_209_408, 32_861_477_888, 23_040, id="Kimi K2"),
        pytest.param(FLASH, 29_943_390_976, 3_896_763_136, 2_944, id="GLM-4.7-Flash"),
    ],
)
def test_counts_are_those_of_transformers_modules(settings, total, active, state):
    model = model_of(settings, "config.json")
    counts = parameter_counts(workload("train", model, batch=8, sequence=1024))
    assert (counts["total"], counts["active"]) == (total, active)
    declared = tree.paths(tree.dimensions(tree.abstract(model)[1]))
    assert sum(np.prod(d.shape) for d in declared.values() if d.is_state) == state


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("glm-4.5-air", AIR),
        ("minimax-m2", MINIMAX),
        ("deepseek-v2", V2),
        ("deepseek-v2-lite", V2_LITE),
        ("deepseek-v3", V3),
    ],
)
def test_configurations_here_are_the_published_ones(name, settings):
    model, here = model_of(settings, name), config.load(MODELS / f"{name}.toml").model
    family = families()[settings["model_type"]]
    assert config_of(model, family) == config_of(here, family)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 46}, "first_k_dense_replace = 46 leaves no layer of 46 with experts"),
        ({"topk_method": "greedy"}, "topk_method: jaxlm knows no such key of glm4_moe"),
        ({"n_group": 5, "topk_group": 2}, "groups.count = 5 does not divide"),
    ],
)
def test_keys_of_glm_that_describe_no_model_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        model_of(AIR | changes, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type_list": [1] * 61 + [0]}, "attn_type_list has linear attention, which jaxlm does not have"),
        ({"rotary_dim": 64, "partial_rotary_factor": 0.25}, "rotary_dim = 64 and partial_rotary_factor = 0.25"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head', and jaxlm has minimax_m2 with 'per_layer' alone"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax', and jaxlm has minimax_m2 with 'sigmoid' alone"),
        ({"shared_intermediate_size": 1536}, "shared_intermediate_size: jaxlm knows no such key"),
        ({"rotary_dim": 63}, "channels: their number must be even"),
    ],
)
def test_keys_of_minimax_that_describe_no_model_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        model_of(MINIMAX | changes, "config.json")


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads = 8, .* it can be 128 alone"),
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax', and jaxlm has deepseek_v3 with 'sigmoid' alone"),
        (V3, {"rope_interleave": False}, "rope_interleave = False, and jaxlm has deepseek_v3 with True alone"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc', and jaxlm has greedy and group_limited_greedy"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob = True, and jaxlm has deepseek_v2 with False alone"),
        (V3, {"index_topk": 2048}, "index_topk: jaxlm knows no such key"),
        (V3, {"qk_nope_head_dim": "128"}, "qk_nope_head_dim = '128'; it must be a number"),
        (V3, {"qk_rope_head_dim": None}, "qk_rope_head_dim = None; it must be a whole number"),
        (V3, {"num_attention_heads": "128"}, "num_attention_heads = '128'; it must be a number"),
        (V3, {"n_group": "8"}, "n_group = '8'; it must be a number"),
        (V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5, and deepseek_v3 has 1.0 alone"),
        (V2, {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "= 0.5, and deepseek_v2 has 1.0 alone"),
        (FLASH, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "= 0.5, and glm4_moe_lite has 1.0 alone"),
        (V3, {"rope_scaling": [1]}, "rope_scaling and rope_parameters have to be tables"),
        (
            V3,
            {"rope_scaling": YARN | {"factor": "40", "mscale_all_dim": 1.0}},
            "rope_scaling.factor = '40'; it must be a number",
        ),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": "x"}}, "mscale_all_dim = 'x'; it must be a number"),
        (FLASH, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45}, "mlp_layer_types and first_k_dense_replace = 1"),
        (FLASH, {"mlp_layer_types": ["sparse"] * 9}, "mlp_layer_types must be a list of 47 layers"),
    ],
)
def test_keys_of_deepseek_that_describe_no_model_are_refused(settings, changes, message):
    with pytest.raises(InputError, match=message):
        model_of(settings | changes, "config.json")


@pytest.mark.parametrize(
    ("model_type", "part"),
    [
        ("deepseek_v32", "an indexer, which chooses the tokens that attention reads"),
        ("glm_moe_dsa", "an indexer, which chooses the tokens that attention reads"),
        ("deepseek_v4", "compressed attention with an indexer, and hyper-connections"),
        ("glm5_next", "an indexer, and hyper-connections"),
        ("llama4_text", "experts whose weights multiply what they read, and attention in chunks"),
        ("gemma3n_text", "embeddings of their own for each layer, and keys and values that layers share"),
        ("gemma4_text", "embeddings of their own for each layer, and keys and values that layers share"),
        ("olmo_hybrid", "Gated DeltaNet whose β reaches 2"),
        ("qwen4_exp_text", "embeddings of n-grams"),
        ("kimi_linear", "Kimi Delta Attention"),
        ("falcon_h1", "attention and Mamba-2 in parallel"),
        ("jamba", "Mamba-1"),
    ],
)
def test_a_family_without_its_parts_here_is_refused_by_name(model_type, part, tmp_path):
    nested = {"model_type": "any", "text_config": {"model_type": model_type}}
    said = f"config.json has model_type '{model_type}', whose layers have {part}: jaxlm lacks this part"
    for settings in ({"model_type": model_type}, nested):
        with pytest.raises(InputError) as error:
            model_of(settings, "config.json")
        assert str(error.value) == said
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(InputError, match=f"'{model_type}', whose layers have"):
        _ = PublishedModel(tmp_path).family


def test_no_family_is_both_read_and_refused():
    for model_type in families():
        assert named(model_type, "here").name == model_type
