"""The fixtures of the model families: complete, small, telling, and reproduced where torch and transformers are."""

import hashlib
import importlib
import math
import re
from collections import Counter
from pathlib import Path

import loud
import numpy as np
import pytest
from tiny_configs import FAMILIES

LIMIT_BYTES = 40 * 1024
RESEARCH = Path(__file__).parents[3] / "shared" / "research" / "hf_names.txt"
SAME_WIDTH = {
    "gpt2",
    "gpt_neox",
    "gpt_neox_sequential",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "olmoe",
    "qwen2_moe",
}  # the heads fill the residual stream by definition

# The heads, channels of a head, groups and channels of a state of Mamba-2.
STATE_SPACES = {
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size"),
    "granitemoehybrid": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
}

each_family = pytest.mark.parametrize("name", sorted(FAMILIES))


def test_every_family_has_its_two_files():
    files = {file.name for file in loud.FIXTURES.iterdir()}
    assert files == {f"{name}.{kind}" for name in FAMILIES for kind in ("json", "npz")}
    assert loud.names() == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("name", "shape", "variant", "digest"),
    [
        ("model.embed_tokens.weight", (97, 48), "loud", "cb1a719a4455be0a"),
        ("transformer.h.1.mlp.c_fc.weight", (48, 76), "loud", "501e8495e1b902d9"),
        ("model.layers.2.self_attn.q_norm.weight", (10,), "loud", "e978061a789b34aa"),
        ("model.layers.0.mlp.c_fc.bias", (76,), "loud", "d5ff8cdeaff3ba41"),
        ("model.layers.0.mlp.down_proj.weight", (48, 76), "quiet", "2a78aaaad73ec2da"),
        ("transformer.ln_f.weight", (48,), "quiet", "c90489868a1a64a7"),
    ],
)
def test_weights_have_the_same_bits_everywhere(name, shape, variant, digest):
    values = loud.tensor(name, shape, variant)
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16] == digest


def test_weights_have_their_sizes():
    shape = (301, 203)
    for name, mean, std in (
        ("model.layers.0.mlp.up_proj.weight", 0, 1.5 / math.sqrt(203)),
        ("transformer.h.0.attn.c_attn.weight", 0, 1.5 / math.sqrt(301)),
        ("model.embed_tokens.weight", 0, 0.25),
        ("model.norm.weight", 1, 0.3),
        ("model.layers.0.self_attn.q_proj.bias", 0, 0.5),
    ):
        values = loud.tensor(name, shape, "loud", embedding_std=0.25)
        np.testing.assert_allclose([values.mean(), values.std()], [mean, std], rtol=0.02, atol=0.01 * std)
    assert not loud.tensor("model.layers.0.input_layernorm.weight", (48,), "quiet", norm_center=0.0).any()
    assert (loud.tensor("model.layers.0.input_layernorm.weight", (48,), "quiet") == 1).all()
    assert not loud.tensor("transformer.h.0.attn.c_attn.bias", (48,), "quiet").any()


@each_family
def test_a_fixture_is_small(name):
    assert sum((loud.FIXTURES / f"{name}.{kind}").stat().st_size for kind in ("json", "npz")) <= LIMIT_BYTES


@each_family
def test_arrays_belong_to_the_facts(name):
    fixture, arrays = loud.read(name)
    vocab_size, positions = fixture["config"]["vocab_size"], len(fixture["positions"])
    shapes = {variant: (2, positions, vocab_size) for variant in loud.VARIANTS}
    if fixture["packed"]:
        shapes["packed"] = (len(fixture["packed"]["positions"]), vocab_size)
    if fixture["greedy"]:
        shapes["greedy"] = (len(fixture["greedy"]["steps"]), vocab_size)
        chosen = [fixture["greedy"]["tokens"][step] for step in fixture["greedy"]["steps"]]
        assert arrays["greedy"].argmax(-1).tolist() == chosen
    if fixture["short"]:
        shapes["short"] = (2, 3, vocab_size)
    if fixture["gradient_tensors"]:
        assert fixture["gradient_tensors"] == sorted(fixture["tensors"])
        shapes["gradients"] = (len(fixture["tensors"]), 5)
    assert {key: array.shape for key, array in arrays.items()} == shapes
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays.values())
    for variant in loud.VARIANTS:
        assert 0.3 * fixture["largest"][variant] < np.abs(arrays[variant]).max() <= 1.0001 * fixture["largest"][variant]
    drawn = loud.weights(fixture, "loud")
    assert sum(array.size for key, array in drawn.items() if not loud.is_state(key)) == fixture["parameters"]


@each_family
def test_the_old_spelling_says_the_same(name):
    fixture, _ = loud.read(name)
    config, old = fixture["config"], fixture["old_config"]
    assert not {"rope_parameters", "dtype"} & old.keys()
    assert old["torch_dtype"] == config["dtype"] == "float32"
    settings = str(config.get("rope_parameters"))
    thetas = {old[key] for key in ("rope_theta", "rotary_emb_base", "rope_local_base_freq") if key in old}
    assert thetas == {float(theta) for theta in re.findall(r"'rope_theta': ([\d.]+)", settings)}
    # Nothing but spelling differs, except a window that is not used and an activation that is not what it says.
    changed = {key for key in config.keys() & old.keys() if config[key] != old[key]}
    assert changed <= {"transformers_version", "sliding_window_pattern"} | (
        {"gemma": {"hidden_act"}, "lfm2": {"full_attn_idxs"}, "qwen2": {"sliding_window", "max_window_layers"}}.get(
            name, set()
        )
    )


@each_family
def test_the_tolerance_is_above_the_noise_and_below_the_margin(name):
    fixture, _ = loud.read(name)
    assert fixture["tolerance"] == 2e-5
    assert all(noise <= fixture["tolerance"] / 4 for noise in fixture["noise"].values())
    if greedy := fixture["greedy"]:
        assert len(greedy["tokens"]) == 64
        assert greedy["margin"] > 100 * fixture["noise"]["loud"]
        assert greedy["margin"] >= 25 * fixture["tolerance"]  # both logits may be off


@each_family
def test_all_dimensions_differ(name):
    """A transposed or misgrouped matrix has another shape or other values."""
    fixture, _ = loud.read(name)
    config = fixture["config"]
    width = config.get("hidden_size") or config["n_embd"]
    length, layers = len(fixture["sequences"][0]), number_of_layers(config)
    of_state_space = [config[key] for key in STATE_SPACES.get(config["model_type"], ())]
    if of_state_space:
        heads, head, groups, state = of_state_space
        of_state_space += [heads * head, groups * state]
    if config["model_type"] == "mamba2":
        sizes = [width, config["vocab_size"], length, layers, *of_state_space]
        assert len(set(sizes)) == len(sizes) and groups < heads
        return
    heads = config.get("num_attention_heads") or config["n_head"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    inner = config.get("intermediate_size") or config["n_inner"]
    sizes = [width, inner, config["vocab_size"], length, head, *of_state_space]
    if (latent := config.get("kv_lora_rank")) is not None:
        nope, value, kv_heads = config["qk_nope_head_dim"], config["v_head_dim"], 0
        head = nope + config["qk_rope_head_dim"]
        sizes = [width, inner, config["vocab_size"], length, nope, config["qk_rope_head_dim"], value, latent, heads]
        sizes += [heads * (nope + sizes[5]), heads * (nope + value), heads * value, latent + sizes[5]]
        sizes += [config["q_lora_rank"]] if config["q_lora_rank"] else []
    else:
        sizes += [] if name in SAME_WIDTH else [heads * head, kv_heads * head, heads, kv_heads]
    if (keys := config.get("linear_num_key_heads")) is not None:
        values, key_dim, value_dim = (
            config[f"linear_{key}"] for key in ("num_value_heads", "key_head_dim", "value_head_dim")
        )
        sizes += [keys, values, key_dim, value_dim, keys * key_dim, values * value_dim]
    assert len(set(sizes)) == len(sizes)
    assert name in SAME_WIDTH or (kv_heads < heads and heads * head != width)
    assert layers not in sizes
    squares = [key for key, shape in fixture["tensors"].items() if len(shape) == 2 and shape[0] == shape[1]]
    squares = [key for key in squares if not key.endswith("conv.out_proj.weight")]  # of the stream's own channels
    assert name in SAME_WIDTH or squares == []


@each_family
def test_sequences_reach_beyond_windows_and_original_lengths(name):
    fixture, _ = loud.read(name)
    config, sequences = fixture["config"], fixture["sequences"]
    length = len(sequences[0])
    assert len(sequences[1]) == length and sequences[0] != sequences[1]
    assert fixture["positions"][-1] == length - 1
    assert length >= 3 * (config.get("sliding_window") or 0)
    for original in re.findall(r"'original_max_position_embeddings': (\d+)", str(config)):
        assert length >= 2 * int(original)
    kinds = config.get("layer_types")
    if kinds and name not in (
        "qwen2_window",
        "granitemoehybrid_dense",
    ):  # of one its first layers see everything, the rest a window
        period = next(n for n in range(1, len(kinds) + 1) if kinds == (kinds[:n] * len(kinds))[: len(kinds)])
        assert len(kinds) > period and (period == 1 or len(kinds) % period)


def number_of_layers(config):
    return config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"])


def pattern(name: str) -> str:
    name = re.sub(r"experts\.\d+", "experts.E", name)
    return re.sub(r"\bh\.\d+", "h.L", re.sub(r"layers\.\d+", "layers.L", name))


def tensors_by_pattern(fixture):
    """Return the number of tensors of each pattern that a fixture has to have, from its configuration alone."""
    config = fixture["config"]
    layers = range(number_of_layers(config))
    experts = next(
        (config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config), 0
    )
    every, first = (
        config.get("decoder_sparse_step") or 1,
        config.get("first_k_dense_replace") or config.get("num_dense_layers", 0),
    )
    dense = [*range(first), *config.get("mlp_only_layers", [])]
    dense += [n for n, kind in enumerate(config.get("mlp_layer_types", [])) if kind == "dense"]
    sparse = [n for n in layers if experts and (n + 1) % every == 0 and n not in dense]
    kinds = Counter(config.get("layer_types", ()))
    linear = kinds["linear_attention"]
    own = {".linear_attn.": linear, ".mamba.": linear, ".conv.": kinds["conv"]}
    mixers = {**own, ".self_attn.": len(layers) - linear - kinds["conv"]}
    numbers = {}
    if "layers_block_type" in config:  # one part in each layer
        kinds = Counter(config["layers_block_type"])
        parts = {r"experts\.E": kinds["moe"] * experts, r"gate|experts|latent": kinds["moe"]}
        parts |= {r"[qkvo]_proj": kinds["full_attention"], r"(up|down)_proj": kinds["mlp"]}
        parts |= {r"mixer": kinds["linear_attention"], r"L\.norm": len(layers), "": 1}
        names = {pattern(name) for name in fixture["tensors"]}
        return {key: next(n for part, n in parts.items() if re.search(part, key)) for key in names}
    for key in (pattern(name) for name in fixture["tensors"]):
        if (mixer := next((mixer for mixer in mixers if mixer in key), None)) is not None:
            numbers[key] = mixers[mixer]
        elif ".experts.E." in key:
            numbers[key] = len(sparse) * experts
        elif re.search(r"block_sparse_moe\.|\.gate\.|shared_expert|expert_bias", key):
            numbers[key] = len(sparse)
        elif sparse and re.search(r"mlp\.(gate|up|down)_proj|feed_forward\.w", key):
            numbers[key] = len(layers) - len(sparse)
        else:
            numbers[key] = len(layers) if ".L." in key else 1
    return numbers


@each_family
@pytest.mark.skipif(not RESEARCH.exists(), reason="the list of published names lies beside the checkout")
def test_names_are_the_published_ones(name):
    fixture, _ = loud.read(name)
    config = fixture["config"]
    of = {"lfm2_moe": "lfm2"}.get(config["model_type"], config["model_type"])
    section = re.search(rf"^## {of} .*\n((?:   .*\n)+)", RESEARCH.read_text(encoding="utf-8"), re.M)
    published = {line.split()[0]: line.split("[")[1].count(",") + 1 for line in section[1].splitlines()}
    layer = "model.layers.L"
    if config.get("conv_bias"):
        published |= {f"{layer}.conv.{part}.bias": 1 for part in ("conv", "in_proj", "out_proj")}
    if of != config["model_type"]:  # as LFM2 beside its experts
        published |= {
            f"{layer}.feed_forward.{name}": 2
            for name in ("gate.weight", *(f"experts.E.w{i}.weight" for i in (1, 2, 3)))
        }
        published |= {f"{layer}.feed_forward.expert_bias": 1, "lm_head.weight": 2}
    if config["tie_word_embeddings"]:
        published.pop("lm_head.weight", None)
    if config.get("moe_latent_size"):
        published |= {f"backbone.layers.L.mixer.fc{i}_latent_proj.weight": 2 for i in (1, 2)}
    if config.get("num_local_experts") == 0:
        published = {key: rank for key, rank in published.items() if "block_sparse_moe" not in key}
    if config.get("decoder_sparse_step", 1) > 1 or config.get("mlp_only_layers"):  # some layers are dense
        section = re.search(r"^## qwen3 .*\n((?:   .*\n)+)", RESEARCH.read_text(encoding="utf-8"), re.M)
        dense = [line.split()[0] for line in section[1].splitlines()]
        published |= {name: 2 for name in dense if ".mlp." in name}
    if config["model_type"] == "glm4_moe" and not config["use_qk_norm"]:  # its smaller size, without biases here
        published = {key: rank for key, rank in published.items() if not re.search(r"[qk]_norm|_proj\.bias", key)}
    if config["model_type"] == "deepseek_v2" and config["q_lora_rank"] is None:  # V2-Lite
        published = {key: rank for key, rank in published.items() if ".q_" not in key}
        published["model.layers.L.self_attn.q_proj.weight"] = 2
    assert {pattern(key): len(shape) for key, shape in fixture["tensors"].items()} == published
    assert Counter(pattern(name) for name in fixture["tensors"]) == tensors_by_pattern(fixture)


def reproduces(name):
    make_fixtures = importlib.import_module("make_fixtures")
    facts, arrays = make_fixtures.fixture(name)
    stored_facts, stored = loud.read(name)
    for key in ("weights", "tensors", "sequences", "positions", "packed", "short", "gradient_tensors"):
        assert facts[key] == stored_facts[key]
    if stored_facts["greedy"]:
        assert facts["greedy"]["tokens"] == stored_facts["greedy"]["tokens"]
    assert arrays.keys() == stored.keys()
    for key, array in arrays.items():
        np.testing.assert_allclose(array, stored[key], rtol=1e-6, atol=1e-6 * np.abs(stored[key]).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_1", "phi3"])
def test_transformers_reproduces_a_fixture(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    reproduces(name)


@pytest.mark.exhaustive
@each_family
def test_transformers_reproduces_every_fixture(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    reproduces(name)
