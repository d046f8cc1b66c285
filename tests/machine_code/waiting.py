"""What threads wait for: copies that go on beside them, and one another."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from machine_code.memory import AccessError
from machine_code.ptx import Instruction
from machine_code.tensor_cores import swizzled

if TYPE_CHECKING:
    from machine_code.machine import Blocks

_I32, _U32 = np.dtype(np.int32), np.dtype(np.uint32)


class TensorMap(NamedTuple):
    """What the copy engine knows of an array, the outermost dimension first.

    Attributes:
      array: which of a kernel's operands and then results.
      dtype: of an element.
      shape, strides: elements.
      box: elements that one copy moves along each dimension.
      swizzle: bytes within which chunks of 16 are exchanged in shared memory; 16 where they are not.
    """

    array: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def bytes(self) -> int:
        """That one copy moves."""
        return self.size * int(np.prod(self.box))

    def places(self, first: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Of the elements of the box from there on, in their order: byte offsets, and which are inside."""
        offsets, inside = np.zeros(1, np.int64), np.ones(1, bool)
        for at, length, stride, box in zip(first, self.shape, self.strides, self.box, strict=True):
            index = at + np.arange(box)
            offsets = (offsets[:, None] + index * stride * self.size).reshape(-1)
            inside = (inside[:, None] & (index >= 0) & (index < length)).reshape(-1)
        return offsets, inside


class Phases:
    """The mbarriers of all blocks: how many arrivals and bytes the present phase of each still lacks."""

    def __init__(self) -> None:
        # [arrivals of a phase, arrivals lacking, bytes lacking, phases that ended]
        self._held: dict[tuple[int, int], list[int]] = {}

    def begin(self, held: int, address: int, arrivals: int) -> None:
        """mbarrier.init."""
        if address % 8:
            raise AccessError("an mbarrier is not aligned to 8 bytes")
        self._held[held, address] = [arrivals, arrivals, 0, 0]

    def forget(self, held: int, address: int) -> None:
        """mbarrier.inval."""
        self._of(held, address)
        del self._held[held, address]

    def change(self, m: "Blocks", held: int, address: int, arrivals: int, expected: int) -> None:
        """So many threads arrived, and so many bytes more are expected, or came where they are fewer."""
        phase = self._of(held, address)
        phase[1] -= arrivals
        phase[2] += expected
        if phase[1] < 0:
            raise AccessError("more threads arrive than an mbarrier counts")
        if phase[1] == phase[2] == 0:
            phase[1] = phase[0]
            phase[3] += 1
            m.wake(held)

    def ended(self, held: int, address: int, parity: int) -> bool:
        """Whether the last phase of this parity did."""
        return self._of(held, address)[3] % 2 != parity

    def _of(self, held: int, address: int) -> list[int]:
        if (held, address) not in self._held:
            raise AccessError(f"there is no mbarrier at {address}")
        return self._held[held, address]


class Copies:
    """Copies that threads began (cp.async), and that the copy engine makes for them (cp.async.bulk).

    They come at once or, `late`, those of threads when somebody waits for them, and those that the engine fetches when
    nobody can go on without. What the engine is to write it reads, and writes, when somebody waits for just that.

    Attributes:
      of_threads: the groups of what threads copy.
      reads, writes: of what the engine is to write for them, from shared memory and to an array.
    """

    def __init__(self, threads: int, late: bool) -> None:
        self._late = late
        self._fetched: list[tuple[int, int, TensorMap, tuple[int, ...], int]] = []
        self.of_threads, self.reads, self.writes = Groups(threads), Groups(threads), Groups(threads)

    # Of threads.

    def begin(self, m: "Blocks", to: np.ndarray, source: np.ndarray, size: int, lengths: np.ndarray) -> None:
        """Each thread copies `lengths` bytes, −1 none, and fills up to `size` by zeros."""
        if np.any(source[lengths > 0] % np.uint64(size)):
            raise AccessError(f"copies of {size} bytes are not aligned")

        def copy(threads: np.ndarray) -> None:
            for length in np.unique(lengths[threads]):
                where = threads[lengths[threads] == length]
                word = next(w for w in (4, 2, 1) if length % w == 0)
                values = np.zeros((size // word, where.size), f"u{word}")
                for i in range(length // word):
                    values[i] = m.arrays.load(source[where] + np.uint64(i * word), word, 1, m.blocks[where])[0]
                m.shared.store(to[where], values, m.held[where])

        if self._late:
            self.of_threads.begin(lengths >= 0, copy)
        else:
            copy(np.flatnonzero(lengths >= 0))

    # Of the engine.

    def fetch(self, m: "Blocks", held: int, to: int, known: TensorMap, first: tuple[int, ...], barrier: int) -> None:
        """A box into shared memory; its bytes count for an mbarrier."""
        self._fetched.append((held, to, known, first, barrier))
        if not self._late:
            self.arrive(m)

    def arrive(self, m: "Blocks") -> bool:
        """What is fetched comes; False where nothing is."""
        coming, self._fetched = self._fetched, []
        for held, to, known, first, barrier in coming:
            offsets, inside = known.places(first)
            words = np.zeros(offsets.size, f"u{known.size}")
            block = np.full(int(inside.sum()), m.blocks[held * m.per_block])
            addresses = m.arrays.addresses[known.array] + offsets[inside].astype(np.uint64)
            words[inside] = m.arrays.load(addresses, known.size, 1, block)[0]
            places = _in_shared(to, known)
            m.shared.store(places, words[None], np.full(places.size, held))
            m.phases.change(m, held, barrier, 0, -known.bytes())
        return bool(coming)

    def write(
        self, m: "Blocks", thread: int, source: int, known: TensorMap, first: tuple[int, ...], add: bool = False
    ) -> None:
        """A box from shared memory, on behalf of a thread; or its sum with what is there, in float32."""
        offsets, inside = known.places(first)
        places = _in_shared(source, known)[inside]
        addresses = m.arrays.addresses[known.array] + offsets[inside].astype(np.uint64)
        self._write(m, thread, places, addresses, known.size, add)

    def write_row(self, m: "Blocks", thread: int, source: int, to: int, size: int) -> None:
        """Bytes that follow one another, a multiple of 16."""
        if source % 16 or to % 16 or size % 16:
            raise AccessError(f"the copy engine writes {size} bytes, which are not aligned to 16")
        steps = np.arange(0, size, 4, dtype=np.uint64)
        self._write(m, thread, np.uint64(source) + steps, np.uint64(to) + steps, 4)

    def _write(
        self, m: "Blocks", thread: int, places: np.ndarray, addresses: np.ndarray, word: int, add: bool = False
    ) -> None:
        only, words = np.arange(m.count) == thread, np.empty((1, addresses.size), f"u{word}")
        block = np.full(addresses.size, m.blocks[thread])

        def read(threads: np.ndarray) -> None:
            words[...] = m.shared.load(places, word, 1, np.full(places.size, m.held[thread]))

        def write(threads: np.ndarray) -> None:
            if add:
                with np.errstate(all="ignore"):
                    words.view(np.float32)[...] += m.arrays.load(addresses, word, 1, block).view(np.float32)
            m.arrays.store(addresses, words, block)

        self.reads.begin(only, read)
        self.writes.begin(only, write)

    def end(self, m: "Blocks") -> None:
        """When nobody is left to wait."""
        if self._fetched or self.reads.pending:
            raise AccessError("the last thread ends before a copy of the engine does")
        for groups in (self.of_threads, self.writes):
            groups.finish(np.ones(m.count, bool), -1)


class Groups:
    """Copies of each thread, or what else it waits for, in the groups that it closes."""

    def __init__(self, threads: int) -> None:
        self.pending: list[tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], None]]] = []
        self._closed = np.zeros(threads, np.int32)

    def begin(self, chosen: np.ndarray, copy: Callable[[np.ndarray], None]) -> None:
        """Of these threads; `copy` is called with those of them that wait."""
        self.pending.append((chosen, self._closed.copy(), copy))

    def close(self, chosen: np.ndarray) -> None:
        """The copies until now are a group."""
        self._closed[chosen] += 1

    def finish(self, chosen: np.ndarray, left: int) -> None:
        """All but the last `left` groups; with −1 also what is of none."""
        still = []
        for wanted, group, copy in self.pending:
            now = chosen & wanted & (group < self._closed - left)
            if now.any():
                copy(np.flatnonzero(now))
            if np.any(wanted & ~now):
                still.append((wanted & ~now, group, copy))
        self.pending = still


def _in_shared(first: int, known: TensorMap) -> np.ndarray:
    """Where the elements of a box lie."""
    if first % 128:
        raise AccessError(f"the copy engine reaches byte {first} of shared memory, which is not aligned to 128")
    places = first + known.size * np.arange(int(np.prod(known.box)), dtype=np.int64)
    if known.swizzle > 16:
        if known.size * known.box[-1] > known.swizzle:
            raise AccessError(f"rows of {known.size * known.box[-1]} bytes are swizzled by {known.swizzle}")
        places = swizzled(places, known.swizzle)
    return places.astype(np.uint64)


def _cp(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    chosen = m.chosen(active)
    match instruction.modifiers:
        case ("async", "ca" | "cg", "shared" | "shared::cta", "global"):
            to, source, text, *rest = instruction.operands
            size = int(text, 0)
            if not rest or rest[0][:1].isdigit():
                lengths = np.full(m.count, int(rest[0], 0) if rest else size)
            elif m.width(rest[0]) == 1:  # a predicate: nothing is read
                lengths = np.where(m.values(rest[0], np.dtype(bool)), 0, size)
            else:
                lengths = m.values(rest[0], _I32)
            m.copies.begin(m, m.addresses(to), m.addresses(source), size, np.where(chosen, lengths, -1))
        case ("async", "commit_group"):
            m.copies.of_threads.close(chosen)
        case ("async", "wait_group"):
            m.copies.of_threads.finish(chosen, int(instruction.operands[0], 0))
        case ("async", "wait_all"):
            m.copies.of_threads.finish(chosen, -1)
        case ("async", "bulk", "commit_group"):
            m.copies.reads.close(chosen)
            m.copies.writes.close(chosen)
        case ("async", "bulk", "wait_group", *only):
            for groups in (m.copies.reads, m.copies.writes)[: 1 if only == ["read"] else 2]:
                groups.finish(chosen, int(instruction.operands[0], 0))
        case ("async", "bulk", "tensor", _, "shared::cluster" | "shared::cta", "global", *_):
            to, source, barrier = instruction.operands
            for thread in np.flatnonzero(chosen):
                known, first = _box(m, source, thread)
                place, counted = (int(m.addresses(x)[thread]) for x in (to, barrier))
                m.copies.fetch(m, int(m.held[thread]), place, known, first, counted)
        case ("async", "bulk", "tensor", _, "global", "shared::cta", "bulk_group"):
            to, source = instruction.operands
            for thread in np.flatnonzero(chosen):
                m.copies.write(m, thread, int(m.addresses(source)[thread]), *_box(m, to, thread))
        case ("reduce", "async", "bulk", "tensor", _, "global", "shared::cta", "add", "tile", "bulk_group"):
            to, source = instruction.operands
            for thread in np.flatnonzero(chosen):
                known, first = _box(m, to, thread)
                if known.dtype != np.float32:
                    raise m.unknown(instruction)
                m.copies.write(m, thread, int(m.addresses(source)[thread]), known, first, add=True)
        case ("async", "bulk", "global", "shared::cta", "bulk_group"):
            to, source, size = instruction.operands
            for thread in np.flatnonzero(chosen):
                places = (int(m.addresses(x)[thread]) for x in (source, to))
                m.copies.write_row(m, thread, *places, int(m.values(size, _U32)[thread]))
        case _:
            raise m.unknown(instruction)


def _box(m: "Blocks", place: object, thread: int) -> tuple[TensorMap, tuple[int, ...]]:
    """The tensor map that an address has, and where in its array."""
    at = int(m.addresses(place)[thread])
    if at not in m.maps:
        raise AccessError(f"there is no tensor map at {hex(at)}")
    return m.maps[at], tuple(int(m.values(x, _I32)[thread]) for x in reversed(place.coordinates))


def _mbarrier(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    chosen = np.flatnonzero(m.chosen(active))
    operands = instruction.operands
    match instruction.modifiers:
        case ("init", *_):
            addresses, counts = m.addresses(operands[0]), m.values(operands[1], _U32)
            for thread in chosen:
                m.phases.begin(int(m.held[thread]), int(addresses[thread]), int(counts[thread]))
        case ("inval", *_):
            for thread in chosen:
                m.phases.forget(int(m.held[thread]), int(m.addresses(operands[0])[thread]))
        case ("arrive", *how):
            _, place, *rest = operands
            count = m.values(rest[0], _U32)[chosen].astype(np.int64) if rest else np.ones(chosen.size, np.int64)
            expects = "expect_tx" in how
            pairs = np.stack([m.held[chosen], m.addresses(place)[chosen].astype(np.int64)])
            for held, address in np.unique(pairs, axis=1).T:
                these = np.all(pairs == [[held], [address]], axis=0)
                total = int(count[these].sum())
                arrivals, expected = (int(these.sum()), total) if expects else (total, 0)
                m.phases.change(m, int(held), int(address), arrivals, expected)
        case ("try_wait", "parity", *_):
            target, place, parity, *_ = operands
            addresses, parities = m.addresses(place), m.values(parity, _U32)
            ended = np.zeros(m.count, bool)
            if np.any(parities[chosen] > 1):
                raise AccessError("a parity is 0 or 1")
            for held, address, odd in {(int(m.held[i]), int(addresses[i]), int(parities[i])) for i in chosen}:
                these = (m.held[chosen] == held) & (addresses[chosen] == address) & (parities[chosen] == odd)
                ended[chosen[these]] = m.phases.ended(held, address, odd)
            m.write(target, ended, active)
            asking = np.zeros(m.count, bool)
            asking[chosen] = True
            m.ask_for_phase(asking, ended, instruction)
        case _:
            raise m.unknown(instruction)


def _bar(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    if instruction.modifiers[0] == "warp":
        return  # a warp's threads are together
    if "sync" not in instruction.modifiers:
        raise m.unknown(instruction)
    barrier, *count = instruction.operands
    expected = m.values(count[0], _I32) if count else None
    if expected is not None and np.any(expected[m.chosen(active)] % 32):
        raise AccessError("a barrier counts whole warps")
    m.wait_at(m.values(barrier, _I32), expected, active, instruction)


WAITING = {"cp": _cp, "mbarrier": _mbarrier, "bar": _bar, "barrier": _bar}
