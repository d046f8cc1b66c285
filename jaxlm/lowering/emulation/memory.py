"""The memory that an emulated kernel sees. It refuses what a chip may let pass: what is outside of the arrays that the
kernel was given, and what another block of the grid writes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_SPACE = 40  # bits of an offset; above them the number of the array, from 1
_NOBODY = np.int32(-1)

FIRST_ARRAY = 1 << _SPACE  # addresses below are of shared memory


class AccessError(RuntimeError):
    """What a kernel must not do with memory."""


class Arrays:
    """Device memory: the operands and results of a kernel, each in an address space of its own.

    Operands are copied; results begin as bytes 0xFF, which as floating point are NaN.
    """

    def __init__(self, arrays: Sequence[np.ndarray], written: int):
        """With the last `written` arrays for its results."""
        self._sizes = [array.nbytes for array in arrays]
        self._read_only = len(arrays) - written
        # Whole words of 16 bytes, so that a view of any width exists.
        self._bytes = [np.full(-(-array.nbytes // 16) * 16 + 16, 0xFF, np.uint8) for array in arrays]
        for held, array in zip(self._bytes[: self._read_only], arrays, strict=False):
            held[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # Which block wrote each byte.
        self._writers = [np.full(held.size, _NOBODY) for held in self._bytes]
        self._like = [(array.shape, array.dtype) for array in arrays]
        self.addresses = [np.uint64(i + 1 << _SPACE) for i in range(len(arrays))]

    def results(self) -> list[np.ndarray]:
        """What was written."""
        pairs = zip(self._bytes, self._sizes, self._like, strict=True)
        made = [held[:size].view(dtype).reshape(shape).copy() for held, size, (shape, dtype) in pairs]
        return made[self._read_only :]

    def load(self, addresses: np.ndarray, word: int, count: int, blocks: np.ndarray) -> np.ndarray:
        """`count` words of `word` bytes at each address, each for a thread of one of `blocks`: [count, addresses]."""
        result = np.empty((count, addresses.size), f"u{word}")
        for array, chosen, offsets in self._located(addresses, word * count):
            index = offsets // word + np.arange(count)[:, None]
            writers = self._writers[array].reshape(-1, word)[index]
            if np.any((writers != _NOBODY) & (writers != blocks[chosen][:, None])):
                raise AccessError(f"reads what another block wrote to {self._name(array)}")
            result[:, chosen] = self._bytes[array].view(f"u{word}")[index]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Words [count, addresses], so many at each address."""
        count, word = values.shape[0], values.dtype.itemsize
        for array, chosen, offsets in self._located(addresses, word * count):
            if array < self._read_only:
                raise AccessError(f"writes to {self._name(array)}")
            index = offsets // word + np.arange(count)[:, None]
            writers, own = self._writers[array].reshape(-1, word), blocks[chosen][:, None]
            before = writers[index]
            writers[index] = own
            if np.any((before != _NOBODY) & (before != own)) or np.any(writers[index] != own):
                raise AccessError(f"two blocks write to the same place of {self._name(array)}")
            self._bytes[array].view(f"u{word}")[index] = values[:, chosen]

    def _located(self, addresses: np.ndarray, size: int) -> Any:
        """By array, which of the addresses lie there, and their offsets."""
        numbers = addresses >> np.uint64(_SPACE)
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            offsets = (addresses[chosen] & np.uint64((1 << _SPACE) - 1)).astype(np.int64)
            array = int(number) - 1
            if not 0 <= array < len(self._bytes):
                raise AccessError(f"reaches {hex(int(addresses[chosen[0]]))}, which is no array's")
            beyond = offsets[offsets + size > self._sizes[array]]
            if beyond.size:
                raise AccessError(
                    f"reaches bytes {beyond[0]} to {beyond[0] + size - 1} of {self._name(array)}, which has "
                    f"{self._sizes[array]}"
                )
            if np.any(offsets % size):
                raise AccessError(f"{size} bytes of {self._name(array)} are not aligned")
            yield array, chosen, offsets

    def _name(self, array: int) -> str:
        return f"operand {array}" if array < self._read_only else f"result {array - self._read_only}"


class Shared:
    """Shared memory of several blocks at once, which begins as NaN."""

    def __init__(self, blocks: int, size: int):
        self._size = -(-size // 16) * 16
        self.bytes = np.full((blocks, self._size), 0xFF, np.uint8)

    def _index(self, addresses: np.ndarray, word: int, count: int, blocks: np.ndarray) -> np.ndarray:
        offsets = addresses.astype(np.int64)
        if np.any(offsets < 0) or np.any(offsets + word * count > self._size):
            raise AccessError(f"reaches byte {offsets.max()} of {self._size} in shared memory")
        if np.any(offsets % (word * count)):
            raise AccessError(f"{word * count} bytes of shared memory are not aligned")
        return (blocks * self._size + offsets) // word + np.arange(count)[:, None]

    def load(self, addresses: np.ndarray, word: int, count: int, blocks: np.ndarray) -> np.ndarray:
        """Like that of `Arrays`; `blocks` count from the first of those that are held here."""
        return self.bytes.reshape(-1).view(f"u{word}")[self._index(addresses, word, count, blocks)]

    def store(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Like that of `Arrays`."""
        index = self._index(addresses, values.dtype.itemsize, values.shape[0], blocks)
        self.bytes.reshape(-1).view(values.dtype)[index] = values
