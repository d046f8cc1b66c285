"""Quantized blocks of llama.cpp as float32, in the arithmetic of its reference (ggml-quants.c, `dequantize_row_*`).

A block has 32 or 256 numbers and one or two float16 scales; the K types have scales of parts of a block too. Products
and sums are float32, in the reference's order, so that every number has the reference's bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxlm.models.quantize_config import QuantizeKind

Dequantize = Callable[[np.ndarray], np.ndarray]  # [N, bytes of a block], uint8 -> [N, numbers of a block], float32
# The same -> [N, numbers of a block], int8, and a scale of each block [N, 1], float32.
Parts = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the number


class BlockType(NamedTuple):
    """A type of tensor: the format's name, numbers and bytes of a block, and what makes a block float32.

    `dtype` is that of plain numbers, which are read as they are; None for quantized ones. Those whose numbers are
    integers of a `kind` times one scale have `parts`.
    """

    name: str
    numbers: int
    bytes: int
    dequantize: Dequantize | None
    dtype: np.dtype | None = None
    kind: QuantizeKind | None = None
    parts: Parts | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at a byte of each block, [N, 1] in float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low halves of [..., n] bytes, then the high ones: [..., 2·n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return 32 bits that begin at a byte of each block, times 16, [N, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).view(np.int8) - np.int8(16), _half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    numbers = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    return numbers * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0)


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """Return numbers of two bits from [N, n] bytes in groups of 32, [N, n/32, 4, 32]: all lowest pairs first."""
    groups = packed.reshape(len(packed), -1, 1, 32)
    return (groups >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    parts = blocks[:, :16]
    scale, least = _half(blocks, 80) * (parts & 15), _half(blocks, 82) * (parts >> 4)
    numbers = _pairs_of_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return (scale[..., None] * numbers - least[..., None]).reshape(-1, 256)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low, high = _nibbles(blocks[:, 96:104]), blocks[:, 104:108]
    high = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scale = _half(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)
    # The third bit of number 32·k + i of a block is bit k of byte i; without it 4 is subtracted.
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    numbers = _pairs_of_bits(blocks[:, 32:96]).reshape(-1, 256).astype(np.float32)
    numbers -= np.where(third.reshape(-1, 256) == 1, 0, 4).astype(np.float32)
    return (scale[..., None] * numbers.reshape(-1, 16, 16)).reshape(-1, 256)


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight minima of six bits each from [N, 12] bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scale, least


def _by_parts(blocks: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return [N, 8, 32] numbers times the scales of their parts, less their minima (Q4_K and Q5_K)."""
    scale, least = _scales_and_minima(blocks[:, 4:16])
    scale, least = _half(blocks, 0) * scale, _half(blocks, 2) * least
    return (scale[..., None] * numbers.astype(np.float32) - least[..., None]).reshape(-1, 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _by_parts(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _by_parts(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << 4)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _pairs_of_bits(blocks[:, 128:192]).reshape(-1, 256)
    numbers = (low | high << 4).astype(np.float32) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[..., None] * numbers.reshape(-1, 16, 16)).reshape(-1, 256)


def _iq4_nl(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _IQ4[_nibbles(blocks[:, 2:])], _half(blocks, 0)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scale = _half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32)
    return (scale[..., None] * _IQ4[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]).reshape(-1, 256)


def _mxfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    half_a_power = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _FP4[_nibbles(blocks[:, 1:])], half_a_power


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    return (_pairs_of_bits(blocks[:, :64]).reshape(-1, 256).astype(np.float32) - 1) * _half(blocks, 64)


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    """Each byte holds five digits of base 3, as a fraction of 256; the last four bytes hold four."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]

    def digits(packed: np.ndarray, number: int) -> np.ndarray:
        shifted = (packed[:, None, :] * powers[:number]).astype(np.uint16)
        return (shifted * 3 >> 8).reshape(len(packed), -1)

    numbers = np.concatenate(
        [digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)], axis=-1
    )
    return (numbers.astype(np.float32) - 1) * _half(blocks, 52)


def _plain(name: str, dtype: np.dtype | type) -> BlockType:
    dtype = np.dtype(dtype)
    return BlockType(name, 1, dtype.itemsize, None, dtype)


def _scaled(name: str, size: int, kind: QuantizeKind, parts: Parts) -> BlockType:
    def dequantize(blocks: np.ndarray) -> np.ndarray:
        numbers, scale = parts(blocks)
        return numbers.astype(np.float32) * scale

    return BlockType(name, 32, size, dequantize, None, kind, parts)


# By their numbers in the format (ggml.h, `enum ggml_type`).
TYPES = {
    0: _plain("F32", np.float32),
    1: _plain("F16", np.float16),
    2: _scaled("Q4_0", 18, "int4", _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: _scaled("Q5_0", 22, "int8", _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: _scaled("Q8_0", 34, "int8", _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    20: _scaled("IQ4_NL", 18, "int8", _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
    28: _plain("F64", np.float64),
    30: _plain("BF16", ml_dtypes.bfloat16),
    34: BlockType("TQ1_0", 256, 54, _tq1_0),
    35: BlockType("TQ2_0", 256, 66, _tq2_0),
    39: _scaled("MXFP4", 17, "int8", _mxfp4),
}
# Types with tables of points in llama.cpp, which jaxlm does not have.
NOT_READ = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M",
}  # fmt: skip
