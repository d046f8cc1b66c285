"""Translation of a GGUF file into the keys of config.json and the tensors of a Hugging Face directory."""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.core.schema import merged
from jaxlm.families.gguf.reader import GgufFile
from jaxlm.families.quantized import CONFIG_KEY, described_blocks
from jaxlm.families.quantized.scaled import ScaledTensor
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import QuantizeKind

_Tensor = StoredTensor | LazyTensor
_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Llama 3.1 and 3.2 (the only ones that were published with such factors): factor, low, high, original context.
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))
_SCALING = "rope.scaling."


@cache
def _architectures() -> dict[str, dict[str, Any]]:
    """Return the architectures by name, with what each takes from its base."""
    text = resources.files(__package__).joinpath("architectures.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = {}
    for name, table in tomllib.loads(text).items():
        tables[name] = merged(tables.get(table.get("base", ""), {}), table)
    return tables


def architecture(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """Return the name and the table of a file's architecture. Raises InputError for one that jaxlm does not have."""
    name = file.metadata.get("general.architecture")
    table = _architectures().get(name) if isinstance(name, str) else None
    if table is None or "model_type" not in table:
        known = ", ".join(each for each, table in _architectures().items() if "model_type" in table)
        raise InputError(f"{file.path} is of architecture {name!r}, and jaxlm reads {known} from GGUF")
    assert isinstance(name, str)
    return name, table


def config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a file. Raises InputError for a key of its architecture that jaxlm does not know:
    nothing that changes a result is ignored."""
    name, table = architecture(file)
    values = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} has no token_embd.weight")
    described: dict[str, Any] = {
        "model_type": table["model_type"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
        **table.get("constant", {}),
    }
    for key, theirs in table["config"].items():
        if (value := values.pop(key, None)) is not None:
            described[theirs] = value
    lists = [key for key, value in described.items() if isinstance(value, list)]
    if lists:
        raise InputError(f"{file.path}: {lists[0]} differs by layer, and jaxlm reads files where all layers are alike")
    for key in table.get("unused", ()):
        values.pop(key, None)
    if name != "gpt2":
        described |= _rope(file, values, described)
    described |= _EXTRA.get(name, lambda _: {})(described)
    biases = {tensor.partition(".")[2] for tensor in file.tensors if re.match(r"blk\.0\..*\.bias$", tensor)}
    if name in ("llama", "smollm3", "granite", "olmo2", "qwen3"):
        described["attention_bias"] = "0.attn_q.bias" in biases
    if name in ("llama", "smollm3", "granite"):
        described["mlp_bias"] = "0.ffn_up.bias" in biases
    if name == "starcoder2":
        described["use_bias"] = "0.attn_q.bias" in biases
    if values:
        raise InputError(f"{file.path}: jaxlm knows no key {', '.join(sorted(values))} of architecture {name}")
    return described | _quantization(file)


def _quantization(file: GgufFile) -> dict[str, Any]:
    """Return the key of the form that most numbers of layers have, of those that a matrix can be kept in."""
    forms: Counter[tuple[QuantizeKind, int]] = Counter()
    for name, tensor in file.tensors.items():
        if name.startswith("blk.") and isinstance(tensor, ScaledTensor):
            forms[tensor.kind, tensor.group] += math.prod(tensor.shape)
    if not forms:
        return {}
    [(most, _)] = forms.most_common(1)
    return {CONFIG_KEY: described_blocks(*most)}


def tensors(file: GgufFile) -> dict[str, _Tensor]:
    """Return the tensors of a file by the names, and in the layout, of a Hugging Face directory."""
    _, table = architecture(file)
    described = config(file)
    heads = {"attn_q": described.get("num_attention_heads"), "attn_k": described.get("num_key_value_heads")}
    translated: dict[str, _Tensor] = {}
    for theirs, tensor in file.tensors.items():
        if theirs in (_FREQUENCIES, _LONG, _SHORT):
            continue
        stem, _, kind = theirs.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", stem)
        pattern = re.sub(r"^blk\.\d+\.", "blk.{l}.", stem)
        name = table["tensors"].get(pattern)
        if name is None or kind not in ("weight", "bias"):
            raise InputError(f"{file.path} has the tensor {theirs}, which jaxlm does not know")
        part = pattern.rpartition(".")[2]
        if part in table.get("interleaved", ()):
            tensor = _in_halves(tensor, heads[part])
        elif table.get("plus_one") and part.endswith("norm"):
            tensor = _changed(tensor, tensor.shape, lambda x: x - np.float32(1))
        elif part in table.get("transposed", ()) and len(tensor.shape) == 2:
            tensor = _moved(tensor, tensor.shape[::-1], lambda x: x.T)
        translated[name.replace("{l}", layer[1] if layer else "") + f".{kind}"] = tensor
    return translated


def _changed(tensor: _Tensor, shape: tuple[int, ...], change: Any) -> LazyTensor:
    return LazyTensor(tensor.dtype, shape, lambda: change(tensor.read()))


def _moved(tensor: _Tensor, shape: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]) -> LazyTensor:
    """Return a tensor whose numbers are in other places."""
    moved = _changed(tensor, shape, change)
    if not isinstance(tensor, ScaledTensor):
        return moved

    def parts() -> tuple[np.ndarray, np.ndarray]:
        numbers, scales = tensor.parts()
        return change(numbers), change(scales)

    return ScaledTensor(moved.dtype, shape, moved.make, tensor.kind, tensor.group, parts)


def _in_halves(tensor: _Tensor, heads: Any) -> LazyTensor:
    """Return a matrix [N·H, D], or a bias, with the rotary pairs of a head half a head apart, not side by side."""

    def apart(stored: np.ndarray) -> np.ndarray:
        pairs = stored.reshape(heads, -1, 2, *stored.shape[1:])
        return np.swapaxes(pairs, 1, 2).reshape(stored.shape)

    if not isinstance(heads, int) or heads <= 0 or tensor.shape[0] % (2 * heads):
        raise InputError(f"a matrix of {tensor.shape[0]} rows has no {heads} heads of rotary pairs")
    return _moved(tensor, tensor.shape, apart)


def _rope(file: GgufFile, values: dict[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Take the keys of rotary positions out of `values`; return those of config.json."""
    heads = described.get("num_attention_heads") or 1
    width = described.get("head_dim") or described.get("hidden_size", 0) // heads
    rotated = values.pop("rope.dimension_count", width)
    entries: dict[str, Any] = {"rope_theta": described.get("rope_theta", 10_000.0)}
    for stale in ("rope.dimension_count_swa",):
        values.pop(stale, None)
    if rotated != width:
        entries["partial_rotary_factor"] = rotated / width
    scaling = {key.removeprefix(_SCALING): values.pop(key) for key in [*values] if key.startswith(_SCALING)}
    kind = scaling.pop("type", None)
    for finetuned in ("finetuned",):
        scaling.pop(finetuned, None)
    if "rope.scale_linear" in values:
        kind, scaling["factor"] = "linear", values.pop("rope.scale_linear")
    if kind in ("linear", "yarn") and scaling.get("factor", 1.0) != 1.0:
        entries["rope_scaling"] = {"rope_type": kind, "factor": scaling.pop("factor")}
        if kind == "yarn":
            original = scaling.pop("original_context_length", None)
            entries["rope_scaling"] |= {} if original is None else {"original_max_position_embeddings": original}
    elif kind in (None, "none", "linear", "yarn"):
        scaling.pop("factor", None), scaling.pop("original_context_length", None)
    if _FREQUENCIES in file.tensors:
        entries["rope_scaling"] = _llama3(file, entries["rope_theta"], rotated)
    if {_LONG, _SHORT} <= file.tensors.keys():
        entries["rope_scaling"] = {
            "rope_type": "longrope", "short_factor": _decimals(file, _SHORT), "long_factor": _decimals(file, _LONG)
        }  # fmt: skip
        original = described.get("original_max_position_embeddings", 4096)
        follows = math.sqrt(1 + math.log(max(described["max_position_embeddings"] / original, 1)) / math.log(original))
        if not math.isclose(amplitude := scaling.pop("attn_factor", follows), follows, rel_tol=1e-6):
            entries["rope_scaling"]["attention_factor"] = amplitude
    elif scaling.get("attn_factor") == 1.0:
        scaling.pop("attn_factor")
    if scaling:
        raise InputError(f"{file.path}: jaxlm knows no key {_SCALING}{min(scaling)} of rotary positions {kind!r}")
    return entries


def _decimals(file: GgufFile, name: str) -> list[float]:
    """Return the numbers of a float32 tensor, each the shortest that it stands for."""
    return [float(str(number)) for number in np.asarray(file.tensors[name].read(), np.float32)]


def _llama3(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 or 3.2 whose factors a file has. Raises InputError for other factors."""
    factors = np.asarray(file.tensors[_FREQUENCIES].read(), np.float64)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    for factor, low, high, original in _LLAMA3:
        kept = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if factors.shape == kept.shape and np.allclose(factors, 1 / (kept + (1 - kept) / factor), rtol=1e-4):
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return {"rope_type": "llama3", **dict(zip(names, (factor, low, high, original), strict=True))}
    raise InputError(f"{file.path}: {_FREQUENCIES} has factors that are those of neither Llama 3.1 nor Llama 3.2")


def _query_scale(described: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the number by whose root Gemma's queries are divided: no file has it, and llama.cpp goes by the layers of
    the 27B model."""
    of_27b = described["num_hidden_layers"] == layers
    width = described["hidden_size"] // described["num_attention_heads"]
    return {"query_pre_attn_scalar": width if of_27b else described["head_dim"]}


# Keys of config.json that follow from others.
_EXTRA = {
    "gemma2": lambda described: _query_scale(described, 46),
    "gemma3": lambda described: {**_query_scale(described, 62), "sliding_window_pattern": 6},
}
