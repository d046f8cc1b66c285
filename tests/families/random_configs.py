"""Random settings of small models of the published families, over every option that their tables read."""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

Settings = dict[str, Any]
KINDS = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
ORIGINALS = (12, 16, 20)  # contexts before they were stretched, all shorter than the sequences


def draw(model_type: str, seed: int) -> tuple[Settings, Settings]:
    """Return random settings of a family for `AutoConfig.for_model`, and the arguments of `loud.tensor` for it."""
    r = random.Random(f"{model_type} {seed}")
    settings = _FAMILIES[model_type](r)
    weights: Settings = {"embedding_std": 0.5} if settings.get("tie_word_embeddings") else {}
    if model_type.startswith("gemma"):  # which multiply embeddings by √d_model, and norms by one plus the weight
        weights = {"embedding_std": 0.5 / math.sqrt(settings["hidden_size"]), "norm_center": 0.0}
    if "linear_num_key_heads" in settings:  # norms times one plus the weight
        weights = weights | {"norm_center": 0.0}
    if multiplier := settings.get("embedding_multiplier"):
        weights = {"embedding_std": 0.5 / multiplier}
    return settings, weights


def ropes(settings: Settings) -> list[Settings]:
    """Return the rotary positions of settings, of each kind of layer."""
    found = settings.get("rope_parameters", {})
    return list(found.values()) if "full_attention" in found else [found]


def path_dependent(settings: Settings, length: int) -> bool:
    """Return whether tokens before others have other rotary positions if these follow, within so many tokens."""
    kinds = {rope.get("rope_type") for rope in ropes(settings)}
    return "dynamic" in kinds and settings["max_position_embeddings"] < length


def _decoder(r: random.Random, partial: tuple[float, ...] = (1.0,), filled: bool = False, **more: Any) -> Settings:
    """Return settings that most families share. `filled`: the heads are as wide as the stream."""
    heads = r.choice((2, 3, 4, 6))
    part = r.choice(partial)
    width = r.choice([width for width in (6, 8, 10, 12, 16) if int(width * part) % 2 == 0 and int(width * part) > 0])
    hidden = heads * width if filled or r.random() < 0.4 else r.choice((36, 48, 60))  # whatever the number of heads
    settings = {
        "vocab_size": r.choice((97, 105)),
        "hidden_size": hidden,
        "intermediate_size": r.choice((40, 76, 100)),
        "num_hidden_layers": r.randint(1, 6),
        "num_attention_heads": heads,
        "num_key_value_heads": r.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": width,
        "max_position_embeddings": r.choice((64, 128)),
        "rms_norm_eps": r.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": r.random() < 0.4,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more
    settings["rope_parameters"] = rope = _rope(r, settings, part)
    if rope["rope_type"] == "dynamic" and r.random() < 0.5:
        settings["max_position_embeddings"] = r.choice(ORIGINALS)
    if hidden == heads * width and r.random() < 0.5 and rope["rope_type"] != "longrope":
        del settings["head_dim"]  # which follows, or is the family's own
    return settings


def _rope(r: random.Random, settings: Settings, part: float = 1.0, kinds: tuple[str, ...] = KINDS) -> Settings:
    pairs = int(settings["head_dim"] * part) // 2
    kind, original, factor = r.choice(kinds), r.choice(ORIGINALS), r.choice((1.5, 4.0, 8.0))
    rope: Settings = {"rope_type": kind, "rope_theta": r.choice((500.0, 7000.0, 10000.0, 1e6))}
    if part != 1:
        rope["partial_rotary_factor"] = part
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        rope["factor"] = factor
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original
    if kind == "llama3":
        rope |= {"low_freq_factor": r.choice((0.6, 1.0)), "high_freq_factor": r.choice((2.0, 4.0))}
    if kind == "yarn":
        rope |= r.choice(({}, {"beta_fast": r.choice((0.3, 2.0, 40.0)), "beta_slow": r.choice((0.01, 0.1))}))
        rope |= _some(r, truncate=False, attention_factor=1.3)
        rope |= _some(r, mscale=1.2) | _some(r, mscale_all_dim=0.7)
    if kind == "longrope":
        rope |= {key: [round(r.uniform(1, 6), 2) for _ in range(pairs)] for key in ("short_factor", "long_factor")}
        rope |= {"factor": factor} | _some(r, attention_factor=1.2)
    return rope


def _some(r: random.Random, **settings: Any) -> Settings:
    """Return each of these settings, or not."""
    return {key: value for key, value in settings.items() if r.random() < 0.5}


def _flags(r: random.Random, *names: str) -> Settings:
    return {name: r.random() < 0.5 for name in names}


def _window(r: random.Random) -> int:
    return r.choice((1, 3, 7, 11))


def _kinds(r: random.Random, settings: Settings) -> Settings:
    """Return a window and the kind of each layer."""
    kinds = ("full_attention", "sliding_attention")
    return {
        "sliding_window": _window(r),
        "layer_types": [r.choice(kinds) for _ in range(settings["num_hidden_layers"])],
    }


def _renamed(settings: Settings, **names: str) -> Settings:
    """Return settings with other names; those that are named "" are left out."""
    renamed = {names.get(key, key): value for key, value in settings.items()}
    return {key: value for key, value in renamed.items() if key}


def _without(settings: Settings, keys: Iterable[str]) -> Settings:
    return {key: value for key, value in settings.items() if key not in keys}


def _gpt2(r: random.Random) -> Settings:
    base = _decoder(r, filled=True)
    return {
        "n_embd": base["hidden_size"],
        "n_layer": base["num_hidden_layers"],
        "n_head": base["num_attention_heads"],
        "n_positions": 128,
        "n_inner": r.choice((None, base["intermediate_size"])),
        "layer_norm_epsilon": base["rms_norm_eps"],
        "activation_function": r.choice(("gelu_new", "gelu_pytorch_tanh")),
        **{key: base[key] for key in ("vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id")},
    }


def _gpt_neox(r: random.Random) -> Settings:
    base = _decoder(
        r, (0.25, 0.5, 1.0), filled=True, hidden_act=r.choice(("gelu", "gelu_pytorch_tanh", "relu", "silu"))
    )
    base = _renamed(base, rms_norm_eps="layer_norm_eps", num_key_value_heads="", head_dim="")
    base["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return base | _flags(r, "use_parallel_residual", "attention_bias")


def _llama(r: random.Random) -> Settings:
    return _decoder(r, **_flags(r, "attention_bias", "mlp_bias"))


def _mistral(r: random.Random) -> Settings:
    return _decoder(r, sliding_window=r.choice((None, _window(r))))


def _ministral(r: random.Random) -> Settings:
    base = _decoder(r)
    # transformers 5.24 scales rotary positions of None channels where the width of a head is left out.
    base.setdefault("head_dim", base["hidden_size"] // base["num_attention_heads"])
    return base | _kinds(r, base)


def _qwen(r: random.Random) -> Settings:
    base = _decoder(r)
    if r.random() < 0.4:
        return base | _kinds(r, base) | {"use_sliding_window": True}
    window = {"sliding_window": _window(r), "max_window_layers": r.randint(0, base["num_hidden_layers"])}
    return base | window | _flags(r, "use_sliding_window")


def _gemma2(r: random.Random) -> Settings:
    base = _decoder(r, query_pre_attn_scalar=r.choice((6, 14, 25)))
    base |= {key: r.choice((None, 3.0, 5.0)) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return base | _kinds(r, base)


def _gemma3(r: random.Random) -> Settings:
    # transformers 5.24 reads a cap of the scores of Gemma 3, and does not use it.
    return _nested(r, _gemma2(r)) | {"attn_logit_softcapping": None}


def _nested(r: random.Random, settings: Settings) -> Settings:
    """Return settings with rotary positions of their own for each kind of layer."""
    sized = {"head_dim": settings["hidden_size"] // settings["num_attention_heads"]} | settings
    # transformers 5.24 looks for `truncate` beside the two kinds, where it is not.
    full, sliding = (_without(_rope(r, sized), ["truncate"]) for _ in range(2))
    if "dynamic" not in (full["rope_type"], sliding["rope_type"]):  # a short context, of the positions before, is none
        sized["max_position_embeddings"] = max(sized["max_position_embeddings"], 64)
    return sized | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _olmo2(r: random.Random) -> Settings:
    return _decoder(r, **_flags(r, "attention_bias"))


def _olmo3(r: random.Random) -> Settings:
    base = _olmo2(r)
    return _nested(r, base | _kinds(r, base))


def _phi3(r: random.Random) -> Settings:
    part = r.choice((0.5, 0.75, 1.0))
    base = _decoder(r, sliding_window=r.choice((None, _window(r))), original_max_position_embeddings=16)
    width = r.choice([width for width in (8, 16) if width * part % 2 == 0])
    base |= {"head_dim": width, "hidden_size": base["num_attention_heads"] * width + r.randint(0, 1)}
    rope = _rope(r, base, part, ("default", "longrope"))
    if rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = 16
    return base | {"rope_parameters": {"partial_rotary_factor": 1.0} | rope}


def _smollm3(r: random.Random) -> Settings:
    base = _decoder(r, **_flags(r, "attention_bias", "mlp_bias", "use_sliding_window"))
    if base["use_sliding_window"]:
        base["sliding_window"] = _window(r)
    if r.random() < 0.5:
        return base | {"no_rope_layer_interval": r.choice((1, 2, 3, 4))}
    return base | {"no_rope_layers": [r.randint(0, 1) for _ in range(base["num_hidden_layers"])]}


def _granite(r: random.Random, filled: bool = False) -> Settings:
    multipliers = {
        "embedding_multiplier": r.choice((1.0, 5.0, 12.0)),
        "attention_multiplier": r.choice((0.1, 0.3)),
        "residual_multiplier": r.choice((0.22, 0.6, 1.0)),
        "logits_scaling": r.choice((1.0, 3.0, 8.0)),
    }
    return _decoder(r, filled=filled, **multipliers, **_flags(r, "attention_bias", "mlp_bias"))


def _glm4(r: random.Random) -> Settings:
    base = _decoder(r, (0.25, 0.5, 1.0), **_flags(r, "attention_bias"))
    rope = base["rope_parameters"]
    if rope.get("partial_rotary_factor", 1.0) != 0.5 or r.random() < 0.5:  # which is left out otherwise
        return base | {"rope_parameters": {"partial_rotary_factor": 1.0} | rope}
    return base | {"rope_parameters": _without(rope, ["partial_rotary_factor"])}


def _cohere2(r: random.Random) -> Settings:
    base = _decoder(r, filled=True, logit_scale=r.choice((0.0625, 0.3, 1.0)), **_flags(r, "attention_bias"))
    return _renamed(base, rms_norm_eps="layer_norm_eps") | _kinds(r, base)


def _exaone4(r: random.Random) -> Settings:
    base = _decoder(r)
    if r.random() < 0.3:
        return base | {"sliding_window": None, "layer_types": ["full_attention"] * base["num_hidden_layers"]}
    if r.random() < 0.5:
        return base | {"sliding_window": _window(r), "sliding_window_pattern": r.choice((2, 4))}
    return base | _kinds(r, base)


def _seed_oss(r: random.Random) -> Settings:
    return _decoder(r, **_flags(r, "attention_bias", "attention_out_bias", "mlp_bias"))


def _starcoder2(r: random.Random) -> Settings:
    base = _decoder(r, sliding_window=r.choice((None, _window(r))), **_flags(r, "use_bias"))
    return _renamed(base, rms_norm_eps="norm_epsilon")


def _nanochat(r: random.Random) -> Settings:
    return _decoder(r, final_logit_softcapping=r.choice((None, 4.0, 15.0)))


def _experts(r: random.Random, key: str, width: str = "intermediate_size") -> Settings:
    count = r.choice((3, 4, 6, 8))
    return {key: count, "num_experts_per_tok": r.randint(1, count - 1), width: r.choice((20, 28, 36))}


def _mixtral(r: random.Random) -> Settings:
    return _decoder(r, **_experts(r, "num_local_experts"))


def _olmoe(r: random.Random) -> Settings:
    flags = _flags(r, "norm_topk_prob", "attention_bias")
    return _without(_decoder(r, filled=True, **_experts(r, "num_experts"), **flags), ["head_dim"])


def _qwen_moe(r: random.Random, filled: bool, *flags: str) -> Settings:
    base = _decoder(r, filled=filled, **_experts(r, "num_experts", "moe_intermediate_size"))
    layers = base["num_hidden_layers"]
    step = r.choice([step for step in (1, 1, 2, 3) if step <= layers])
    dense = [layer for layer in range(layers - 1) if r.random() < 0.3] if step == 1 else []
    return base | {"decoder_sparse_step": step, "mlp_only_layers": dense} | _flags(r, "norm_topk_prob", *flags)


def _qwen2_moe(r: random.Random) -> Settings:
    base = _qwen_moe(r, True, "qkv_bias")
    return _without(base, ["head_dim"]) | {"shared_expert_intermediate_size": r.choice((24, 44))}


def _lfm2(r: random.Random) -> Settings:
    width = {"block_multiple_of": r.choice((8, 12)), "block_ffn_dim_multiplier": r.choice((1.0, 1.3))}
    return _convolutions(r, _decoder(r)) | width | _flags(r, "block_auto_adjust_ff_dim")


def _lfm2_moe(r: random.Random) -> Settings:
    base = _convolutions(r, _decoder(r, **_experts(r, "num_experts", "moe_intermediate_size")))
    own = {
        "num_dense_layers": r.randint(0, base["num_hidden_layers"] - 1),
        "routed_scaling_factor": r.choice((1.0, 2.5)),
    }
    return base | own | _flags(r, "norm_topk_prob", "use_expert_bias")


def _convolutions(r: random.Random, base: Settings) -> Settings:
    """Return settings with short convolutions in some layers."""
    types = [r.choice(("conv", "full_attention")) for _ in range(base["num_hidden_layers"])]
    own = {"norm_eps": base["rms_norm_eps"], "conv_L_cache": r.choice((2, 3, 4)), "layer_types": types}
    return _without(base, ["rms_norm_eps"]) | own | _flags(r, "conv_bias")


def _qwen3_next(r: random.Random) -> Settings:
    base = _decoder(r, (0.5,), **_experts(r, "num_experts", "moe_intermediate_size"))
    dense = [layer for layer in range(base["num_hidden_layers"] - 1) if r.random() < 0.3]
    own = {"shared_expert_intermediate_size": r.choice((24, 44)), "mlp_only_layers": dense}
    return _gated_delta(r, base) | own | _flags(r, "norm_topk_prob")


def _gated_delta(r: random.Random, base: Settings) -> Settings:
    """Return settings with Gated DeltaNet in some layers."""
    types = [r.choice(("linear_attention", "full_attention")) for _ in range(base["num_hidden_layers"])]
    sizes = {"linear_conv_kernel_dim": r.choice((2, 3, 4)), "linear_num_key_heads": r.choice((1, 2, 3))}
    sizes |= {"linear_key_head_dim": r.choice((16, 22)), "linear_value_head_dim": r.choice((10, 16))}
    return base | sizes | {"layer_types": types, "linear_num_value_heads": 6}


def _mamba2(r: random.Random) -> Settings:
    heads, width = r.choice((2, 4, 6)), r.choice((8, 12))
    base = _decoder(r, hidden_size=heads * width // 2)
    same = "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "bos_token_id", "eos_token_id"
    return {key: base[key] for key in (*same, "pad_token_id")} | {
        "num_heads": heads,
        "head_dim": width,
        "n_groups": r.choice((1, 2)),
        "state_size": r.choice((10, 14)),
        "conv_kernel": r.choice((2, 3, 4)),
        "layer_norm_epsilon": base["rms_norm_eps"],
        "time_step_limit": r.choice(((0.0, math.inf), (0.2, math.inf), (0.0, 2.0))),
        **_flags(r, "use_conv_bias"),
    }


def _granite_hybrid(r: random.Random) -> Settings:
    base, groups = _granite(r, filled=True), r.choice((1, 2))
    heads = r.choice([n for n in (2, 4, 6) if 2 * base["hidden_size"] % n == 0])
    width = 2 * base["hidden_size"] // heads
    own = {"mamba_n_heads": heads, "mamba_d_head": width, "mamba_n_groups": groups, "mamba_d_state": r.choice((10, 14))}
    own |= {"mamba_d_conv": r.choice((2, 3, 4)), "time_step_limit": r.choice(((0.0, math.inf), (0.2, 2.0)))}
    own |= {"layer_types": [r.choice(("mamba", "attention")) for _ in range(base["num_hidden_layers"])]}
    own |= {"shared_intermediate_size": r.choice((24, 44))} | _flags(r, "mamba_conv_bias")
    own |= {"position_embedding_type": r.choice((None, "rope"))}
    own |= r.choice(({"num_local_experts": 0}, _experts(r, "num_local_experts")))
    return _without(base | own, ["head_dim", "mlp_bias"])


def _nemotron(r: random.Random) -> Settings:
    base = _decoder(r, **_experts(r, "n_routed_experts", "moe_intermediate_size"))
    own = {"mamba_num_heads": r.choice((2, 4)), "mamba_head_dim": r.choice((8, 12)), "n_groups": r.choice((1, 2))}
    own |= {"ssm_state_size": r.choice((10, 14)), "conv_kernel": r.choice((2, 3, 4))}
    own |= {"moe_shared_expert_intermediate_size": r.choice((24, 44)), "moe_latent_size": r.choice((None, 26))}
    own |= {"routed_scaling_factor": r.choice((1.0, 2.5)), "layer_norm_epsilon": base["rms_norm_eps"]}
    own |= {"layers_block_type": ["attention", *(r.choice(("mamba", "attention", "mlp", "moe")) for _ in range(4))]}
    own |= _flags(r, "norm_topk_prob", "use_conv_bias")
    base = {"head_dim": base["hidden_size"] // base["num_attention_heads"]} | base | own
    return _without(base, ["rms_norm_eps", "rope_parameters", "num_hidden_layers", "tie_word_embeddings"])


def _minimax_m2(r: random.Random) -> Settings:
    base = _decoder(r, (0.5, 1.0), **_experts(r, "num_local_experts"))
    return {"head_dim": base["hidden_size"] // base["num_attention_heads"]} | base


def _glm4_moe(r: random.Random) -> Settings:
    base = _glm4(r) | _experts(r, "n_routed_experts", "moe_intermediate_size")
    base |= {"n_shared_experts": r.choice((1, 2)), "routed_scaling_factor": r.choice((1.0, 2.5)), "num_mtp_layers": 0}
    if r.random() < 0.5:
        groups = {"n_routed_experts": 12, "n_group": 3, "topk_group": r.choice((1, 2)), "num_experts_per_tok": 3}
        base |= groups
    dense = r.randint(0, base["num_hidden_layers"] - 1)
    return base | {"first_k_dense_replace": dense} | _flags(r, "norm_topk_prob", "use_qk_norm")


def _latent(r: random.Random) -> Settings:
    """Return settings with latent attention: a scaling of YaRN has both slopes, or none."""
    base = _without(_decoder(r, **_experts(r, "n_routed_experts", "moe_intermediate_size")), ["head_dim"])
    base |= {"num_key_value_heads": base["num_attention_heads"], "tie_word_embeddings": False}
    base |= {"kv_lora_rank": r.choice((14, 22)), "q_lora_rank": r.choice((None, 18, 26)), "qk_rope_head_dim": 8}
    base |= {"qk_nope_head_dim": r.choice((10, 14)), "v_head_dim": r.choice((6, 10, 30))}
    base |= {"n_shared_experts": r.choice((1, 2)), "routed_scaling_factor": r.choice((1.0, 2.5))}
    base["rope_parameters"] = rope = {"rope_type": "default", "rope_theta": r.choice((500.0, 10000.0))}
    if r.random() < 0.5:
        original = r.choice(ORIGINALS)
        rope |= {"rope_type": "yarn", "factor": r.choice((2.0, 4.0)), "original_max_position_embeddings": original}
        rope |= r.choice(({}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale": 1.2, "mscale_all_dim": 0.6}))
    return base


def _deepseek_v2(r: random.Random) -> Settings:
    base = _latent(r)
    base["hidden_size"] = base["num_attention_heads"] * r.choice((8, 12))  # the class asks for it
    if r.random() < 0.5:
        base |= {"n_routed_experts": 12, "n_group": 4, "topk_group": r.choice((1, 2, 3)), "num_experts_per_tok": 3}
        base |= {"topk_method": "group_limited_greedy"}
    return base | {"first_k_dense_replace": r.randint(0, base["num_hidden_layers"] - 1)}


def _deepseek_v3(r: random.Random) -> Settings:
    base = _latent(r) | {"n_group": 1, "topk_group": 1, "num_mtp_layers": 0}
    if r.random() < 0.5:
        base |= {"n_routed_experts": 12, "n_group": 3, "topk_group": r.choice((1, 2)), "num_experts_per_tok": 3}
    return base | {"first_k_dense_replace": r.randint(0, base["num_hidden_layers"] - 1)} | _flags(r, "norm_topk_prob")


def _glm4_moe_lite(r: random.Random) -> Settings:
    base = _without(_deepseek_v3(r), ["first_k_dense_replace", "num_mtp_layers"])
    types = [r.choice(("dense", "sparse")) for _ in range(base["num_hidden_layers"] - 1)] + ["sparse"]
    return base | {"mlp_layer_types": types, "num_nextn_predict_layers": 0}


_FAMILIES: dict[str, Callable[[random.Random], Settings]] = {
    "arcee": _llama,
    "cohere2": _cohere2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "exaone4": _exaone4,
    "gemma": _decoder,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granite": _granite,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "llama": _llama,
    "granitemoehybrid": _granite_hybrid,
    "mamba2": _mamba2,
    "minimax_m2": _minimax_m2,
    "ministral": _ministral,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron,
    "nanochat": _nanochat,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen,
    "qwen2_moe": _qwen2_moe,
    "qwen3": lambda r: _qwen(r) | _flags(r, "attention_bias"),
    "qwen3_moe": lambda r: _qwen_moe(r, False, "attention_bias"),
    "qwen3_5_moe_text": lambda r: _without(_qwen3_next(r), ["mlp_only_layers", "norm_topk_prob"]),
    "qwen3_5_text": lambda r: _gated_delta(r, _decoder(r, (0.5,))),
    "qwen3_next": _qwen3_next,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
