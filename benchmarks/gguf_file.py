"""A GGUF file of published weights of GPT-2 and Llama, as llama.cpp reads them, without a vocabulary."""

import re
from pathlib import Path

import numpy as np

from jaxlm.families.directory import PublishedModel

GPT2 = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
LLAMA = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "norm": "output_norm",
}
NAMES = {"gpt2": GPT2, "llama": LLAMA}
_LAYER = re.compile(r"^(?:h|layers)\.(\d+)\.")


def write(model: Path, file: Path) -> None:
    """Write the weights of a Hugging Face directory of `model_type` "gpt2" or "llama", in float32.

    Raises KeyError for another family or tensor, and ValueError for scaled rotary angles or biases of attention, which
    are not written.
    """
    import gguf

    published = PublishedModel(model)
    config, family = published.config, published.config["model_type"]
    writer = gguf.GGUFWriter(file, family)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or config.get("attention_bias"):
        raise ValueError(f"{model} has scaled rotary angles or biases of attention, which are not written")
    sizes = _gpt2_sizes(config) if family == "gpt2" else _llama_sizes(config)
    writer.add_context_length(sizes["context"])
    writer.add_embedding_length(sizes["width"])
    writer.add_block_count(sizes["layers"])
    writer.add_feed_forward_length(sizes["hidden"])
    writer.add_head_count(sizes["heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if family == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(sizes["width"] // sizes["heads"])
        writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    for name, stored in published.stored.items():
        x = np.asarray(stored.read(), np.float32)
        if family == "gpt2" and x.ndim == 2 and ".c_" in name:
            x = x.T
        if heads := {"q_proj.weight": sizes["heads"], "k_proj.weight": config.get("num_key_value_heads")}.get(
            ".".join(name.split(".")[-2:])
        ):
            # llama.cpp rotates numbers that follow one another, Hugging Face those of the two halves of a head.
            x = x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(_named(name, NAMES[family]), np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def narrow(file: Path, into: Path, width: str) -> None:
    """Write a file in another width, "F16", "Q8_0" or "Q4_0", as llama.cpp makes it: vectors stay float32, and of
    "Q4_0" the unembedding gets six bits. Raises RuntimeError where llama.cpp does not write it."""
    import ctypes

    import llama_cpp as cpp

    how = cpp.llama_model_quantize_default_params()
    how.ftype = getattr(cpp, f"LLAMA_FTYPE_MOSTLY_{width}")
    if cpp.llama_model_quantize(str(file).encode(), str(into).encode(), ctypes.byref(how)):
        raise RuntimeError(f"llama.cpp does not write {width}")


def _named(name: str, names: dict[str, str]) -> str:
    """Return llama.cpp's name of a tensor of Hugging Face's."""
    inner = name.removeprefix("transformer.").removeprefix("model.")
    layer = _LAYER.match(inner)
    rest = inner[layer.end() :] if layer else inner
    if rest not in names:
        part, _, kind = rest.rpartition(".")
        found = f"{names[part]}.{kind}"
    else:
        found = names[rest]
    return f"blk.{layer[1]}.{found}" if layer else found


def _gpt2_sizes(config: dict) -> dict[str, int]:
    width = config["n_embd"]
    return {
        "context": config["n_positions"],
        "width": width,
        "layers": config["n_layer"],
        "hidden": config.get("n_inner") or 4 * width,
        "heads": config["n_head"],
    }


def _llama_sizes(config: dict) -> dict[str, int]:
    return {
        "context": config["max_position_embeddings"],
        "width": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "hidden": config["intermediate_size"],
        "heads": config["num_attention_heads"],
    }
