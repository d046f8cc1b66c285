"""Directories whose matrices are quantised as in GPTQ, AWQ and FP8, number by number, and the same in float32."""

import json
from pathlib import Path

import loud
import ml_dtypes
import numpy as np

from jaxlm.families import safetensors, table
from jaxlm.families.family import families
from jaxlm.families.safetensors import LazyTensor
from jaxlm.families.settings import model_of

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "dtype": "float16", "vocab_size": 96}
CONFIG = loud.read("qwen3")[0]["config"] | _SIZES | _LAYERS
_MIXTURE = {
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CONFIGS = {"qwen3": CONFIG, "qwen3_moe": loud.read("qwen3_moe")[0]["config"] | _SIZES | _LAYERS | _MIXTURE}


def describe(method, bits=4, group=128, symmetric=True, form="gptq"):
    """Return the table quantization_config."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    own = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": False, "checkpoint_format": form}
    return {"quant_method": "gptq", **own}


def write(folder: Path, arrays, config) -> None:
    """Write a Hugging Face directory."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()}
    safetensors.write(folder / "model.safetensors", tensors, {})


def words(codes, bits, order):
    """Return int32 words, each of codes side by side in the last axis; `order` has the place of each, the lowest first.
    Python's integers are used, which have no width."""
    per_word = 32 // bits
    rows = [
        [
            sum(int(row[start + place]) << (bits * i) for i, place in enumerate(order))
            for start in range(0, len(row), per_word)
        ]
        for row in codes
    ]
    return np.array(rows, np.uint32).view(np.int32)


def packed(name, codes, zeros, scales, described, groups=None):
    """Return the tensors of a matrix of codes [inputs, outputs] with zero points and scales [groups, outputs]."""
    module, bits = name.removesuffix(".weight"), described["bits"]
    if described["quant_method"] == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {"qweight": words(codes, 4, order), "qzeros": words(zeros, 4, order)}
    else:
        order, less = range(32 // bits), described["checkpoint_format"] == "gptq"
        stored = (zeros.astype(int) - less) % 2**bits
        parts = {"qweight": words(codes.T, bits, order).T, "qzeros": words(stored, bits, order), "g_idx": groups}
    parts["scales"] = scales
    return {f"{module}.{part}": np.ascontiguousarray(x) for part, x in parts.items()}


def compressed(form, bits=8, group=None, kind="int"):
    """Return the table quantization_config of compressed-tensors."""
    strategy = {"strategy": "group" if group else "channel", "group_size": group}
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "actorder": None, "block_structure": None, **strategy}
    activations = {"num_bits": 8, "type": kind, "dynamic": False, "strategy": "tensor"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    method = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return method | {"config_groups": groups, "ignore": ["lm_head"], "kv_cache_scheme": None}


def in_compressed(name, shape, described, random):
    """Return the tensors of a matrix of compressed-tensors, and the matrix in float32."""
    weights, (outputs, inputs) = described["config_groups"]["group_0"]["weights"], shape
    bits, group = weights["num_bits"], weights["group_size"] or inputs
    scales = (random.uniform(0.5, 1.5, (outputs, inputs // group)) / 2**bits).astype(ml_dtypes.bfloat16)
    if weights["type"] == "float":
        numbers = random.standard_normal(shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
    else:
        numbers = random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).astype(np.int8)
    tensors = {f"{name}_scale": scales, name.replace("weight", "input_scale"): np.ones(1, np.float32)}
    if described["format"] == "pack-quantized":
        codes = numbers.astype(int) + 2 ** (bits - 1)
        tensors |= {f"{name}_packed": words(codes, bits, range(32 // bits)), f"{name}_shape": np.array(shape)}
    else:
        tensors |= {name: numbers}
    matrix = np.empty(shape, np.float32)
    for column in range(inputs):
        matrix[:, column] = numbers[:, column].astype(np.float32) * scales[:, column // group].astype(np.float32)
    return tensors, matrix


def in_fp8(name, shape, block, random):
    """Return the tensors of a matrix in FP8 with scales of blocks, one for all where there is no block, and the matrix
    in float32."""
    values = random.standard_normal(shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
    grid = tuple(-(-size // block) for size in shape) if block else ()
    scales = (random.uniform(0.5, 1.5, grid) / 16).astype(np.float32)
    matrix = np.empty(shape, np.float32)
    for row, column in np.ndindex(*shape):
        matrix[row, column] = np.float32(values[row, column]) * scales[(row // block, column // block) if block else ()]
    return {name: values, f"{name}_scale_inv": np.asarray(scales)}, matrix


def make(folder: Path, described, permuted=False, whole=(), family="qwen3"):
    """Write `folder`/packed and `folder`/wide, and return the tensors of the latter, the numbers of matrices exact in
    float32. Matrices whose names have a part of `whole` are not quantised."""
    random, bits, group = np.random.default_rng(0), described.get("bits"), described.get("group_size")
    own, wide, config = {}, {}, CONFIGS[family]
    for name, binding in table.tensors(model_of(config, "config.json"), families()[family].rules).items():
        shape = binding.shape
        if not name.endswith("_proj.weight") or any(part in name for part in whole):
            x = random.standard_normal(shape, np.float32) * 0.1 + ("norm" in name)
            own[name], wide[name] = x.astype(np.float16), x.astype(np.float16).astype(np.float32)
            continue
        if (method := described["quant_method"]) in ("fp8", "compressed-tensors"):
            if method == "fp8":
                tensors, wide[name] = in_fp8(name, shape, (described["weight_block_size"] or [None])[0], random)
            else:
                tensors, wide[name] = in_compressed(name, shape, described, random)
            own |= tensors
            continue
        outputs, inputs = shape
        size = inputs if group == -1 else group
        count, middle = -(-inputs // size), 2 ** (bits - 1)
        codes = random.integers(0, 2**bits, (inputs, outputs))
        is_symmetric = described.get("sym", False)
        zeros = np.full((count, outputs), middle) if is_symmetric else random.integers(0, 2**bits, (count, outputs))
        scales = (random.uniform(0.5, 1.5, (count, outputs)) / middle / np.sqrt(inputs)).astype(np.float16)
        groups = np.arange(inputs, dtype=np.int32) // size
        groups = random.permutation(groups) if permuted else groups
        own |= packed(name, codes, zeros, scales, described, groups)
        own |= {} if "self_attn" in name else {name.replace("weight", "bias"): np.zeros(outputs, np.float16)}
        matrix = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            matrix[:, i] = (codes[i] - zeros[groups[i]]) * scales[groups[i]].astype(np.float64)
        wide[name] = matrix
    write(folder / "packed", own, config | {"quantization_config": described})
    write(folder / "wide", wide, config)
    return wide
