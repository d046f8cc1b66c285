"""The memory that an emulated kernel sees. It refuses what a chip may let pass: what is outside of the arrays that the
kernel was given, and what another block of the grid writes, unless it said so and was heard."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_SPACE = 40  # bits of an offset; above them the number of the array, from 1
_NOBODY = np.int64(-1)
_TIME = 20  # bits of the time when a block wrote, which its counting divides; above them its number

FIRST_ARRAY = 1 << _SPACE  # addresses below are of shared memory


class AccessError(RuntimeError):
    """What a kernel must not do with memory."""


class Arrays:
    """Device memory: the operands and results of a kernel, each in an address space of its own.

    Operands are copied; results begin as bytes 0xFF, which as floating point are NaN. Of counters, by which blocks
    tell one another what they have done, a block that has heard knows all that the others had done or heard of before.
    """

    def __init__(self, arrays: Sequence[np.ndarray], written: int, counters: int = 0):
        """With the last `written` arrays for its results, and so many counters before them."""
        self._sizes = [array.nbytes for array in arrays]
        self._read_only = len(arrays) - written
        self._counters = range(self._read_only - counters, self._read_only)
        self._time: defaultdict[int, int] = defaultdict(int)  # of blocks
        # By block, until when it knows or has heard of what others wrote; and by counter, of what it tells.
        self._known: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._heard: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._told: defaultdict[int, dict[int, int]] = defaultdict(dict)
        # Whole words of 16 bytes, so that a view of any width exists.
        self._bytes = [np.full(-(-array.nbytes // 16) * 16 + 16, 0xFF, np.uint8) for array in arrays]
        for held, array in zip(self._bytes[: self._read_only], arrays, strict=False):
            held[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # Which block wrote each byte of a result, and when.
        self._writers = [np.full(held.size, _NOBODY) for held in self._bytes[self._read_only :]]
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
            if array in self._counters:
                raise AccessError(f"reads a counter, {self._name(array)}, as if nobody changed it")
            index = offsets // word + np.arange(count)[:, None]
            if array >= self._read_only:
                writers = self._writers[array - self._read_only].reshape(-1, word)[index]
                if self._strangers(writers, blocks[chosen][:, None]):
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
            writers, own = self._writers[array - self._read_only].reshape(-1, word), blocks[chosen][:, None]
            before, now = writers[index], self._now(own)
            writers[index] = now
            if self._strangers(before, own) or np.any(writers[index] != now):
                raise AccessError(f"two blocks write to the same place of {self._name(array)}")
            self._bytes[array].view(f"u{word}")[index] = values[:, chosen]

    def _now(self, blocks: np.ndarray) -> np.ndarray:
        """What is said of who writes: the block and its time."""
        each, index = np.unique(blocks, return_inverse=True)
        said = np.array([block << _TIME | self._time[block] for block in each.tolist()], np.int64)
        return said[index].reshape(blocks.shape)

    def _strangers(self, writers: np.ndarray, own: np.ndarray) -> bool:
        """Whether any of those who wrote are others than the blocks themselves, who do not know of it."""
        others = (writers != _NOBODY) & (writers >> _TIME != own)
        if not others.any():
            return False
        pairs = np.stack([np.broadcast_to(own, others.shape)[others], writers[others]])
        return any(
            self._known[block].get(writer >> _TIME, -1) < writer % (1 << _TIME)
            for block, writer in np.unique(pairs, axis=1).T.tolist()
        )

    # Counters, of 4 bytes.

    def count(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Each thread adds to one, and tells by it what its block knows (red.release)."""
        for address, value, block in zip(addresses.tolist(), values, blocks.tolist(), strict=True):
            self._counter(address)[...] += value
            _learn(self._told[address], self._known[block] | {block: self._time[block]})
            self._time[block] += 1
            if self._time[block] >> _TIME:
                raise NotImplementedError(f"a block counts more than {1 << _TIME} times")

    def ask(self, addresses: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """What they are at; the blocks hear what they tell (ld.relaxed)."""
        for address, block in zip(addresses.tolist(), blocks.tolist(), strict=True):
            _learn(self._heard[block], self._told[address])
        return np.array([self._counter(address).item() for address in addresses.tolist()], np.uint32)

    def believe(self, blocks: np.ndarray) -> None:
        """Blocks know what they have heard (fence.acquire)."""
        for block in set(blocks.tolist()):
            _learn(self._known[block], self._heard[block])

    def _counter(self, address: int) -> np.ndarray:
        ((array, _, offsets),) = self._located(np.array([address], np.uint64), 4)
        if array not in self._counters:
            raise AccessError(f"counts in {self._name(array)}, which holds no counters")
        at = int(offsets[0]) // 4
        return self._bytes[array].view(np.uint32)[at : at + 1]

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


def _learn(known: dict[int, int], news: Mapping[int, int]) -> None:
    for block, time in news.items():
        known[block] = max(known.get(block, -1), time)


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
