"""Quantized weights, with a scale to each block of numbers: read as bfloat16.

FP8 with scales of blocks (DeepSeek-V3, arXiv:2412.19437, section 3.3.2; 128 × 128 in most files) and MXFP4 (OCP
Microscaling Formats 1.0, section 5.4; as in GPT-OSS) are read. Neither is written: an export is in bfloat16.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.families.files import text_of
from jaxlm.families.safetensors import LazyTensor, StoredTensor

CONFIG_KEY = "quantization_config"
_METHODS = ("fp8", "mxfp4")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = "_scale_inv"  # after the name of an FP8 tensor; a number times its scale is what it stands for
_UNUSED = (".activation_scale", ".input_scale")  # of activations, which are not quantized here
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP4_BLOCKS, _FP4_SCALES = "_blocks", "_scales"
_EXPONENT_BIAS = 127  # of E8M0, an exponent of two in a byte


def check_method(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a config.json whose weights are quantized in a way that is not read."""
    for part in (config, text_of(config)):
        described = part.get(CONFIG_KEY) or {}
        method = described.get("quant_method") if isinstance(described, dict) else described
        if described and method not in _METHODS:
            raise InputError(
                f"{where}: weights are quantized by {method!r}, and jaxlm reads {' and '.join(_METHODS)} alone; take "
                "the model in bfloat16"
            )


def dequantized(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | LazyTensor]:
    """Return tensors by name, quantized ones with their scales as one in bfloat16. Raises InputError for scales that do
    not suit their tensor."""
    tensors: dict[str, StoredTensor | LazyTensor] = {}
    for name, tensor in stored.items():
        packed = name.removesuffix(_FP4_BLOCKS)
        if tensor.dtype_name in _FP8 and name + _SCALES in stored:
            tensors[name] = _fp8(name, tensor, stored[name + _SCALES])
        elif name.endswith(_FP4_BLOCKS) and packed + _FP4_SCALES in stored:
            tensors[packed] = _mxfp4(packed, tensor, stored[packed + _FP4_SCALES])
        elif not _is_scale(name, stored):
            tensors[name] = tensor
    return tensors


def _is_scale(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    quantized = name.removesuffix(_SCALES)
    if quantized != name:
        return quantized in stored and stored[quantized].dtype_name in _FP8
    if name.endswith(_FP4_SCALES):
        return name.removesuffix(_FP4_SCALES) + _FP4_BLOCKS in stored
    of, dot, last = name.rpartition(".")
    return dot + last in _UNUSED and f"{of}.weight{_SCALES}" in stored


def _fp8(name: str, values: StoredTensor, scales: StoredTensor) -> LazyTensor:
    """Return [..., R, C] numbers times their scales, one for all or one for each block of the last two dimensions."""
    if scales.shape in ((), (1,)):
        blocks = None
    elif len(values.shape) >= 2 and len(scales.shape) == len(values.shape) and scales.shape[:-2] == values.shape[:-2]:
        blocks = [_block(size, number) for size, number in zip(values.shape[-2:], scales.shape[-2:], strict=True)]
    else:
        blocks = [None]
    if blocks is not None and None in blocks:
        raise InputError(
            f"{values.file}: {name} {list(values.shape)} has scales {list(scales.shape)}, which are not one to each "
            "block"
        )

    def make() -> np.ndarray:
        every = np.arange(256, dtype=np.uint8).view(values.dtype).astype(np.float32)
        numbers, each = every[values.read().view(np.uint8)], _scale(scales)
        if blocks is None:
            numbers *= each.reshape(())
        else:
            (rows, columns), (high, wide) = values.shape[-2:], blocks
            each = np.repeat(each, wide, axis=-1)[..., :columns]
            for row, scale in enumerate(np.moveaxis(each, -2, 0)):
                numbers[..., row * high : min((row + 1) * high, rows), :] *= scale[..., None, :]
        return numbers.astype(_BFLOAT16)

    return LazyTensor(_BFLOAT16, values.shape, make)


def _block(size: int, number: int) -> int | None:
    """Return the power of two that divides a dimension into `number` blocks, the last perhaps smaller; None if there is
    no such power."""
    block = 1
    while number and -(-size // block) > number:
        block *= 2
    return block if -(-size // block) == number else None


def _scale(scales: StoredTensor) -> np.ndarray:
    """Return the scales in float32; scales stored as bytes are exponents of two."""
    numbers = scales.read()
    if scales.dtype_name == "U8":
        return np.ldexp(np.float32(1), numbers.astype(np.int32) - _EXPONENT_BIAS)
    return numbers.astype(np.float32)


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> LazyTensor:
    """Return the array [..., C, R] of blocks [..., R, C/32, 16]; a byte holds two numbers, the first in its low half.

    The outputs are rows in an MXFP4 file, and columns in a bfloat16 file, which has the layout of the family's rules.
    """
    *_, bytes_in_block = blocks.shape or (0,)
    sound = blocks.dtype_name == scales.dtype_name == "U8" and len(blocks.shape) >= 3
    if not sound or scales.shape != blocks.shape[:-1] or bytes_in_block != 16:
        raise InputError(
            f"{blocks.file}: {name} is no MXFP4: bytes {list(blocks.shape)} with scales {list(scales.shape)}, where "
            "each 16 bytes have one"
        )
    *outer, rows, number, _ = blocks.shape

    def make() -> np.ndarray:
        packed = blocks.read()
        numbers = _FP4[np.stack([packed & 15, packed >> 4], axis=-1)]
        numbers = numbers.reshape(*outer, rows, number, 32) * _scale(scales)[..., None]
        return np.swapaxes(numbers.reshape(*outer, rows, number * 32), -1, -2).astype(_BFLOAT16)

    return LazyTensor(_BFLOAT16, (*outer, number * 32, rows), make)
