"""MXFP4 (OCP Microscaling Formats 1.0, section 5.4; as in GPT-OSS): read as bfloat16, or kept."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.families.quantized.scaled import ScaledTensor, scales_of
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import Quantization

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCKS, _SCALES = "_blocks", "_scales"
METHOD = "mxfp4"
_GROUP = 32  # numbers with one scale
# The form that holds these matrices without rounding a number.
QUANTIZATION = Quantization("mxfp4", _GROUP)


def tensors(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, LazyTensor], set[str]]:
    """Return the tensors in MXFP4 by name, and the names of their parts. Raises InputError for parts that do not suit
    one another."""
    names = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
    names = [name for name in names if name + _SCALES in stored]
    parts = {part for name in names for part in (name + _BLOCKS, name + _SCALES)}
    return {name: _tensor(name, stored[name + _BLOCKS], stored[name + _SCALES]) for name in names}, parts


def _tensor(name: str, blocks: StoredTensor, scales: StoredTensor) -> LazyTensor:
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

    def codes() -> np.ndarray:
        packed = blocks.read()
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*outer, rows, number, _GROUP)

    def by_columns(numbers: np.ndarray) -> np.ndarray:
        return np.swapaxes(numbers.reshape(*outer, rows, number * _GROUP), -1, -2)

    def make() -> np.ndarray:
        return by_columns(_E2M1[codes()] * scales_of(scales)[..., None]).astype(_BFLOAT16)

    def parts() -> tuple[np.ndarray, np.ndarray]:
        return by_columns(codes()), by_columns(np.repeat(scales.read(), _GROUP, axis=-1))

    return ScaledTensor(_BFLOAT16, (*outer, number * _GROUP, rows), make, METHOD, _GROUP, parts)
