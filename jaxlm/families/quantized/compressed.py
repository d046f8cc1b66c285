"""The formats of compressed-tensors (llm-compressor, Kimi K2): FP8 is read as in `fp8`, and integers of four and eight
bits with a scale for each output, or for each output and group of inputs, are read as float32, or kept."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.families.quantized.packed import unpacked
from jaxlm.families.quantized.scaled import ScaledTensor, kept_group, scales_of
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import Quantization, QuantizeKind

METHOD = "compressed-tensors"
_FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
_WORDS, _NUMBERS, _SCALES = ".weight_packed", ".weight", ".weight_scale"
# Of a matrix beside its numbers and scales; of activations and caches, which are not quantised by a file.
_OTHERS = (".weight_shape", ".weight_zero_point", ".input_scale", ".input_zero_point", ".output_scale")
_CACHES = (".self_attn.k_scale", ".self_attn.v_scale", ".self_attn.q_scale")
_FLOATS = ("F16", "BF16", "F32")


def check(described: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a `quantization_config` of weights in a form that is not read."""
    for weights in _weights(described):
        kind = weights.get("type"), weights.get("num_bits")
        if kind not in (("float", 8), ("int", 4), ("int", 8)):
            raise _refusal(where, "weights", f"{kind[1]} bits of {kind[0]}", "8 bits of float, and 4 and 8 of int")
        if not weights.get("symmetric", True):
            raise _refusal(where, "weights.symmetric", False, "true")
        if weights.get("actorder") == "group":
            raise _refusal(where, "weights.actorder", "group", "groups of inputs beside one another")
    groups = (described.get("config_groups") or {}).values()
    for form in (described.get("format"), *(group.get("format") for group in groups)):
        if form is not None and form not in _FORMATS:
            raise _refusal(where, "format", form, ", ".join(_FORMATS))
    if (sparse := (described.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise _refusal(where, "sparsity_config.format", sparse, "dense")


def quantization(described: Mapping[str, Any]) -> Quantization | None:
    """Return the form that holds the matrices of the first group without rounding a number; None where there is
    none."""
    for weights in _weights(described):
        kind: QuantizeKind = "fp8" if weights.get("type") == "float" else "int4" if weights["num_bits"] == 4 else "int8"
        block = weights.get("block_structure") or [0, 0]
        group = kept_group(block[1] if weights.get("strategy") == "block" else max(weights.get("group_size") or 0, 0))
        return None if group is None else Quantization(kind, group)
    return None


def _weights(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = (described.get("config_groups") or {}).values()
    return [group["weights"] for group in groups if group.get("weights")]


def _refusal(where: str, key: str, value: Any, known: str) -> InputError:
    return InputError(f"{where}: {key} = {value!r} of {METHOD}, and jaxlm reads {known} alone")


def tensors(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, LazyTensor], set[str]]:
    """Return the tensors in integers with scales by name, [outputs, inputs], and the names of what is read with them
    and of what is of activations and caches. Raises InputError for parts that do not suit one another."""
    whole: dict[str, LazyTensor] = {}
    parts = {name for name in stored if name.endswith(_CACHES)}
    for name, scales in stored.items():
        module = name.removesuffix(_SCALES)
        own = stored.get(module + _WORDS) or stored.get(module + _NUMBERS)
        if module == name or own is None or own.dtype_name not in ("I32", "I8"):
            continue
        zeros = stored.get(f"{module}.weight_zero_point")
        if zeros is not None and zeros.read().astype(np.float32).any():
            raise InputError(f"{zeros.file}: {module} has zero points, and jaxlm reads symmetric weights alone")
        whole[f"{module}.weight"] = _tensor(module, own, scales, stored.get(f"{module}.weight_shape"))
        parts |= {module + part for part in (_WORDS, _NUMBERS, _SCALES, *_OTHERS)}
    return whole, parts


def _tensor(module: str, own: StoredTensor, scales: StoredTensor, stored_shape: StoredTensor | None) -> LazyTensor:
    """Return a matrix of int8 numbers, or of packed ones that are stored as their distance from the least."""
    shape = own.shape if stored_shape is None else tuple(int(size) for size in stored_shape.read())
    where = f"{own.file}: {module} has numbers {own.dtype_name} {list(own.shape)} and scales {list(scales.shape)}"
    if len(shape) != 2 or len(own.shape) != 2 or 0 in own.shape or own.shape[0] != shape[0]:
        raise InputError(f"{where}; they must be of a matrix {list(shape)}")
    bits = 8
    if own.dtype_name == "I32":
        if stored_shape is None:
            raise InputError(f"{where}; {module}.weight_shape is missing, which packed numbers need")
        bits = next((bits for bits in (4, 8) if own.shape[1] == -(-shape[1] * bits // 32)), 0)
    (outputs, inputs), groups = shape, scales.shape[-1] if scales.shape else 1
    sizes = ((), (1,), (outputs,), (outputs, groups), (1, 1))
    if not bits or scales.shape not in sizes or scales.dtype_name not in _FLOATS or inputs % groups:
        raise InputError(f"{where}, which are not four or eight bits of {list(shape)} with a scale for each group")
    if scales.shape == (outputs,):
        groups = 1

    def numbers() -> np.ndarray:
        if own.dtype_name == "I8":
            return own.read()
        codes = unpacked(own.read(), bits, 1, range(32 // bits))[:, :inputs]
        return (codes ^ np.uint8(2 ** (bits - 1))).view(np.int8) if bits == 8 else codes.view(np.int8) - np.int8(8)

    def parts() -> tuple[np.ndarray, np.ndarray]:
        each = scales_of(scales).reshape(-1, groups)
        return numbers(), np.broadcast_to(np.repeat(each, inputs // groups, axis=1), shape)

    def make() -> np.ndarray:
        values, each = parts()
        return values.astype(np.float32) * each

    made: tuple[np.dtype, tuple[int, int], Callable[[], np.ndarray]] = np.dtype(np.float32), (outputs, inputs), make
    return ScaledTensor(*made, "int4" if bits == 4 else "int8", 0 if groups == 1 else inputs // groups, parts)
