"""Blackwell's tensor memory, in which its tensor cores add up what one thread has them multiply (tcgen05).

Source: NVIDIA, Parallel Thread Execution ISA, version 9.0, section 9.7.16.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from machine_code.arithmetic import DTYPES
from machine_code.memory import AccessError
from machine_code.ptx import Address, Instruction, Operand
from machine_code.tensor_cores import multiply_tiles, numbers, places_of_matrix
from machine_code.waiting import Groups
from machine_code.warps import whole

if TYPE_CHECKING:
    from machine_code.machine import Blocks

_U32, _U64, _BOOL = np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(bool)
_LANES, _COLUMNS = 128, 512
_DEPTH = 32  # bytes of a row that one instruction multiplies
# By the kind of an instruction and what it is told of an operand.
_FORMATS = {("kind::f16", 0): "f16", ("kind::f16", 1): "bf16", ("kind::tf32", 2): "tf32"}


class TensorMemory:
    """That of all blocks, words of 32 bits in 128 lanes and 512 columns each; it begins as NaN.

    Products come at once or, `late`, when nobody can go on without; what threads write comes when they wait for it.
    What they read they have at once, but nobody may write there before they have waited for that.

    Attributes:
      loads, stores: those of threads that nobody has waited for.
    """

    def __init__(self, blocks: int, threads: int, late: bool) -> None:
        self.loads, self.stores = Groups(threads), Groups(threads)
        self._late = late
        self._words: np.ndarray | None = None
        self._read: np.ndarray | None = None  # how many loads of each word nobody has waited for
        self._taken = np.zeros((blocks, _COLUMNS), bool)
        self._begun: list[_Product | tuple[int, int]] = []  # in their order, and which mbarrier is told behind them

    def allocate(self, held: int, columns: int) -> int:
        """Columns of a block; returns the first."""
        if self._words is None:
            self._words = np.full((len(self._taken), _LANES, _COLUMNS), 0xFFFFFFFF, np.uint32)
            self._read = np.zeros(self._words.shape, np.int16)
        taken = np.flatnonzero(self._taken[held])
        first = int(taken[-1]) + 1 if taken.size else 0
        if first + columns > _COLUMNS:
            raise AccessError(f"{columns} columns of tensor memory, of which {_COLUMNS - first} are left")
        self._taken[held, first : first + columns] = True
        return first

    def free(self, held: int, first: int, columns: int) -> None:
        """Give columns back."""
        if not self._taken[held, first : first + columns].all():
            raise AccessError(f"gives back {columns} columns of tensor memory from {first}, which are not its own")
        self._taken[held, first : first + columns] = False

    def words(self, held: np.ndarray, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """What is there; the arguments' shapes broadcast."""
        self._check(held, lanes, columns)
        return self._words[held, lanes, columns]

    def mark(self, held: np.ndarray, lanes: np.ndarray, columns: np.ndarray, loads: int) -> None:
        """So many more loads of these words are under way, or fewer."""
        self._read[held, lanes, columns] += loads

    def write(self, held: np.ndarray, lanes: np.ndarray, columns: np.ndarray, words: np.ndarray) -> None:
        """Words that come to be there."""
        self._check(held, lanes, columns)
        if self._read[held, lanes, columns].any():
            raise AccessError("writes to tensor memory, a load of which nobody has waited for")
        self._words[held, lanes, columns] = words

    def _check(self, held: np.ndarray, lanes: np.ndarray, columns: np.ndarray) -> None:
        if np.any(lanes >= _LANES) or np.any(columns >= _COLUMNS) or not self._taken[held, columns].all():
            raise AccessError("reaches tensor memory that is not allocated")

    def begin(self, m: "Blocks", product: "_Product") -> None:
        """A product."""
        self._begun.append(product)
        if not self._late:
            self.arrive(m)

    def tell(self, m: "Blocks", held: int, barrier: int) -> None:
        """An mbarrier, once all products until now are there."""
        self._begun.append((held, barrier))
        if not self._late:
            self.arrive(m)

    def arrive(self, m: "Blocks") -> bool:
        """The products that have begun come; False where none has."""
        coming, self._begun = self._begun, []
        for each in coming:
            if isinstance(each, _Product):
                each.make(m)
            else:
                m.phases.change(m, *each, 1, 0)
        return bool(coming)

    def end(self) -> None:
        """When nobody is left to wait."""
        if self._begun or self.loads.pending or self.stores.pending:
            raise AccessError("the last thread ends before a product or an access to tensor memory does")
        if self._taken.any():
            raise AccessError("the last thread ends and has not given tensor memory back")


class _Product(NamedTuple):
    """a · b, or what is there + a · b, of one block; `b` and in shared memory also `a` are descriptions of matrices."""

    held: int
    to: int
    a: int | np.uint64
    b: np.uint64
    kind: str
    described: int
    a_in_tensor_memory: bool
    adds: bool

    def _field(self, first: int, bits: int) -> int:
        return self.described >> first & 2**bits - 1

    def make(self, m: "Blocks") -> None:
        rows, columns = 16 * self._field(24, 5), 8 * self._field(17, 6)
        formats = [_FORMATS.get((self.kind, self._field(first, 3))) for first in (7, 10)]
        if self._field(0, 4) or self._field(4, 2) != 1 or self._field(13, 2) or self._field(30, 2):
            raise NotImplementedError("tcgen05.mma of sparse, negated or shifted numbers, or not into float32")
        if rows != _LANES or None in formats or self.to >> 16:
            raise NotImplementedError(f"tcgen05.mma of {rows} rows, in {self.kind}")
        block, lanes = np.full((1, 1), self.held), np.arange(rows)[:, None]
        if self.a_in_tensor_memory:
            words = m.tensor_memory.words(block, lanes, (self.a & 0xFFFF) + np.arange(_DEPTH // 4)[None])
            a = numbers(words, formats[0])
        else:
            a = self._matrix(m, self.a, rows, formats[0], 15)
        b = self._matrix(m, self.b, columns, formats[1], 16)
        at = (block, lanes, self.to + np.arange(columns)[None])
        with np.errstate(all="ignore"):
            total = multiply_tiles(a, b.T)
            if self.adds:
                total = total + m.tensor_memory.words(*at).view(np.float32)
        m.tensor_memory.write(*at, total.view(np.uint32))

    def _matrix(self, m: "Blocks", description: np.uint64, outer: int, kind: str, turned: int) -> np.ndarray:
        """An operand in shared memory [outer, depth]; which bit says that it is contiguous along `outer`."""
        if int(description) >> 61 & 1 or int(description) >> 52 & 1:
            raise NotImplementedError("tcgen05.mma of a matrix with a stride in bytes or a swizzle of 32")
        size = DTYPES[kind].itemsize
        transposed = bool(self._field(turned, 1))
        places = places_of_matrix(np.array([description]), outer, _DEPTH // size, size, transposed)[0]
        held = np.full(places.size, self.held)
        return numbers(m.shared.load(places.reshape(-1), size, 1, held)[0].reshape(places.shape), kind)


def _tcgen05(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    threads = m.chosen(active)
    memory, operands = m.tensor_memory, instruction.operands
    match instruction.modifiers:
        case ("alloc", "cta_group::1", "sync", "aligned", *_):
            place, columns = operands
            for thread in 32 * np.flatnonzero(whole(m, active)):
                first = memory.allocate(int(m.held[thread]), int(columns))
                m.shared.store(m.addresses(place)[[thread]], np.array([[first]], np.uint32), m.held[[thread]])
        case ("dealloc", "cta_group::1", "sync", "aligned", *_):
            address, columns = operands
            for thread in 32 * np.flatnonzero(whole(m, active)):
                memory.free(int(m.held[thread]), int(m.values(address, _U32)[thread]), int(columns))
        case ("relinquish_alloc_permit", *_):
            pass
        case ("mma", "cta_group::1", kind) if len(operands) == 5:
            to, a, b, described, adds = operands
            for thread in np.flatnonzero(threads):
                in_tensor_memory = isinstance(a, Address)
                left = int(m.addresses(a)[thread]) if in_tensor_memory else m.values(a, _U64)[thread]
                product = _Product(
                    int(m.held[thread]),
                    int(m.addresses(to)[thread]),
                    left,
                    m.values(b, _U64)[thread],
                    kind,
                    int(m.values(described, _U32)[thread]),
                    in_tensor_memory,
                    bool(m.values(adds, _BOOL)[thread]),
                )
                memory.begin(m, product)
        case ("commit", "cta_group::1", "mbarrier::arrive::one", "shared::cluster" | "shared::cta", "b64"):
            for thread in np.flatnonzero(threads):
                memory.tell(m, int(m.held[thread]), int(m.addresses(operands[0])[thread]))
        case ("ld", "sync", "aligned", shape, _, "b32"):
            targets, place, *half = operands
            names, at = _registers(targets), _Places.of(m, place, shape, half, active, instruction)
            held, lanes, columns = m.held[threads], at.lanes[threads], at.columns[threads]
            for i, name in enumerate(names):
                values = np.zeros(m.count, np.uint32)
                values[threads] = memory.words(held, lanes, columns + i)
                memory.mark(held, lanes, columns + i, 1)
                m.write(name, values, active)

            def end(chosen: np.ndarray) -> None:
                for i in range(len(names)):
                    memory.mark(m.held[chosen], at.lanes[chosen], at.columns[chosen] + i, -1)

            memory.loads.begin(threads, end)
        case ("st", "sync", "aligned", shape, _, "b32"):
            place, *half, sources = operands
            at = _Places.of(m, place, shape, half, active, instruction)
            values = [m.values(x, _U32).copy() for x in _registers(sources)]

            def store(chosen: np.ndarray) -> None:
                for i, words in enumerate(values):
                    memory.write(m.held[chosen], at.lanes[chosen], at.columns[chosen] + i, words[chosen])

            memory.stores.begin(threads, store)
        case ("wait::ld", "sync", "aligned"):
            memory.loads.finish(threads, -1)
        case ("wait::st", "sync", "aligned"):
            memory.stores.finish(threads, -1)
        case ("fence::before_thread_sync" | "fence::after_thread_sync",):
            pass
        case _:
            raise m.unknown(instruction)


def _registers(operand: Operand) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


class _Places(NamedTuple):
    """Of each thread the lane, and the column of its first register."""

    lanes: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(
        cls, m: "Blocks", place: Address, shape: str, half: list, active: np.ndarray | None, instruction: Instruction
    ) -> "_Places":
        groups = np.repeat(whole(m, active), 32)
        address = m.addresses(place).astype(np.int64)
        lanes, columns, lane = address >> 16, address & 0xFFFF, np.arange(m.count) % 32
        if np.any((lanes // 32 != np.arange(m.count) // 32 % 4)[groups]):
            raise AccessError("a warp reaches lanes of tensor memory that are another's")
        match shape, half:
            case "32x32b", []:
                return cls(lanes + lane, columns)
            case "16x32bx2", [distance]:
                return cls(lanes + lane % 16, columns + lane // 16 * int(distance))
            case _:
                raise m.unknown(instruction)


TENSOR_MEMORY = {"tcgen05": _tcgen05}
