"""Settings of the tiny models that the family fixtures are made of.

Every setting differs from its class's default where the family leaves a choice, so that a reader who overlooks the key
is found out.
"""

WINDOW = 7
THETA = 7000.0  # no class's default, like the other values here


def rope(kind: str = "default", theta: float = THETA, **settings) -> dict:
    return {"rope_type": kind, "rope_theta": theta, **settings}


def common(**settings) -> dict:
    """Return settings that most families share; all dimensions differ, and so do their products."""
    return {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 128,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 2e-5,
        "rope_parameters": rope(),
    } | settings


def without(settings: dict, *keys: str) -> dict:
    return {key: value for key, value in settings.items() if key not in keys}


# One frequency below, one between and three above the two wavelengths.
LLAMA3 = rope(
    "llama3",
    500.0,
    factor=6.0,
    low_freq_factor=0.6,
    high_freq_factor=3.0,
    original_max_position_embeddings=20,
)
# Some frequencies kept, one half-way, some interpolated. The two ends are rounded to whole frequencies, so the betas
# are such that a tenth more moves the first end, and a longer original length the second.
YARN = rope("yarn", 500.0, factor=4.0, beta_fast=0.2, beta_slow=0.0185, original_max_position_embeddings=16)
YARN_UNROUNDED = YARN | {"truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7}
# The class's own theta: from the old spelling transformers reads no other for the layers with a window.
YARN_GLOBAL = YARN | {"rope_theta": 500000.0, "beta_fast": 0.175, "beta_slow": 0.00105, "attention_factor": 1.3}
# The two slopes are apart: cos and sin keep a factor beside that of the scores.
YARN_LATENT = YARN_UNROUNDED | {"truncate": True, "beta_fast": 0.46, "beta_slow": 0.0248}


def latent(**settings) -> dict:
    """Return settings of a family with latent attention, whose keys are wider than its values."""
    own = {"kv_lora_rank": 22, "q_lora_rank": 26, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "v_head_dim": 10}
    return without(common(moe_intermediate_size=28, **own), "head_dim") | {"num_key_value_heads": 6} | settings


def gated_delta(**settings) -> dict:
    """Return settings of a family with Gated DeltaNet in two layers of three."""
    own = {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 22,
        "linear_value_head_dim": 11,
    }
    own |= {"linear_conv_kernel_dim": 3, "head_dim": 12, "rope_parameters": rope(partial_rotary_factor=0.5)}
    types = [*["linear_attention"] * 2, "full_attention", *["linear_attention"] * 2]
    return common(num_hidden_layers=5, layer_types=types, max_position_embeddings=256, **own) | settings


def short_convolution(**settings) -> dict:
    """Return settings of a family with short convolutions."""
    own = {"num_hidden_layers": 5, "conv_L_cache": 4, "norm_eps": 2e-5, "max_position_embeddings": 256}
    return without(common(**own), "rms_norm_eps") | settings


NEOX = without(
    common(
        hidden_size=72,
        intermediate_size=100,
        num_attention_heads=3,
        layer_norm_eps=2e-5,
        rope_parameters=rope(partial_rotary_factor=0.25),
    ),
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)


def granite_hybrid(**settings) -> dict:
    """Return settings of Granite 4, whose feed-forward layers have experts or none."""
    own = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 3, "mamba_d_state": 14, "mamba_d_conv": 5}
    own |= {"embedding_multiplier": 5.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 3.0}
    own |= {"intermediate_size": 28, "shared_intermediate_size": 38, "tie_word_embeddings": True}
    own |= {"max_position_embeddings": 256, "num_hidden_layers": 4}
    return without(common(**own), "head_dim", "rope_parameters") | settings


def nemotron(**settings) -> dict:
    """Return settings of Nemotron-H, with layers of every kind."""
    own = {"mamba_num_heads": 8, "mamba_head_dim": 14, "n_groups": 4, "ssm_state_size": 18, "conv_kernel": 5}
    own |= {"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 28}
    own |= {"moe_shared_expert_intermediate_size": 38, "routed_scaling_factor": 1.7, "layer_norm_epsilon": 2e-5}
    own |= {"layers_block_type": ["mamba", "mlp", "mamba", "moe", "attention"]}
    own |= {"max_position_embeddings": 256}
    return without(common(**own), "rms_norm_eps", "rope_parameters", "num_hidden_layers") | settings


def longrope(short: list[float], long: list[float], **settings) -> dict:
    return rope("longrope", short_factor=short, long_factor=long, original_max_position_embeddings=16, **settings)


# transformers gives the masks of these no positions: tokens see the documents before their own.
MIXES_DOCUMENTS = {"gpt_oss"}
# Whose recurrent layers read the documents before their own, there too: its chunks know of no beginnings.
RECURRENT = {"lfm2", "lfm2_moe", "mamba2", "qwen3_5", "qwen3_5_moe", "qwen3_next"}
RECURRENT |= {"granitemoehybrid", "granitemoehybrid_dense", "nemotron_h"}

# Fixture -> (model_type, settings). One period of the layers and a remainder.
FAMILIES = {
    "gpt2": (
        "gpt2",
        {
            "vocab_size": 97,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 3,
            "n_positions": 112,
            "n_inner": 76,
            "layer_norm_epsilon": 2e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox_sequential": ("gpt_neox", NEOX | {"use_parallel_residual": False}),
    "llama2": ("llama", common()),
    "llama3_1": ("llama", common(rope_parameters=LLAMA3)),
    "llama3_2": ("llama", common(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama_dynamic": ("llama", common(rope_parameters=rope("dynamic", factor=3.0), max_position_embeddings=16)),
    "llama_yarn": ("llama", common(rope_parameters=YARN_UNROUNDED)),
    "mistral": ("mistral", common(sliding_window=WINDOW)),
    "ministral": (
        "ministral",
        common(
            num_hidden_layers=5,
            sliding_window=WINDOW,
            layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
        ),
    ),
    "qwen2": ("qwen2", common()),
    "qwen2_window": ("qwen2", common(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "qwen3": ("qwen3", common(tie_word_embeddings=True)),
    "gemma": ("gemma", common()),
    "gemma2": (
        "gemma2",
        common(
            sliding_window=WINDOW,
            query_pre_attn_scalar=14,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": (
        "gemma3_text",
        common(
            num_hidden_layers=7,
            sliding_window=WINDOW,
            query_pre_attn_scalar=14,
            rope_parameters={
                "full_attention": rope("linear", 20000.0, factor=4.0),
                "sliding_attention": rope(theta=3000.0),
            },
        ),
    ),
    "olmo2": ("olmo2", common()),
    "olmo3": (
        "olmo3",
        common(
            num_hidden_layers=5,
            sliding_window=WINDOW,
            rope_parameters={
                "full_attention": YARN_GLOBAL,
                "sliding_attention": rope(theta=500000.0),
            },
        ),
    ),
    # The class asks for as many factors as a head of hidden_size // num_attention_heads needs.
    "phi3": (
        "phi3",
        common(
            hidden_size=64,
            sliding_window=13,
            original_max_position_embeddings=16,
            rope_parameters=longrope([1.0, 1.1, 1.2, 1.3, 1.4], [1.0, 2.0, 3.5, 5.0, 6.0]),
        ),
    ),
    "phi4_mini": (
        "phi3",
        common(
            hidden_size=52,
            head_dim=8,
            tie_word_embeddings=True,
            original_max_position_embeddings=16,
            rope_parameters=longrope([1.0, 1.1, 1.3], [1.2, 2.5, 4.0], partial_rotary_factor=0.75),
        ),
    ),
    "smollm3": ("smollm3", common(num_hidden_layers=5)),
    "granite": (
        "granite",
        common(
            embedding_multiplier=5.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=3.0,
            tie_word_embeddings=True,
        ),
    ),
    "glm4": ("glm4", common(head_dim=12, rope_parameters=rope(partial_rotary_factor=0.5))),
    "cohere2": (
        "cohere2",
        without(
            common(num_hidden_layers=5, sliding_window=WINDOW, layer_norm_eps=2e-5, logit_scale=0.3), "rms_norm_eps"
        ),
    ),
    "exaone4": ("exaone4", common(num_hidden_layers=5, sliding_window=WINDOW)),
    "seed_oss": ("seed_oss", common(attention_bias=True, attention_out_bias=False)),
    "starcoder2": ("starcoder2", without(common(sliding_window=WINDOW, norm_epsilon=2e-5), "rms_norm_eps")),
    "arcee": ("arcee", common(rope_parameters=YARN)),
    "mixtral": ("mixtral", common(num_local_experts=5, num_experts_per_tok=3)),
    "olmoe": ("olmoe", without(common(num_experts=6, num_experts_per_tok=4), "head_dim")),
    "qwen2_moe": (
        "qwen2_moe",
        without(
            common(
                moe_intermediate_size=28,
                shared_expert_intermediate_size=36,
                num_experts=6,
                num_experts_per_tok=3,
                norm_topk_prob=True,
                decoder_sparse_step=2,
                num_hidden_layers=5,
            ),
            "head_dim",
        ),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        common(moe_intermediate_size=28, num_experts=7, num_experts_per_tok=3, mlp_only_layers=[1]),
    ),
    "gpt_oss": (
        "gpt_oss",
        common(
            num_local_experts=6,
            num_experts_per_tok=3,
            num_hidden_layers=5,
            sliding_window=WINDOW,
            swiglu_alpha=1.4,
            swiglu_limit=1.1,
            rope_parameters=YARN | {"truncate": False},
        ),
    ),
    "minimax_m2": (
        "minimax_m2",
        common(
            num_local_experts=7,
            num_experts_per_tok=3,
            head_dim=12,
            rope_parameters=rope(partial_rotary_factor=0.5),
        ),
    ),
    "glm4_moe": (
        "glm4_moe",
        common(
            moe_intermediate_size=28,
            n_routed_experts=12,
            n_group=3,
            topk_group=2,
            num_experts_per_tok=4,
            n_shared_experts=2,
            routed_scaling_factor=1.7,
            attention_bias=True,
            use_qk_norm=True,
            head_dim=12,
            num_hidden_layers=4,
            first_k_dense_replace=2,
            num_mtp_layers=0,
            rope_parameters=rope(partial_rotary_factor=0.5),
        ),
    ),
    "glm4_moe_air": (
        "glm4_moe",
        common(
            moe_intermediate_size=20,
            n_routed_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            head_dim=12,
            num_mtp_layers=0,
            rope_parameters=rope(partial_rotary_factor=0.5),
        ),
    ),
    "deepseek_v2": (
        "deepseek_v2",
        latent(
            n_routed_experts=12,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            num_experts_per_tok=4,
            n_shared_experts=2,
            routed_scaling_factor=2.6,
            first_k_dense_replace=1,
            rope_parameters=YARN_LATENT,
        ),
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        latent(
            n_routed_experts=7,
            num_experts_per_tok=3,
            n_shared_experts=1,
            routed_scaling_factor=1.7,
            first_k_dense_replace=2,
            q_lora_rank=None,
        ),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        latent(
            n_routed_experts=12,
            n_group=3,
            topk_group=2,
            num_experts_per_tok=4,
            n_shared_experts=2,
            routed_scaling_factor=1.7,
            first_k_dense_replace=1,
            num_mtp_layers=0,
            rope_parameters=YARN_LATENT,
        ),
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        latent(
            n_routed_experts=7,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.7,
            mlp_layer_types=["dense", "sparse", "dense"],
            num_nextn_predict_layers=0,
        ),
    ),
    "qwen3_next": (
        "qwen3_next",
        gated_delta(
            moe_intermediate_size=28,
            shared_expert_intermediate_size=36,
            num_experts=7,
            num_experts_per_tok=4,
            norm_topk_prob=False,
            mlp_only_layers=[1],
        ),
    ),
    "mamba2": (
        "mamba2",
        {
            "vocab_size": 97,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 14,
            "conv_kernel": 5,
            "layer_norm_epsilon": 2e-5,
            "time_step_limit": [0.3, 1.5],
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen3_5": ("qwen3_5_text", gated_delta()),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        gated_delta(moe_intermediate_size=28, shared_expert_intermediate_size=36, num_experts=6, num_experts_per_tok=3),
    ),
    "lfm2": (
        "lfm2",
        short_convolution(
            block_multiple_of=12,
            block_ffn_dim_multiplier=1.3,
            conv_bias=True,
            layer_types=["conv", "full_attention"] * 2 + ["conv"],
        ),
    ),
    "lfm2_moe": (
        "lfm2_moe",
        short_convolution(
            moe_intermediate_size=28,
            num_experts=7,
            num_experts_per_tok=3,
            num_dense_layers=1,
            routed_scaling_factor=1.7,
            tie_word_embeddings=False,
            layer_types=["conv", "conv", "full_attention", "conv", "conv"],
        ),
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        granite_hybrid(
            num_local_experts=7, num_experts_per_tok=3, layer_types=["mamba", "attention", "mamba", "mamba"]
        ),
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        granite_hybrid(num_local_experts=0, layer_types=["attention", "mamba"] * 2, position_embedding_type="rope"),
    ),
    "nemotron_h": ("nemotron_h", nemotron(moe_latent_size=26, n_group=3, topk_group=2)),
    "nanochat": ("nanochat", common(final_logit_softcapping=4.0)),
}
# Embeddings are smaller where the family multiplies them, and where tied ones would make each token predict itself.
WEIGHTS = {
    **{name: {"norm_center": 0.0, "embedding_std": 0.07} for name in ("gemma", "gemma2", "gemma3")},
    **{name: {"norm_center": 0.0} for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    **{name: {"embedding_std": 0.5} for name in ("gpt2", "lfm2", "llama3_2", "mamba2", "qwen3", "starcoder2")},
    **{name: {"embedding_std": 0.1} for name in ("granite", "granitemoehybrid", "granitemoehybrid_dense")},
}
# What published files of transformers 4 say otherwise; None: nothing.
OLD = {
    "cohere2": {"layer_types": None, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "gemma": {"hidden_act": "gelu"},  # which means the tanh approximation
    "gemma2": {"layer_types": None},
    "gemma3": {"layer_types": None, "_sliding_window_pattern": None, "sliding_window_pattern": 6},
    "qwen2": {"layer_types": None, "sliding_window": WINDOW, "max_window_layers": 1},  # a window, which is not used
    "qwen2_window": {"layer_types": None},
    "qwen3": {"layer_types": None},
    "minimax_m2": {"rotary_dim": 6},
    "qwen3_moe": {"num_local_experts": None, "num_experts": 7},
    **{name: {"layer_types": None, "full_attention_interval": 3} for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    "lfm2": {
        **dict.fromkeys(("layer_types", "intermediate_size", "tie_word_embeddings")),
        **{"full_attn_idxs": [1, 3], "block_ff_dim": 76, "tie_embedding": True},
    },
    "smollm3": {"layer_types": None},
}
GRADIENTS = {"llama3_1", "olmo2", "gemma2", "gpt_neox", "cohere2"}  # pre, post, sandwich, two parallel, one parallel
LENGTH_DEPENDENT = {"phi3", "phi4_mini", "llama_dynamic"}  # a short run as well
PATH_DEPENDENT = {"llama_dynamic"}  # each length has its frequencies, so neither packing nor a cache is exact


def old_spelling(name: str, config: dict) -> dict:
    """Return a config as transformers 4 spells it, with rope_theta, rope_scaling and torch_dtype."""
    old = config | OLD.get(name, {}) | {"torch_dtype": config["dtype"], "transformers_version": "4.57.0"}
    settings = old.pop("rope_parameters", {})
    if "full_attention" in settings:
        old["rope_local_base_freq"] = settings["sliding_attention"]["rope_theta"]
        settings = settings["full_attention"]
    theta, partial = "rope_theta", "partial_rotary_factor"
    if config["model_type"] == "gpt_neox":
        theta, partial = "rotary_emb_base", "rotary_pct"
    old[theta] = settings.get("rope_theta")
    if "rotary_dim" not in old:
        old[partial] = settings.get("partial_rotary_factor")
    scaling = without(settings, "rope_theta", "partial_rotary_factor")
    if config["model_type"] == "phi3":  # whose length stands outside, and the kind under its oldest name
        scaling = {"type": scaling["rope_type"]} | without(scaling, "rope_type", "original_max_position_embeddings")
    old["rope_scaling"] = scaling if settings.get("rope_type", "default") != "default" else None
    null = {key for key, value in old.items() if value is None and config.get(key, "") is not None}
    return dict(sorted(without(old, "dtype", *null).items()))
