"""Quantized weights, which have scales beside them: FP8, MXFP4, GPTQ, AWQ and compressed-tensors. None is written: an
export has what they are read as."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.files import text_of
from jaxlm.families.quantized import compressed, fp8, mxfp4, packed
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import Quantization, QuantizeKind

CONFIG_KEY = "quantization_config"
_METHODS = (*fp8.METHODS, mxfp4.METHOD, *packed.METHODS, compressed.METHOD)
_BLOCKS = "gguf"  # of a file that is translated: its directory has no tensors


def check_method(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a config.json whose weights are quantized in a way that is not read."""
    packing(config, where)


def packing(config: Mapping[str, Any], where: str) -> packed.Packing | None:
    """Return how a config.json says that words of numbers are packed; None where there are none. Raises InputError as
    `check_method` does."""
    described = _described(config, where)
    with _as_bad_input(where, CONFIG_KEY):
        if described.get("quant_method") == compressed.METHOD:
            compressed.check(described, where)
        return packed.Packing.of(described, where) if described.get("quant_method") in packed.METHODS else None


@contextmanager
def _as_bad_input(where: str, what: str) -> Iterator[None]:
    """Raise InputError for values inside that are of another type or shape than they must be."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: {what} is malformed ({type(error).__name__}: {error})") from error


def quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the form in which matrices of layers are kept as they are stored, as a config.json describes them; None
    where they are widened. Raises InputError as `check_method` does."""
    if (words := packing(config, where)) is not None:
        return words.quantization
    described = _described(config, where)
    with _as_bad_input(where, CONFIG_KEY):
        if described.get("quant_method") == compressed.METHOD:
            return compressed.quantization(described)
        if described.get("quant_method") == _BLOCKS:
            return Quantization(described["kind"], described["group_size"])
        if described.get("quant_method") == mxfp4.METHOD:
            return mxfp4.QUANTIZATION
        return fp8.quantization(described) if described.get("quant_method") in fp8.METHODS else None


def _described(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for part in (config, text_of(config)):
        described = part.get(CONFIG_KEY) or {}
        method = described.get("quant_method") if isinstance(described, dict) else described
        is_translated = isinstance(described, dict) and described.keys() == described_blocks("int8", 0).keys()
        if described and method not in _METHODS and not (method == _BLOCKS and is_translated):
            raise InputError(
                f"{where}: weights are quantized by {method!r}, and jaxlm reads {', '.join(_METHODS[:-1])} and "
                f"{_METHODS[-1]} alone; take the model in bfloat16"
            )
        if described:
            return described if isinstance(described, dict) else {"quant_method": method}
    return {}


def described_blocks(kind: QuantizeKind, group: int) -> dict[str, Any]:
    """Return the `quantization_config` of a GGUF file whose matrices are in this form."""
    return {"quant_method": _BLOCKS, "kind": kind, "group_size": group}


def dequantized(
    stored: Mapping[str, StoredTensor], packing: packed.Packing | None = None
) -> dict[str, StoredTensor | LazyTensor]:
    """Return tensors by name, quantized ones with their scales as one, of FP8 and MXFP4 in bfloat16 and integers in
    float32. Raises InputError for scales that do not suit their tensor."""
    whole: dict[str, StoredTensor | LazyTensor] = {}
    parts: set[str] = set()
    where = str(next(iter(stored.values())).file) if stored else ""
    with _as_bad_input(where, "a quantized tensor or its scales"):
        for tensors, of_them in (
            *(fp8.tensors(stored), mxfp4.tensors(stored)),
            *(packed.tensors(stored, packing), compressed.tensors(stored)),
        ):
            whole |= tensors
            parts |= of_them
    return {name: tensor for name, tensor in stored.items() if name not in parts} | whole
