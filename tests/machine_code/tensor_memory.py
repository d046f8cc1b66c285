"""Blackwell's tensor memory, in which tensor cores accumulate the products that one thread begins (tcgen05).

Source: NVIDIA, Parallel Thread Execution ISA, version 9.0, section 9.7.16.
"""

from typing import NamedTuple

import numpy as np
from machine_code.arithmetic import DTYPES
from machine_code.barriers import Mbarriers
from machine_code.blocks import ThreadBlocks
from machine_code.copies import CommitGroups
from machine_code.memory import AccessError
from machine_code.ptx import Address, Operand, PtxInstruction
from machine_code.tensor_cores import multiply_tiles, numbers, places_of_matrix
from machine_code.warps import whole

_U32, _U64, _BOOL = np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(bool)
_LANES, _COLUMNS = 128, 512
_DEPTH = 32  # bytes of a row that one instruction multiplies
# Format of an operand, by the kind of the instruction and the operand's field in its descriptor.
_FORMATS = {("kind::f16", 0): "f16", ("kind::f16", 1): "bf16", ("kind::tf32", 2): "tf32"}


class TensorMemory:
    """Tensor memory of all blocks: words of 32 bits in 128 lanes and 512 columns each, initially NaN.

    Products complete at once or, with `late`, when no thread can proceed without; a thread's stores complete when it
    waits for them. A thread's loads complete at once, but until it waits for them nothing may be written there.
    """

    def __init__(self, blocks: ThreadBlocks, mbarriers: Mbarriers, late: bool) -> None:
        self._blocks, self._mbarriers, self._late = blocks, mbarriers, late
        self._loads, self._stores = CommitGroups(blocks.count), CommitGroups(blocks.count)
        self._words: np.ndarray | None = None
        self._read: np.ndarray | None = None  # pending loads of each word
        self._taken = np.zeros((blocks.count // blocks.per_block, _COLUMNS), bool)
        # Products in their order, and mbarriers (block, address) to tell once those before them complete.
        self._begun: list[_Product | tuple[int, int]] = []

    def _allocate(self, local: int, columns: int) -> int:
        """Allocate columns of a block and return the first."""
        if self._words is None:
            self._words = np.full((len(self._taken), _LANES, _COLUMNS), 0xFFFFFFFF, np.uint32)
            self._read = np.zeros(self._words.shape, np.int16)
        taken = np.flatnonzero(self._taken[local])
        first = int(taken[-1]) + 1 if taken.size else 0
        if first + columns > _COLUMNS:
            raise AccessError(f"allocates {columns} columns of tensor memory, of which {_COLUMNS - first} are free")
        self._taken[local, first : first + columns] = True
        return first

    def _free(self, local: int, first: int, columns: int) -> None:
        if not self._taken[local, first : first + columns].all():
            raise AccessError(f"frees {columns} columns of tensor memory from {first}, which are not allocated")
        self._taken[local, first : first + columns] = False

    def _load(self, local: np.ndarray, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return words; the shapes of the arguments broadcast."""
        self._check(local, lanes, columns)
        return self._words[local, lanes, columns]

    def _store(self, local: np.ndarray, lanes: np.ndarray, columns: np.ndarray, words: np.ndarray) -> None:
        self._check(local, lanes, columns)
        if self._read[local, lanes, columns].any():
            raise AccessError("writes tensor memory while a load of it is pending")
        self._words[local, lanes, columns] = words

    def _check(self, local: np.ndarray, lanes: np.ndarray, columns: np.ndarray) -> None:
        if np.any(lanes >= _LANES) or np.any(columns >= _COLUMNS) or not self._taken[local, columns].all():
            raise AccessError("accesses tensor memory that is not allocated")

    def _begin(self, step: "_Product | tuple[int, int]") -> None:
        """Begin a product, or tell an mbarrier once all products so far complete."""
        self._begun.append(step)
        if not self._late:
            self.arrive()

    def arrive(self) -> bool:
        """Complete all products that have begun; return whether there were any."""
        coming, self._begun = self._begun, []
        for step in coming:
            if isinstance(step, _Product):
                self._multiply(step)
            else:
                self._mbarriers.change(*step, 1, 0)
        return bool(coming)

    def end(self) -> None:
        """Raise AccessError if anything is pending or allocated once all threads ended."""
        if self._begun or self._loads.pending or self._stores.pending:
            raise AccessError("the last thread exits before a product or an access to tensor memory completes")
        if self._taken.any():
            raise AccessError("the last thread exits without freeing tensor memory")

    def _multiply(self, product: "_Product") -> None:
        rows, columns = 16 * product.field(24, 5), 8 * product.field(17, 6)
        formats = [_FORMATS.get((product.kind, product.field(first, 3))) for first in (7, 10)]
        if product.field(0, 4) or product.field(4, 2) != 1 or product.field(13, 2) or product.field(30, 2):
            raise NotImplementedError(
                "cannot emulate tcgen05.mma of sparse, negated or shifted operands, or with results other than float32"
            )
        if rows not in (64, _LANES) or None in formats or (rows == _LANES and product.to >> 16):
            raise NotImplementedError(f"cannot emulate tcgen05.mma of {rows} rows in {product.kind}")
        # Of 64 rows every 16 are in a half of the lanes that a warp reaches: the address says in which.
        row = np.arange(rows)[:, None]
        block, lanes = np.full((1, 1), product.local), row if rows == _LANES else row // 16 * 32 + row % 16
        if product.a_in_tensor_memory:
            first = int(product.a) >> 16, int(product.a) & 0xFFFF
            words = self._load(block, first[0] + lanes, first[1] + np.arange(_DEPTH // 4)[None])
            a = numbers(words, formats[0])
        else:
            a = self._shared_operand(product, product.a, rows, formats[0], 15)
        b = self._shared_operand(product, product.b, columns, formats[1], 16)
        at = (block, (product.to >> 16) + lanes, (product.to & 0xFFFF) + np.arange(columns)[None])
        with np.errstate(all="ignore"):
            total = multiply_tiles(a, b.T)
            if product.adds:
                total = total + self._load(*at).view(np.float32)
        self._store(*at, total.view(np.uint32))

    def _shared_operand(
        self, product: "_Product", description: np.uint64, outer: int, kind: str, transposed: int
    ) -> np.ndarray:
        """Return an operand in shared memory, [outer, depth].

        Bit `transposed` of the product's descriptor says that it is contiguous along `outer`.
        """
        if int(description) >> 61 & 1 or int(description) >> 52 & 1:
            raise NotImplementedError(
                "cannot emulate tcgen05.mma of a matrix with a stride in bytes or a swizzle of 32 bytes"
            )
        size = DTYPES[kind].itemsize
        contiguous_outer = bool(product.field(transposed, 1))
        places = places_of_matrix(np.array([description]), outer, _DEPTH // size, size, contiguous_outer)[0]
        local = np.full(places.size, product.local)
        return numbers(self._blocks.shared.load(places.reshape(-1), size, 1, local)[0].reshape(places.shape), kind)

    def tcgen05(self, instruction: PtxInstruction, active: np.ndarray | None) -> None:
        """Execute tcgen05.*."""
        blocks, operands = self._blocks, instruction.operands
        threads = blocks.chosen(active)
        match instruction.modifiers:
            case ("alloc", "cta_group::1", "sync", "aligned", *_):
                place, columns = operands
                for thread in 32 * np.flatnonzero(whole(blocks, active)):
                    first = np.array([[self._allocate(int(blocks.local[thread]), int(columns))]], np.uint32)
                    blocks.shared.store(blocks.addresses(place)[[thread]], first, blocks.local[[thread]])
            case ("dealloc", "cta_group::1", "sync", "aligned", *_):
                address, columns = operands
                for thread in 32 * np.flatnonzero(whole(blocks, active)):
                    self._free(int(blocks.local[thread]), int(blocks.values(address, _U32)[thread]), int(columns))
            case ("relinquish_alloc_permit", *_):
                pass
            case ("mma", "cta_group::1", kind) if len(operands) == 5:
                for thread in np.flatnonzero(threads):
                    self._begin(_Product.of(blocks, operands, kind, thread))
            case ("commit", "cta_group::1", "mbarrier::arrive::one", "shared::cluster" | "shared::cta", "b64"):
                for thread in np.flatnonzero(threads):
                    self._begin((int(blocks.local[thread]), int(blocks.addresses(operands[0])[thread])))
            case ("ld", "sync", "aligned", shape, _, "b32"):
                targets, place, *half = operands
                names, at = _registers(targets), _Places.of(blocks, place, shape, half, active, instruction)
                local, lanes, columns = blocks.local[threads], at.lanes[threads], at.columns[threads]
                for i, name in enumerate(names):
                    values = np.zeros(blocks.count, np.uint32)
                    values[threads] = self._load(local, lanes, columns + i)
                    self._read[local, lanes, columns + i] += 1
                    blocks.write(name, values, active)

                def end(chosen: np.ndarray) -> None:
                    for i in range(len(names)):
                        self._read[blocks.local[chosen], at.lanes[chosen], at.columns[chosen] + i] -= 1

                self._loads.begin(threads, end)
            case ("st", "sync", "aligned", shape, _, "b32"):
                place, *half, sources = operands
                at = _Places.of(blocks, place, shape, half, active, instruction)
                values = [blocks.values(x, _U32).copy() for x in _registers(sources)]

                def store(chosen: np.ndarray) -> None:
                    for i, words in enumerate(values):
                        self._store(blocks.local[chosen], at.lanes[chosen], at.columns[chosen] + i, words[chosen])

                self._stores.begin(threads, store)
            case ("wait::ld", "sync", "aligned"):
                self._loads.finish(threads, -1)
            case ("wait::st", "sync", "aligned"):
                self._stores.finish(threads, -1)
            case ("fence::before_thread_sync" | "fence::after_thread_sync",):
                pass
            case _:
                raise blocks.unknown(instruction)


class _Product(NamedTuple):
    """A product a · b of one block, added to what is there where `adds`.

    `b`, and `a` unless it is in tensor memory, are descriptors of matrices in shared memory; `described` is the
    instruction's descriptor.
    """

    local: int
    to: int
    a: int | np.uint64
    b: np.uint64
    kind: str
    described: int
    a_in_tensor_memory: bool
    adds: bool

    @classmethod
    def of(cls, blocks: ThreadBlocks, operands: tuple[Operand, ...], kind: str, thread: int) -> "_Product":
        """Return the product that a thread begins."""
        to, a, b, described, adds = operands
        in_tensor_memory = isinstance(a, Address)
        return cls(
            int(blocks.local[thread]),
            int(blocks.addresses(to)[thread]),
            int(blocks.addresses(a)[thread]) if in_tensor_memory else blocks.values(a, _U64)[thread],
            blocks.values(b, _U64)[thread],
            kind,
            int(blocks.values(described, _U32)[thread]),
            in_tensor_memory,
            bool(blocks.values(adds, _BOOL)[thread]),
        )

    def field(self, first: int, bits: int) -> int:
        """Return some bits of the instruction's descriptor."""
        return self.described >> first & 2**bits - 1


def _registers(operand: Operand) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


class _Places(NamedTuple):
    """Each thread's lane, and the column of its first register."""

    lanes: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(
        cls,
        blocks: ThreadBlocks,
        place: Address,
        shape: str,
        half: list,
        active: np.ndarray | None,
        instruction: PtxInstruction,
    ) -> "_Places":
        """Return the lanes and columns that an instruction of this shape accesses from an address on."""
        groups = np.repeat(whole(blocks, active), 32)
        address = blocks.addresses(place).astype(np.int64)
        lanes, columns, lane = address >> 16, address & 0xFFFF, np.arange(blocks.count) % 32
        if np.any((lanes // 32 != np.arange(blocks.count) // 32 % 4)[groups]):
            raise AccessError("a warp accesses lanes of tensor memory that belong to another")
        match shape, half:
            case "32x32b", []:
                return cls(lanes + lane, columns)
            case "16x32bx2", [distance]:
                return cls(lanes + lane % 16, columns + lane // 16 * int(distance))
            case _:
                raise blocks.unknown(instruction)
