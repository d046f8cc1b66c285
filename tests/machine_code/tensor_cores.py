"""Arithmetic of warps and tensor cores: exchanges between threads, products of matrices whose elements lie in threads'
registers, and the layouts of matrices in registers and shared memory.

Arrays are [..., 32], the last dimension over a warp's threads.

Source: NVIDIA, Parallel Thread Execution ISA, version 9.0, section 9.7.14.
"""

from typing import Any

import numpy as np
from machine_code.arithmetic import DTYPES

LANES = np.arange(32)
_GROUP, _IN_GROUP = LANES // 4, LANES % 4


def shuffle(mode: str, values: np.ndarray, operand: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return another thread's value for each thread of a warp (shfl.sync), and whether that thread is in range."""
    operand, clamp = operand.astype(np.int64) & 31, clamp.astype(np.int64)
    segment = clamp >> 8 & 31
    last = (LANES & segment) | (clamp & 31 & ~segment)
    first = LANES & segment
    source = {
        "up": LANES - operand,
        "down": LANES + operand,
        "bfly": LANES ^ operand,
        "idx": first | (operand & ~segment),
    }[mode]
    inside = source >= last if mode == "up" else source <= last
    source = np.where(inside, source, LANES)
    return np.take_along_axis(values, np.broadcast_to(source, values.shape), axis=-1), inside


def matrices_of_rows(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """Distribute matrices [..., m, 8, 8] of 16 bits over threads, two elements each: [..., m, 32] (ldmatrix)."""
    row, column = _GROUP, 2 * _IN_GROUP
    if transposed:
        rows = np.swapaxes(rows, -1, -2)
    low, high = rows[..., row, column], rows[..., row, column + 1]
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def rows_of_matrices(values: np.ndarray) -> np.ndarray:
    """Collect matrices from threads (stmatrix): the inverse of `matrices_of_rows`."""
    rows = np.empty((*values.shape[:-1], 8, 8), np.uint16)
    rows[..., _GROUP, 2 * _IN_GROUP] = (values & np.uint32(0xFFFF)).astype(np.uint16)
    rows[..., _GROUP, 2 * _IN_GROUP + 1] = (values >> np.uint32(16)).astype(np.uint16)
    return rows


def numbers(words: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers in words [..., n] as float32: [..., n · numbers in a word]."""
    if kind == "tf32":  # the chip ignores the other bits
        words = words & np.uint32(0xFFFFE000)
    return np.ascontiguousarray(words).view(DTYPES[kind]).astype(np.float32)


def _elements(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """Return the numbers in registers, in order: [..., 32, numbers], float32."""
    return numbers(np.stack(registers, axis=-1), kind)


def multiply(modifiers: tuple[str, ...], a: list, b: list, c: list) -> list[np.ndarray]:
    """Return a · b + c of each warp in its registers, as words of 32 bits (mma.sync.aligned.m16n8k….row.col).

    Raises NotImplementedError for shapes and dtypes that no kernel here uses.
    """
    shape = next(name for name in modifiers if name.startswith("m16n8k"))
    depth = int(shape.removeprefix("m16n8k"))
    to, kind, other, _ = modifiers[-4:]
    if to != "f32" or kind != other or kind not in ("bf16", "f16", "tf32"):
        raise NotImplementedError(f"cannot emulate mma.{'.'.join(modifiers)}")
    total = sums(multiply_tiles(left_tile(a, kind, depth), right_tile(b, kind, depth)), 8)
    return [(x + y.view(np.float32)).view(np.uint32) for x, y in zip(total, c, strict=True)]


def multiply_tiles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply matrices in float32; tensor cores accumulate in another order, and round otherwise."""
    return np.matmul(a.astype(np.float32), b.astype(np.float32))


def left_tile(registers: list[np.ndarray], kind: str, depth: int) -> np.ndarray:
    """Return the tile of the left operand in a warp's registers: [..., 16, depth]."""
    size = DTYPES[kind].itemsize
    each = 4 // size  # numbers in a register
    values = _elements(registers, kind)
    tile = np.empty((*values.shape[:-2], 16, depth), np.float32)
    for i in range(values.shape[-1]):
        register, within = divmod(i, each)
        row = _GROUP + 8 * (register % 2)
        column = each * _IN_GROUP + within + 4 * each * (register // 2)
        tile[..., row, column] = values[..., i]
    return tile


def right_tile(registers: list[np.ndarray], kind: str, depth: int) -> np.ndarray:
    """Return the tile of the right operand in a warp's registers: [..., depth, 8]."""
    size = DTYPES[kind].itemsize
    each = 4 // size
    values = _elements(registers, kind)
    tile = np.empty((*values.shape[:-2], depth, 8), np.float32)
    for i in range(values.shape[-1]):
        register, within = divmod(i, each)
        tile[..., each * _IN_GROUP + within + 4 * each * register, _GROUP] = values[..., i]
    return tile


def sums(tile: np.ndarray, width: int) -> list[np.ndarray]:
    """Return a warp's registers that hold a tile of results [..., 16, width]: each [..., 32] in float32."""
    return [
        np.ascontiguousarray(tile[..., _GROUP + 8 * below, 8 * part + 2 * _IN_GROUP + within])
        for part in range(width // 8)
        for below in range(2)
        for within in range(2)
    ]


def flags(values: Any) -> np.ndarray:
    """Return one bit of each thread of a warp in one word (vote.ballot)."""
    return (np.asarray(values).astype(np.uint32) << LANES.astype(np.uint32)).sum(axis=-1, dtype=np.uint32)


# Bytes over which a layout in shared memory is swizzled, by the highest two bits of a matrix descriptor.
_SWIZZLES = (0, 128, 64, 32)


def places_of_matrix(description: np.ndarray, outer: int, depth: int, size: int, transposed: bool) -> np.ndarray:
    """Return the addresses of an operand of wgmma in shared memory: [..., outer, depth], elements of `size` bytes.

    `description` is its descriptor of 64 bits. The contracted dimension, depth, is contiguous unless `transposed`.

    Source: section 9.7.15.5.1, the canonical layouts.
    """

    def field(first: int, bits: int = 14) -> np.ndarray:
        return (description >> np.uint64(first) & np.uint64(2**bits - 1)).astype(np.int64)[..., None, None]

    start, leading, stride = (16 * field(first) for first in (0, 16, 32))
    if np.any(field(49, 3)):
        raise NotImplementedError("cannot emulate wgmma of a matrix with a base offset")
    (mode,) = set(np.unique(field(62, 2)))
    swizzle = _SWIZZLES[mode]
    chunk = 16 // size  # elements in 16 bytes, which stay together
    i, k = np.arange(outer)[:, None], np.arange(depth)
    if not transposed:
        row, group = (i % 8) * (swizzle or 16), i // 8 * stride
        offset = row + group + (k // chunk) * (16 if swizzle else leading) + k % chunk * size
    elif swizzle:
        wide = swizzle // size
        offset = i % wide * size + i // wide * leading + k % 8 * swizzle + k // 8 * stride
    else:
        offset = i % chunk * size + i // chunk * stride + k % 8 * 16 + k // 8 * leading
    places = start + offset
    return swizzled(places, swizzle) if swizzle else places


def swizzled(places: np.ndarray, width: int) -> np.ndarray:
    """Permute addresses by chunks of 16 bytes within `width` bytes, by the row of 128 bytes that they are in."""
    return places ^ (places >> 3 & (width // 16 - 1) << 4)
