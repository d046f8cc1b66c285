"""FP8 with scales of blocks (DeepSeek-V3, arXiv:2412.19437, section 3.3.2; 128 × 128 in most files), of outputs or of
matrices: read as bfloat16, or kept."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.families.quantized.scaled import ScaledTensor, kept_group, scales_of
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import Quantization

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_KEPT = "F8_E4M3"
_DTYPES = (_KEPT, "F8_E5M2")
METHODS = ("fp8", "fbgemm_fp8")
# After the name of an FP8 tensor. By either name, a number times its scale is what it stands for.
_SCALES = ("_scale_inv", "_scale")
_UNUSED = (".activation_scale", ".input_scale")  # of activations, which are not quantized here


def tensors(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, LazyTensor], set[str]]:
    """Return the tensors in FP8 with scales by name, and the names of what is read with them. Raises InputError for
    scales that do not suit their tensor."""
    names = {
        name: name + suffix
        for name, x in stored.items()
        for suffix in reversed(_SCALES)
        if x.dtype_name in _DTYPES and name + suffix in stored
    }
    parts = {*names, *names.values()}
    parts |= {name.removesuffix(".weight") + unused for name in names for unused in _UNUSED}
    return {name: _tensor(name, stored[name], stored[scales]) for name, scales in names.items()}, parts


def quantization(described: Mapping[str, Any]) -> Quantization | None:
    """Return the form that holds the matrices of a `quantization_config` without rounding a number; None where there is
    none."""
    match described.get("weight_block_size"):
        case [int(_), int(inputs)] if inputs > 0 and (group := kept_group(inputs)) is not None:
            return Quantization("fp8", group)
        case None:
            return Quantization("fp8")
        case _:
            return None


def _tensor(name: str, values: StoredTensor, scales: StoredTensor) -> LazyTensor:
    """Return [..., R, C] numbers times their scales, one for all or one for each block of the last two dimensions."""
    if scales.shape in ((), (1,), (1, 1)):
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
        numbers, each = every[values.read().view(np.uint8)], scales_of(scales)
        if blocks is None:
            numbers *= each.reshape(())
        else:
            (rows, columns), (high, wide) = values.shape[-2:], blocks
            each = np.repeat(each, wide, axis=-1)[..., :columns]
            for row, scale in enumerate(np.moveaxis(each, -2, 0)):
                numbers[..., row * high : min((row + 1) * high, rows), :] *= scale[..., None, :]
        return numbers.astype(_BFLOAT16)

    def parts() -> tuple[np.ndarray, np.ndarray]:
        each = scales_of(scales)
        if blocks is None:
            return values.read(), np.broadcast_to(each.reshape(()), values.shape)
        (rows, columns), (high, wide) = values.shape, blocks
        return values.read(), np.repeat(np.repeat(each, high, axis=0)[:rows], wide, axis=1)[:, :columns]

    if values.dtype_name != _KEPT or len(values.shape) != 2:
        return LazyTensor(_BFLOAT16, values.shape, make)
    is_of_all = blocks is None or scales.shape[-1] == 1
    return ScaledTensor(_BFLOAT16, values.shape, make, "fp8", 0 if is_of_all else blocks[-1], parts)


def _block(size: int, number: int) -> int | None:
    """Return the power of two that divides a dimension into `number` blocks, the last perhaps smaller; None if there is
    no such power."""
    block = 1
    while number and -(-size // block) > number:
        block *= 2
    return block if -(-size // block) == number else None
