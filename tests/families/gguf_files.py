"""A writer of small GGUF files, with llama.cpp's conventions (convert_hf_to_gguf.py), from Hugging Face tensors."""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.families.gguf.blocks import TYPES

_NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_ALIGNMENT = 32


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | tuple[str, tuple, bytes]]
) -> Path:
    """Write a file. A tensor is a float32 array, or the name of its type, its shape and its bytes."""
    header, places, content = [], [], b""
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = ("F32", tensor.shape, np.ascontiguousarray(tensor, np.float32).tobytes())
        kind, shape, data = tensor
        dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        places.append(
            _string(name)
            + struct.pack("<I", len(shape))
            + dimensions
            + struct.pack("<IQ", _NUMBERS[kind], len(content))
        )
        content += data + b"\0" * (-len(data) % _ALIGNMENT)
    header = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    header += [_string(key) + _value(value) for key, value in metadata.items()] + places
    start = b"".join(header)
    path.write_bytes(start + b"\0" * (-len(start) % _ALIGNMENT) + content)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        inner = [_value(each) for each in value]
        return struct.pack("<IIQ", 9, struct.unpack("<I", inner[0][:4])[0], len(value)) + b"".join(x[4:] for x in inner)
    forms = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    number, form = forms[type(value)]
    return struct.pack(f"<I{form}", number, value)


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
}  # fmt: skip


def named(architecture: str, name: str) -> str:
    """Return the name in a GGUF file of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    layer = re.match(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", stem)
    inner = layer[2] if layer else stem
    theirs = _NAMES[inner]
    if inner == "post_attention_layernorm" and architecture in ("gemma2", "gemma3", "olmo2"):
        theirs = "post_attention_norm"
    return f"blk.{layer[1]}.{theirs}.{kind}" if layer else f"{theirs}.{kind}"


def stored(architecture: str, name: str, tensor: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Return a tensor as a GGUF file has it."""
    if architecture in ("llama", "smollm3", "granite") and (part := re.search(r"\.([qk])_proj\.", name)):
        count = heads if part[1] == "q" else kv_heads
        halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
        return np.swapaxes(halves, 1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return tensor.T
    return tensor
