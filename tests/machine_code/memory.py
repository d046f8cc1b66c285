"""The memory of an emulated kernel.

It refuses what a chip may let pass: accesses outside of the kernel's arrays, and accesses to what another block of the
grid writes without synchronization.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

_SPACE = 40  # bits of an offset; above them the number of the array, from 1
_NOBODY = np.int64(-1)
_SEVERAL = np.iinfo(np.int64).max  # blocks that added and do not know of each other: no block knows of this one
_TIME = 20  # bits of the time of a write, in counter increments of its block; above them the block's number

FIRST_ARRAY = 1 << _SPACE  # addresses below are in shared memory


class AccessError(RuntimeError):
    """An access that a kernel must not make."""


class DeviceMemory:
    """Device memory: the operands and results of a kernel, each in an address space of its own.

    Operands are copied; results are initially bytes 0xFF, NaN in floating point, except sums, which start as an operand
    is. Blocks signal to one another by counters: a block that reads one and acquires knows everything that the others
    had written or known before they counted. They may add to a sum without that, and only add: a block that reads or
    writes it must know of all additions.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        written: int,
        counters: int = 0,
        sums: Mapping[int, int] = MappingProxyType({}),
    ):
        """Hold arrays, the last `written` of which are results, with `counters` arrays of counters before them.

        sums: indices of results that are sums, with those of the operands that they start as.
        """
        self._sizes = [array.nbytes for array in arrays]
        self._read_only = len(arrays) - written
        self._counters = range(self._read_only - counters, self._read_only)
        self._time: defaultdict[int, int] = defaultdict(int)  # of each block
        # By block, the time up to which it knows other blocks' writes, and up to which it read counters for them;
        # by counter, the time up to which it releases each block's writes.
        self._known: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._observed: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._released: defaultdict[int, dict[int, int]] = defaultdict(dict)
        # Padded to whole words of 16 bytes, to be viewed as words of any width.
        self._bytes = [np.full(-(-array.nbytes // 16) * 16 + 16, 0xFF, np.uint8) for array in arrays]
        for held, array in zip(self._bytes[: self._read_only], arrays, strict=False):
            held[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # The block that wrote each byte of a result, and the time.
        self._writers = [np.full(held.size, _NOBODY) for held in self._bytes[self._read_only :]]
        # By sum, the block that last added to each byte, and the time.
        self._adders = {self._read_only + i: np.full(self._bytes[self._read_only + i].size, _NOBODY) for i in sums}
        for result, operand in sums.items():
            self._bytes[self._read_only + result][...] = self._bytes[operand]
        self._like = [(array.shape, array.dtype) for array in arrays]
        self.addresses = [np.uint64(i + 1 << _SPACE) for i in range(len(arrays))]

    def results(self) -> list[np.ndarray]:
        """Return the arrays of results."""
        pairs = zip(self._bytes, self._sizes, self._like, strict=True)
        made = [held[:size].view(dtype).reshape(shape).copy() for held, size, (shape, dtype) in pairs]
        return made[self._read_only :]

    def load(self, addresses: np.ndarray, word: int, count: int, blocks: np.ndarray) -> np.ndarray:
        """Load `count` words of `word` bytes at each address, for threads of `blocks`: [count, addresses]."""
        result = np.empty((count, addresses.size), f"u{word}")
        for array, chosen, offsets in self._located(addresses, word * count):
            if array in self._counters:
                raise AccessError(f"reads a counter, {self._name(array)}, with a plain load")
            index = offsets // word + np.arange(count)[:, None]
            if array >= self._read_only:
                if any(self._unknown(marks[index], blocks[chosen][:, None]) for marks in self._marks(array, word)):
                    raise AccessError(f"reads what another block wrote to {self._name(array)}")
            result[:, chosen] = self._bytes[array].view(f"u{word}")[index]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Store words [count, addresses], `count` at each address, for threads of `blocks`."""
        count, word = values.shape[0], values.dtype.itemsize
        for array, chosen, offsets in self._located(addresses, word * count):
            if array < self._read_only:
                raise AccessError(f"writes to {self._name(array)}")
            index = offsets // word + np.arange(count)[:, None]
            (writers, *adders), own = self._marks(array, word), blocks[chosen][:, None]
            before, now = [writers[index], *(marks[index] for marks in adders)], self._now(own)
            writers[index] = now
            if any(self._unknown(marks, own) for marks in before) or np.any(writers[index] != now):
                raise AccessError(f"two blocks write to the same place of {self._name(array)}")
            self._bytes[array].view(f"u{word}")[index] = values[:, chosen]

    def add(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Add a float32 at each address for threads of `blocks`; addresses are distinct.

        Additions to a sum commute: only to other arrays must a block know of additions before its own.
        """
        for array, chosen, offsets in self._located(addresses, 4):
            some, own = addresses[chosen], blocks[chosen]
            if array not in self._adders:
                with np.errstate(all="ignore"):
                    total = self.load(some, 4, 1, own).view(np.float32) + values[chosen]
                self.store(some, total.view(np.uint32), own)
                continue
            index, (writers, adders), own = offsets // 4, self._marks(array, 4), own[:, None]
            if self._unknown(writers[index], own):
                raise AccessError(f"adds to what another block wrote to {self._name(array)}")
            adders[index] = np.where(self._not_known(adders[index], own), _SEVERAL, self._now(own))
            with np.errstate(all="ignore"):
                self._bytes[array].view(np.float32)[index] += values[chosen]

    def _marks(self, array: int, word: int) -> list[np.ndarray]:
        """Return the marks of the last writes to a result, and of the last additions to a sum: [words, word]."""
        marks = [self._writers[array - self._read_only]]
        if array in self._adders:
            marks.append(self._adders[array])
        return [each.reshape(-1, word) for each in marks]

    def _now(self, blocks: np.ndarray) -> np.ndarray:
        """Return the marks of writes by these blocks now: block and time."""
        each, index = np.unique(blocks, return_inverse=True)
        marks = np.array([block << _TIME | self._time[block] for block in each.tolist()], np.int64)
        return marks[index].reshape(blocks.shape)

    def _unknown(self, writers: np.ndarray, own: np.ndarray) -> bool:
        """Return whether any write is another block's that the accessing block does not know of."""
        return bool(self._not_known(writers, own).any())

    def _not_known(self, writers: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Return which writes are another block's that the accessing block does not know of."""
        others = (writers != _NOBODY) & (writers >> _TIME != own)
        if others.any():
            pairs = np.stack([np.broadcast_to(own, others.shape)[others], writers[others]])
            each, index = np.unique(pairs, axis=1, return_inverse=True)
            unknown = [
                self._known[block].get(writer >> _TIME, -1) < writer % (1 << _TIME) for block, writer in each.T.tolist()
            ]
            others[others] = np.array(unknown)[index.reshape(-1)]
        return others

    # Counters, 4 bytes each.

    def add_to_counters(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Add a value to a counter for each thread, and release what its block knows (red.release)."""
        for address, value, block in zip(addresses.tolist(), values, blocks.tolist(), strict=True):
            self._counter(address)[...] += value
            _merge(self._released[address], self._known[block] | {block: self._time[block]})
            self._time[block] += 1
            if self._time[block] >> _TIME:
                raise NotImplementedError(f"a block counts more than {1 << _TIME} times")

    def read_counters(self, addresses: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return the counters' values, and note for the blocks what the counters release (ld.relaxed)."""
        for address, block in zip(addresses.tolist(), blocks.tolist(), strict=True):
            _merge(self._observed[block], self._released[address])
        return np.array([self._counter(address).item() for address in addresses.tolist()], np.uint32)

    def acquire(self, blocks: np.ndarray) -> None:
        """Make known to blocks what the counters they read release (fence.acquire)."""
        for block in set(blocks.tolist()):
            _merge(self._known[block], self._observed[block])

    def _counter(self, address: int) -> np.ndarray:
        ((array, _, offsets),) = self._located(np.array([address], np.uint64), 4)
        if array not in self._counters:
            raise AccessError(f"counts in {self._name(array)}, which holds no counters")
        at = int(offsets[0]) // 4
        return self._bytes[array].view(np.uint32)[at : at + 1]

    def _located(self, addresses: np.ndarray, size: int) -> Any:
        """Yield, for each array, its number, the indices of the addresses in it, and their offsets."""
        numbers = addresses >> np.uint64(_SPACE)
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            offsets = (addresses[chosen] & np.uint64((1 << _SPACE) - 1)).astype(np.int64)
            array = int(number) - 1
            if not 0 <= array < len(self._bytes):
                raise AccessError(f"accesses {hex(int(addresses[chosen[0]]))}, which is in no array")
            beyond = offsets[offsets + size > self._sizes[array]]
            if beyond.size:
                raise AccessError(
                    f"accesses bytes {beyond[0]} to {beyond[0] + size - 1} of {self._name(array)}, which has "
                    f"{self._sizes[array]}"
                )
            if np.any(offsets % size):
                raise AccessError(f"an access of {size} bytes to {self._name(array)} is not aligned")
            yield array, chosen, offsets

    def _name(self, array: int) -> str:
        return f"operand {array}" if array < self._read_only else f"result {array - self._read_only}"


def _merge(known: dict[int, int], news: Mapping[int, int]) -> None:
    for block, time in news.items():
        known[block] = max(known.get(block, -1), time)


class SharedMemory:
    """Shared memory of several blocks, initially NaN."""

    def __init__(self, blocks: int, size: int):
        self._size = -(-size // 16) * 16
        self.bytes = np.full((blocks, self._size), 0xFF, np.uint8)

    def _index(self, addresses: np.ndarray, word: int, count: int, blocks: np.ndarray) -> np.ndarray:
        offsets = addresses.astype(np.int64)
        if np.any(offsets < 0) or np.any(offsets + word * count > self._size):
            raise AccessError(f"accesses byte {offsets.max()} of {self._size} in shared memory")
        if np.any(offsets % (word * count)):
            raise AccessError(f"an access of {word * count} bytes to shared memory is not aligned")
        return (blocks * self._size + offsets) // word + np.arange(count)[:, None]

    def load(self, addresses: np.ndarray, word: int, count: int, blocks: np.ndarray) -> np.ndarray:
        """Load words as `DeviceMemory` does; `blocks` are indices among the blocks held here."""
        return self.bytes.reshape(-1).view(f"u{word}")[self._index(addresses, word, count, blocks)]

    def store(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Store words as `DeviceMemory` does; `blocks` are indices among the blocks held here."""
        index = self._index(addresses, values.dtype.itemsize, values.shape[0], blocks)
        self.bytes.reshape(-1).view(values.dtype)[index] = values
