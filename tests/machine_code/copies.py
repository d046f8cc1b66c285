"""Copies between device and shared memory that proceed while threads run."""

from collections.abc import Callable

import numpy as np
from machine_code.barriers import Mbarriers
from machine_code.blocks import ThreadBlocks
from machine_code.memory import AccessError
from machine_code.ptx import Address, PtxInstruction
from machine_code.tensor_maps import TensorMap

_I32, _U32 = np.dtype(np.int32), np.dtype(np.uint32)


class CommitGroups:
    """Asynchronous work of each thread, in the groups that the thread commits."""

    def __init__(self, threads: int) -> None:
        self.pending: list[tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], None]]] = []
        self._closed = np.zeros(threads, np.int32)

    def begin(self, chosen: np.ndarray, work: Callable[[np.ndarray], None]) -> None:
        """Begin work of the chosen threads; `work` is called with the indices of threads that wait for it."""
        self.pending.append((chosen, self._closed.copy(), work))

    def close(self, chosen: np.ndarray) -> None:
        """Commit all work since the last group."""
        self._closed[chosen] += 1

    def finish(self, chosen: np.ndarray, left: int) -> None:
        """Do the work of all but the last `left` groups; −1 includes work that is not committed."""
        still = []
        for wanted, group, work in self.pending:
            now = chosen & wanted & (group < self._closed - left)
            if now.any():
                work(np.flatnonzero(now))
            if np.any(wanted & ~now):
                still.append((wanted & ~now, group, work))
        self.pending = still


class Copies:
    """Copies that threads make (cp.async), and that the copy engine makes for them (cp.async.bulk).

    They arrive at once. With `late`, threads' copies arrive when a thread waits for them, and what the engine fetches
    arrives one by one, in order, when no thread can proceed without. What the engine writes is read, and written, only
    when a thread waits for just that.
    """

    def __init__(self, blocks: ThreadBlocks, mbarriers: Mbarriers, late: bool) -> None:
        self._blocks, self._mbarriers, self._late = blocks, mbarriers, late
        self._fetched: list[tuple[int, int, TensorMap, tuple[int, ...], int]] = []
        self._of_threads = CommitGroups(blocks.count)
        # Of what the engine writes: reads from shared memory and writes to an array.
        self._reads, self._writes = CommitGroups(blocks.count), CommitGroups(blocks.count)

    def _copy(self, to: np.ndarray, source: np.ndarray, size: int, lengths: np.ndarray) -> None:
        """Copy `lengths` bytes for each thread, none where −1, and zero-pad them to `size`."""
        blocks = self._blocks
        if np.any(source[lengths > 0] % np.uint64(size)):
            raise AccessError(f"copies of {size} bytes are not aligned")

        def copy(threads: np.ndarray) -> None:
            for length in np.unique(lengths[threads]):
                where = threads[lengths[threads] == length]
                word = next(w for w in (4, 2, 1) if length % w == 0)
                values = np.zeros((size // word, where.size), f"u{word}")
                for i in range(length // word):
                    addresses = source[where] + np.uint64(i * word)
                    values[i] = blocks.arrays.load(addresses, word, 1, blocks.in_grid[where])[0]
                blocks.shared.store(to[where], values, blocks.local[where])

        if self._late:
            self._of_threads.begin(lengths >= 0, copy)
        else:
            copy(np.flatnonzero(lengths >= 0))

    def _fetch(self, local: int, to: int, known: TensorMap, first: tuple[int, ...], barrier: int) -> None:
        """Let the engine copy a box into shared memory; an mbarrier counts its bytes."""
        self._fetched.append((local, to, known, first, barrier))
        if not self._late:
            self.arrive()

    def arrive(self) -> bool:
        """Complete the oldest fetch of each block; return whether there were any."""
        blocks = self._blocks
        coming = list({fetch[0]: fetch for fetch in reversed(self._fetched)}.values())
        self._fetched = [fetch for fetch in self._fetched if not any(fetch is each for each in coming)]
        for local, to, known, first, barrier in coming:
            offsets, inside = known.places(first)
            words = np.zeros(offsets.size, f"u{known.size}")
            block = np.full(int(inside.sum()), blocks.in_grid[local * blocks.per_block])
            addresses = blocks.arrays.addresses[known.array] + offsets[inside].astype(np.uint64)
            words[inside] = blocks.arrays.load(addresses, known.size, 1, block)[0]
            places = known.places_in_shared(to)
            blocks.shared.store(places, words[None], np.full(places.size, local))
            self._mbarriers.change(local, barrier, 0, -known.bytes())
        return bool(coming)

    def _write(self, thread: int, source: int, known: TensorMap, first: tuple[int, ...], add: bool = False) -> None:
        """Let the engine copy a box from shared memory for a thread, or add it, in float32, to what is there."""
        offsets, inside = known.places(first)
        places = known.places_in_shared(source)[inside]
        addresses = self._blocks.arrays.addresses[known.array] + offsets[inside].astype(np.uint64)
        self._write_words(thread, places, addresses, known.size, add)

    def _write_row(self, thread: int, source: int, to: int, size: int) -> None:
        """Let the engine copy consecutive bytes, a multiple of 16, from shared memory for a thread."""
        if source % 16 or to % 16 or size % 16:
            raise AccessError(f"the copy engine writes {size} bytes, which are not aligned to 16")
        steps = np.arange(0, size, 4, dtype=np.uint64)
        self._write_words(thread, np.uint64(source) + steps, np.uint64(to) + steps, 4)

    def _write_words(
        self, thread: int, places: np.ndarray, addresses: np.ndarray, word: int, add: bool = False
    ) -> None:
        blocks = self._blocks
        only, words = np.arange(blocks.count) == thread, np.empty((1, addresses.size), f"u{word}")
        block = np.full(addresses.size, blocks.in_grid[thread])

        def read(threads: np.ndarray) -> None:
            words[...] = blocks.shared.load(places, word, 1, np.full(places.size, blocks.local[thread]))

        def write(threads: np.ndarray) -> None:
            if add:
                blocks.arrays.add(addresses, words[0].view(np.float32), block)
            else:
                blocks.arrays.store(addresses, words, block)

        self._reads.begin(only, read)
        self._writes.begin(only, write)

    def end(self) -> None:
        """Complete what no thread waited for; raise AccessError if the engine still reads or fetches."""
        if self._fetched or self._reads.pending:
            raise AccessError("the last thread exits before a copy by the engine completes")
        for groups in (self._of_threads, self._writes):
            groups.finish(np.ones(self._blocks.count, bool), -1)

    def cp(self, instruction: PtxInstruction, active: np.ndarray | None) -> None:
        """Execute cp.*."""
        blocks, operands = self._blocks, instruction.operands
        chosen = blocks.chosen(active)
        match instruction.modifiers:
            case ("async", "ca" | "cg", "shared" | "shared::cta", "global"):
                to, source, text, *rest = operands
                size = int(text, 0)
                if not rest or rest[0][:1].isdigit():
                    lengths = np.full(blocks.count, int(rest[0], 0) if rest else size)
                elif blocks.width(rest[0]) == 1:  # a predicate: nothing is read
                    lengths = np.where(blocks.values(rest[0], np.dtype(bool)), 0, size)
                else:
                    lengths = blocks.values(rest[0], _I32)
                lengths = np.where(chosen, lengths, -1)
                self._copy(blocks.addresses(to), blocks.addresses(source), size, lengths)
            case ("async", "commit_group"):
                self._of_threads.close(chosen)
            case ("async", "wait_group"):
                self._of_threads.finish(chosen, int(operands[0], 0))
            case ("async", "wait_all"):
                self._of_threads.finish(chosen, -1)
            case ("async", "bulk", "commit_group"):
                self._reads.close(chosen)
                self._writes.close(chosen)
            case ("async", "bulk", "wait_group", *only):
                for groups in (self._reads, self._writes)[: 1 if only == ["read"] else 2]:
                    groups.finish(chosen, int(operands[0], 0))
            case ("async", "bulk", "tensor", _, "shared::cluster" | "shared::cta", "global", *_):
                to, source, barrier = operands
                for thread in np.flatnonzero(chosen):
                    known, first = self._box(source, thread)
                    place, counted = (int(blocks.addresses(x)[thread]) for x in (to, barrier))
                    self._fetch(int(blocks.local[thread]), place, known, first, counted)
            case ("async", "bulk", "tensor", _, "global", "shared::cta", "bulk_group"):
                to, source = operands
                for thread in np.flatnonzero(chosen):
                    self._write(thread, int(blocks.addresses(source)[thread]), *self._box(to, thread))
            case ("reduce", "async", "bulk", "tensor", _, "global", "shared::cta", "add", "tile", "bulk_group"):
                to, source = operands
                for thread in np.flatnonzero(chosen):
                    known, first = self._box(to, thread)
                    if known.dtype != np.float32:
                        raise blocks.unknown(instruction)
                    self._write(thread, int(blocks.addresses(source)[thread]), known, first, add=True)
            case ("async", "bulk", "global", "shared::cta", "bulk_group"):
                to, source, size = operands
                for thread in np.flatnonzero(chosen):
                    places = (int(blocks.addresses(x)[thread]) for x in (source, to))
                    self._write_row(thread, *places, int(blocks.values(size, _U32)[thread]))
            case _:
                raise blocks.unknown(instruction)

    def _box(self, place: Address, thread: int) -> tuple[TensorMap, tuple[int, ...]]:
        """Return the tensor map at an address, and the coordinates of the box in its array."""
        at = int(self._blocks.addresses(place)[thread])
        if at not in self._blocks.maps:
            raise AccessError(f"there is no tensor map at {hex(at)}")
        coordinates = reversed(place.coordinates)
        return self._blocks.maps[at], tuple(int(self._blocks.values(x, _I32)[thread]) for x in coordinates)
