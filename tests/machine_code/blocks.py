"""Thread blocks that run a kernel: their registers, the memory they reach, and what their threads wait for.

The instructions stand in files of their own (`threads`, `warps`, `barriers`, `copies`, `warpgroups`, `tensor_memory`);
`machine` runs them one after another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from machine_code.arithmetic import BITS, dtype_of, number
from machine_code.memory import FIRST_ARRAY, AccessError, DeviceMemory, SharedMemory
from machine_code.ptx import Address, Operand, PtxInstruction, PtxKernel
from machine_code.tensor_maps import TensorMap

_WARPGROUP = 128  # threads that run until they wait
_LARGEST_SHARED = 232_448  # bytes of shared memory a block may have, on any chip
_PARAMETERS = 60  # bits of the address of a parameter that is no number

# What a thread waits for: nothing, or a phase of any mbarrier, or any counter; a number from 0 is a barrier.
_AWAKE, _PHASE, _COUNTER = -1, -2, -3


class ThreadBlocks:
    """Some thread blocks of a grid, emulated together.

    Values are arrays with one number for each thread, or single numbers. `active` is a mask of the threads that an
    instruction is for, None for all.

    Attributes:
      count: number of threads, `per_block` in each block.
      in_grid: index of each thread's block in the grid.
      local: index of each thread's block among these blocks.
      in_use: registers that a pending product reads or writes, by name the mask of threads.
      maps: tensor maps by their addresses.
    """

    def __init__(
        self,
        kernel: PtxKernel,
        grid: Sequence[int],
        blocks: np.ndarray,
        arrays: DeviceMemory,
        parameters: Sequence[int | Mapping[int, TensorMap]],
        late: bool,
    ):
        self.kernel, self.arrays = kernel, arrays
        self.shared = SharedMemory(len(blocks), _LARGEST_SHARED if kernel.shared_grows else kernel.shared_size)
        self.per_block = int(np.prod(kernel.threads))
        if self.per_block % 32:
            raise NotImplementedError(f"{kernel.name}: blocks of {self.per_block} threads are not whole warps")
        self.count = len(blocks) * self.per_block
        self.local = np.repeat(np.arange(len(blocks)), self.per_block)
        self.in_grid = np.repeat(blocks, self.per_block).astype(np.int32)
        self.in_use: dict[str, np.ndarray] = {}
        self._registers: dict[str, np.ndarray] = {}
        self._known = _special_registers(kernel, grid, blocks) | {
            name: np.uint64(offset) for name, offset in kernel.shared.items()
        }
        self.maps: dict[int, TensorMap] = {}
        for i, name in enumerate(kernel.parameters):
            pointed = parameters[i] if i < len(parameters) else None
            self._known[name] = np.uint64(0)
            if isinstance(pointed, int):
                self._known[name] = arrays.addresses[pointed]
            elif pointed is not None:
                self._known[name] = np.uint64((1 << _PARAMETERS) + (i << 20))
                self.maps |= {int(self._known[name]) + offset: found for offset, found in pointed.items()}
        self._at = np.zeros(self.count, np.int32)  # index of the next basic block
        self._waits = np.full(self.count, _AWAKE, np.int32)
        self._expected = np.zeros(self.count, np.int32)  # threads that each expects at its barrier; 0 is all
        self._asked = np.zeros(self.count, bool)  # whether each asked for a phase that had not ended
        # The counter each thread read last, by which instruction, and its value.
        self._counter = np.zeros(self.count, np.uint64)
        self._asker = np.zeros(self.count, np.int64)
        self._counted = np.zeros(self.count, np.uint32)
        self._waited_at: dict[int, str] = {}  # by what is waited for, the last instruction that waited
        order = np.arange(self.per_block) // _WARPGROUP
        self._order = np.tile(order if late else order[::-1], len(blocks))

    def unknown(self, instruction: PtxInstruction) -> NotImplementedError:
        """Return the error to raise for an instruction that is not emulated."""
        return NotImplementedError(f"{self.kernel.name}: cannot emulate {instruction.text}")

    # Registers.

    def width(self, name: str) -> int:
        """Return the width of a register in bits."""
        return self.kernel.widths[name]

    def value(self, operand: Operand, dtype: np.dtype) -> Any:
        """Return an operand's value: the low bits of a wider register, a narrower one with zeros before its bits."""
        if operand in self._registers:
            held = self._registers[operand]
            if held.dtype.itemsize != dtype.itemsize:
                held = held.astype(f"u{dtype.itemsize}")
            return held.view(dtype)
        if operand in self._known:
            return self._known[operand].astype(dtype)
        if operand.lstrip("-")[:1].isdigit():
            return number(operand, dtype)
        self.width(operand)  # raises unless it is a register; one never written has all bits set, NaN in floating point
        return (
            np.full(self.count, True)
            if dtype.kind == "b"
            else (~np.zeros(self.count, BITS[8 * dtype.itemsize])).view(dtype)
        )

    def values(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """Return an operand's value for each thread: [threads]."""
        return np.broadcast_to(self.value(operand, dtype), self.count)

    def by_warp(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """Return an operand's value for each thread: [warps, 32]."""
        return self.values(operand, dtype).reshape(-1, 32)

    def write(self, name: str, value: Any, active: np.ndarray | None) -> None:
        """Write a register; a narrower value is extended, by its sign if it is signed."""
        if name == "_":
            return
        if name in self.in_use:
            held = self.in_use[name]
            if np.any(held if active is None else held & active):
                raise AccessError(f"writes {name}, which a pending product still uses")
        dtype = BITS[self.width(name)]
        value = np.asarray(value)
        if value.dtype.itemsize < dtype.itemsize:
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{dtype.itemsize}")
        value = np.broadcast_to(value, self.count)
        bits = value if value.dtype == dtype else np.ascontiguousarray(value).view(dtype)
        if active is not None:
            before = self._registers.get(name)
            bits = np.where(active, bits, ~np.zeros(1, dtype) if before is None else before)
        self._registers[name] = bits

    def chosen(self, active: np.ndarray | None) -> np.ndarray:
        """Return the mask of the threads that an instruction is for."""
        return np.ones(self.count, bool) if active is None else active

    # Memory.

    def addresses(self, place: Address) -> np.ndarray:
        """Return each thread's address."""
        base = self.value(place.base, np.dtype(np.uint64))
        return np.broadcast_to(base + np.uint64(place.offset % 2**64), self.count)

    def load(
        self, modifiers: Sequence[str], targets: Sequence[str], addresses: np.ndarray, active: np.ndarray | None
    ) -> None:
        """Load consecutive words into registers."""
        dtype = dtype_of(modifiers)
        where = np.arange(self.count) if active is None else np.flatnonzero(active)
        memory, owners = self._memory(modifiers, addresses[where])
        found = memory.load(addresses[where], dtype.itemsize, len(targets), owners[where])
        for name, words in zip(targets, found, strict=True):
            values = np.zeros(self.count, dtype)
            values[where] = words.view(dtype)
            self.write(name, values, active)

    def store(
        self, modifiers: Sequence[str], sources: Sequence[str], addresses: np.ndarray, active: np.ndarray | None
    ) -> None:
        """Store registers as consecutive words."""
        dtype = dtype_of(modifiers)
        where = np.arange(self.count) if active is None else np.flatnonzero(active)
        memory, owners = self._memory(modifiers, addresses[where])
        words = np.stack([self.values(x, dtype)[where] for x in sources])
        memory.store(addresses[where], words.view(f"u{dtype.itemsize}"), owners[where])

    def _memory(self, modifiers: Sequence[str], addresses: np.ndarray) -> tuple[DeviceMemory | SharedMemory, Any]:
        """Return the memory that an instruction accesses, and each thread's block there.

        A modifier names the memory, or else the address does.
        """
        if {"local", "const"} & set(modifiers):
            raise NotImplementedError(f"{self.kernel.name}: cannot emulate .{modifiers[0]} memory")
        here = any(name.startswith("shared") for name in modifiers)
        here |= "global" not in modifiers and bool(addresses[0] < FIRST_ARRAY)
        return (self.shared, self.local) if here else (self.arrays, self.in_grid)

    # Control.

    def advance(self) -> tuple[int, np.ndarray] | None:
        """Move some threads past their next basic block; return its index and the threads, None if all wait or ended.

        In each thread block one warpgroup proceeds, and in it the threads that are furthest behind.
        """
        end = len(self.kernel.blocks)
        awake = (self._waits == _AWAKE) & (self._at < end)
        if not awake.any():
            return None
        ready = np.where(awake & (self._order == self._order[awake].min()), self._at, end)
        here = int(ready.min())
        self._at[ready == here] = here + 1
        return here, ready == here

    def waiting(self) -> bool:
        """Return whether any thread waits."""
        return bool(np.any(self._waits != _AWAKE))

    def deadlock(self) -> AccessError:
        """Return the error to raise where all threads that have not ended wait, and nothing is to come."""
        waiting = self._waits != _AWAKE
        counts = np.repeat((self._waits == _COUNTER).reshape(-1, 32).any(axis=1), 32)
        self._require_whole_warps((self._waits >= 0) & ~counts)
        where = "; ".join(self._waited_at[int(i)] for i in np.unique(self._waits[waiting]))
        return AccessError(f"deadlock: {waiting.sum()} threads wait at {where}")

    def go(self, active: np.ndarray | None, label: str | None) -> None:
        """Jump to a label, or to the end."""
        to = len(self.kernel.blocks) if label is None else self.kernel.labels[label]
        self._at[slice(None) if active is None else active] = to
        if label is None:
            for barrier in np.unique(self._waits[self._waits >= 0]):
                self._open(barrier)

    def wait_at(
        self, barrier: np.ndarray, expected: np.ndarray | None, active: np.ndarray | None, instruction: PtxInstruction
    ) -> None:
        """Wait until `expected` threads of the block wait at the barrier; None is all that have not ended."""
        chosen = self.chosen(active)
        self._waits[chosen] = barrier[chosen]
        self._expected[chosen] = 0 if expected is None else expected[chosen]
        for i in np.unique(barrier[chosen]):
            self._waited_at[int(i)] = instruction.text
            self._open(i)

    def _open(self, barrier: int) -> None:
        """Open a barrier in the blocks where all expected threads wait at it."""
        by_block = self._waits.reshape(-1, self.per_block)
        here = by_block == barrier
        left = (self._at < len(self.kernel.blocks)).reshape(by_block.shape).sum(axis=1)
        expected = np.where(here, self._expected.reshape(by_block.shape), 0).max(axis=1)
        wanted, waiting = np.where(expected, expected, left), here.sum(axis=1)
        if np.any(waiting > wanted):
            raise AccessError("more threads wait at a barrier than it expects")
        opened = here & (waiting == wanted)[:, None]
        self._require_whole_warps(opened.reshape(-1))
        by_block[opened] = _AWAKE

    def _require_whole_warps(self, waiting: np.ndarray) -> None:
        """Raise AccessError unless the threads of each warp wait at one place.

        A warp that diverged, as when waiting for a counter, must have reconverged at a barrier.
        """
        where = np.where(waiting, self._at, -1).reshape(-1, 32)
        if np.any(where != where[:, :1]):
            raise AccessError("only a part of a warp waits at a barrier")

    def ask_for_phase(self, chosen: np.ndarray, ended: np.ndarray, instruction: PtxInstruction) -> None:
        """Suspend threads that ask a second time for a phase of an mbarrier that has not ended.

        They wait until any phase in their block ends.
        """
        self._waits[chosen & ~ended & self._asked] = _PHASE
        self._asked[chosen] = ~ended[chosen]
        self._waited_at[_PHASE] = instruction.text

    def wake(self, local: int) -> None:
        """Wake the threads of a block that wait for a phase."""
        block = slice(local * self.per_block, (local + 1) * self.per_block)
        self._waits[block][self._waits[block] == _PHASE] = _AWAKE
        self._asked[block] = False

    def ask_for_counter(self, chosen: np.ndarray, addresses: np.ndarray, instruction: PtxInstruction) -> np.ndarray:
        """Return the counters' values.

        A warp waits, until a counter changes, once an instruction returns the same value again to one of its threads.
        """
        counted = self._counted.copy()
        counted[chosen] = self.arrays.read_counters(addresses[chosen], self.in_grid[chosen])
        again = chosen & (self._counter == addresses) & (self._asker == id(instruction)) & (self._counted == counted)
        self._waits[np.repeat(again.reshape(-1, 32).any(axis=1), 32) & (self._waits == _AWAKE)] = _COUNTER
        self._counter[chosen], self._asker[chosen], self._counted = addresses[chosen], id(instruction), counted
        self._waited_at[_COUNTER] = instruction.text
        return counted

    def count_up(self, chosen: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        """Add to counters and wake the threads that wait for any."""
        self.arrays.add_to_counters(addresses[chosen], values[chosen], self.in_grid[chosen])
        self._waits[self._waits == _COUNTER] = _AWAKE

    def acquire(self, chosen: np.ndarray) -> None:
        """Make known to the threads' blocks what the counters they read release."""
        self.arrays.acquire(self.in_grid[chosen])
        self._asker[chosen] = 0


def _special_registers(kernel: PtxKernel, grid: Sequence[int], blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Return the registers that identify each thread, by name."""
    width, height, _ = kernel.threads
    thread = np.arange(int(np.prod(kernel.threads)), dtype=np.uint32)
    columns, rows, _ = grid
    threads = (thread % width, thread // width % height, thread // (width * height))
    placed = (blocks % columns, blocks // columns % rows, blocks // (columns * rows))
    known = {"%laneid": np.tile(thread % 32, len(blocks)), "%warpid": np.tile(thread // 32, len(blocks))}
    for i, axis in enumerate("xyz"):
        known[f"%tid.{axis}"] = np.tile(threads[i], len(blocks))
        known[f"%ctaid.{axis}"] = np.repeat(placed[i], len(thread)).astype(np.uint32)
        known[f"%ntid.{axis}"] = np.uint32(kernel.threads[i])
        known[f"%nctaid.{axis}"] = np.uint32(grid[i])
    return known
