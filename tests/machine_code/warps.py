"""Instructions of whole warps, and of the four of a warpgroup."""

from typing import TYPE_CHECKING, Any

import numpy as np
from machine_code import tensor_cores
from machine_code.arithmetic import DTYPES
from machine_code.memory import AccessError
from machine_code.ptx import Instruction, Operand

if TYPE_CHECKING:
    from machine_code.machine import Blocks

_U32, _U64, _BOOL = np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(bool)


def whole(m: "Blocks", active: np.ndarray | None, size: int = 32) -> np.ndarray:
    """Which warps, or groups of so many threads, take part: all threads of each or none."""
    if m.per_block % size:
        raise AccessError(f"blocks of {m.per_block} threads are no whole groups of {size}")
    if active is None:
        return np.ones(m.count // size, bool)
    groups = active.reshape(-1, size)
    if np.any(groups.any(axis=1) != groups.all(axis=1)):
        raise AccessError(f"a part of {size} threads that must take part together")
    return groups[:, 0]


def _require_all(m: "Blocks", instruction: Instruction, members: str) -> None:
    """That a mask is of all of a warp's threads."""
    if np.any(m.value(members, _U32) != np.uint32(2**32 - 1)):
        raise m.unknown(instruction)


def _elect(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    """The first thread of each warp."""
    whole(m, active)
    lane, chosen, members = instruction.operands
    _require_all(m, instruction, members)
    m.write(lane, np.uint32(0), active)
    m.write(chosen, np.arange(m.count) % 32 == 0, active)


def _shfl(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    whole(m, active)
    target, *rest = instruction.operands
    inside = [rest.pop(0)] if len(rest) > 4 else []
    *rest, members = rest
    _require_all(m, instruction, members)
    values, operand, clamp = (m.by_warp(x, _U32) for x in rest)
    result, found = tensor_cores.shuffle(instruction.modifiers[1], values, operand, clamp)
    m.write(target, result.reshape(-1), active)
    for name in inside:
        m.write(name, found.reshape(-1), active)


def _vote(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    whole(m, active)
    target, source, members = instruction.operands
    _require_all(m, instruction, members)
    if "ballot" not in instruction.modifiers or source.startswith("!"):
        raise m.unknown(instruction)
    m.write(target, np.repeat(tensor_cores.flags(m.by_warp(source, _BOOL)), 32), active)


def _redux(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    whole(m, active)
    target, source, members = instruction.operands
    _require_all(m, instruction, members)
    match instruction.modifiers:
        case ("sync", "max" | "min" as operation, *propagates, "f32") if propagates in ([], ["NaN"]):
            reduce = getattr(np, operation + "imum" if propagates else "f" + operation)
        case _:
            raise m.unknown(instruction)
    m.write(target, np.repeat(reduce.reduce(m.by_warp(source, np.dtype(np.float32)), axis=1), 32), active)


def _ldmatrix(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    warps = whole(m, active)
    targets, place = instruction.operands
    addresses, held = _rows(m, place, len(targets), warps)
    rows = m.shared.load(addresses, 2, 8, held).T.reshape(-1, len(targets), 8, 8)
    found = tensor_cores.matrices_of_rows(rows, "trans" in instruction.modifiers)
    for i, name in enumerate(targets):
        values = np.zeros((m.count // 32, 32), np.uint32)
        values[warps] = found[:, i]
        m.write(name, values.reshape(-1), active)


def _stmatrix(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    warps = whole(m, active)
    place, sources = instruction.operands
    rows = tensor_cores.rows_of_matrices(np.stack([m.by_warp(x, _U32)[warps] for x in sources], axis=1))
    if "trans" in instruction.modifiers:
        rows = np.swapaxes(rows, -1, -2)
    addresses, held = _rows(m, place, len(sources), warps)
    m.shared.store(addresses, np.ascontiguousarray(rows.reshape(-1, 8).T), held)


def _rows(m: "Blocks", place: Any, count: int, warps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the eight rows of each of a warp's matrices begin, of which each thread knows one."""
    addresses = m.addresses(place).reshape(-1, 32)[warps][:, : 8 * count]
    held = np.broadcast_to(m.held.reshape(-1, 32)[warps][:, :1], addresses.shape)
    return addresses.reshape(-1), held.reshape(-1)


def _mma(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    whole(m, active)
    targets, *sources = instruction.operands
    operands = [[m.by_warp(x, _U32) for x in registers] for registers in sources]
    with np.errstate(all="ignore"):
        results = tensor_cores.multiply(instruction.modifiers, *operands)
    for name, values in zip(targets, results, strict=True):
        m.write(name, values.reshape(-1), active)


class Products:
    """Those of wgmma that are under way: their operands in shared memory are read, and their sums written, as late as
    may be, when somebody waits for them. Operands in registers are read at once, and must stay until then.

    Attributes:
      registers: by name of those that hold an operand or are a sum, of which threads they are.
    """

    def __init__(self, threads: int) -> None:
        self.registers: dict[str, np.ndarray] = {}
        self._read: dict[str, np.ndarray] = {}  # those of operands alone
        self._pending: list[tuple] = []
        self._closed = np.zeros(threads // 128, np.int32)  # groups that each warpgroup has closed

    def begin(self, m: "Blocks", instruction: Instruction, groups: np.ndarray) -> None:
        """Of these warpgroups; what is in registers is read now."""
        *_, shape, to, kind, other = instruction.modifiers
        sums, left, right, kept, *signs = instruction.operands
        if to != "f32" or kind != other or signs[:2] != ["1", "1"]:
            raise m.unknown(instruction)
        columns, depth = map(int, shape.removeprefix("m64n").split("k"))
        flips = [text != "0" for text in signs[2:]]
        a: Any = _Matrix(m, left, 64, depth, kind, any(flips[:-1])) if isinstance(left, str) else None
        if a is None:
            registers = [m.by_warp(x, _U32).reshape(-1, 4, 32) for x in left]
            a = tensor_cores.left_tile(registers, kind, depth)  # [groups, 4, 16, depth]
        b = _Matrix(m, right, columns, depth, kind, any(flips[-1:]))
        added = m.values(kept, _BOOL)
        read = left if isinstance(left, tuple) else ()
        for name in sums:  # another product may go on with a sum, but not put one where an operand is
            if np.any(self._read.get(name, False) & np.repeat(groups, 128)):
                raise AccessError(f"adds up in {name}, which a product that nobody has waited for still reads")
        self._pending.append((groups, self._closed.copy(), read, sums, a, b, added))
        self._hold(groups, read, sums)

    def close(self, groups: np.ndarray) -> None:
        """wgmma.commit_group."""
        self._closed[groups] += 1

    def finish(self, m: "Blocks", groups: np.ndarray, left: int) -> None:
        """wgmma.wait_group: all but the last `left` groups."""
        pending, self._pending, self.registers, self._read = self._pending, [], {}, {}
        for wanted, closed, read, sums, *operands in pending:
            now = groups & wanted & (closed < self._closed - left)
            if now.any():
                self._multiply(m, now, sums, *operands)
            if np.any(wanted & ~now):
                self._pending.append((wanted & ~now, closed, read, sums, *operands))
        for wanted, _, read, sums, *_ in self._pending:
            self._hold(wanted, read, sums)

    def _hold(self, groups: np.ndarray, read: tuple[str, ...], sums: tuple[str, ...]) -> None:
        threads = np.repeat(groups, 128)
        for held, names in ((self._read, read), (self.registers, (*read, *sums))):
            for name in names:
                held[name] = held.get(name, False) | threads

    def end(self) -> None:
        """When nobody is left to wait."""
        if self._pending:
            raise AccessError("the last thread ends before a product does")

    @staticmethod
    def _multiply(m: "Blocks", groups: np.ndarray, sums: tuple, a: Any, b: "_Matrix", added: np.ndarray) -> None:
        left = a.read(m, groups).reshape(-1, 4, 16, b.depth) if isinstance(a, _Matrix) else a[groups]
        right = np.swapaxes(b.read(m, groups), -1, -2)[:, None]
        threads = np.repeat(groups, 128)
        with np.errstate(all="ignore"):
            products = tensor_cores.sums(tensor_cores.multiply_tiles(left, right), b.outer)
            for name, product in zip(sums, products, strict=True):
                total = np.zeros(m.count, np.float32)
                total[threads] = product.reshape(-1)
                before = m.value(name, np.dtype(np.float32))
                m.write(name, np.where(added, before + total, total), threads)


class _Matrix:
    """An operand of wgmma in shared memory."""

    def __init__(self, m: "Blocks", description: Operand, outer: int, depth: int, kind: str, transposed: bool):
        described = m.values(description, _U64).reshape(-1, 128)
        if np.any(described != described[:, :1]):
            raise AccessError("threads of a warpgroup describe different matrices")
        self._descriptions = described[:, 0]
        self.outer, self.depth, self._kind, self._transposed = outer, depth, kind, transposed

    def read(self, m: "Blocks", groups: np.ndarray) -> np.ndarray:
        """Of these warpgroups: [groups, outer, depth] in float32."""
        size = DTYPES[self._kind].itemsize
        places = tensor_cores.places_of_matrix(
            self._descriptions[groups], self.outer, self.depth, size, self._transposed
        )
        held = np.broadcast_to(m.held.reshape(-1, 128)[groups][:, :1, None], places.shape)
        words = m.shared.load(places.reshape(-1), size, 1, held.reshape(-1))[0].reshape(places.shape)
        return tensor_cores.numbers(words, self._kind)


def _wgmma(m: "Blocks", instruction: Instruction, active: np.ndarray | None) -> None:
    groups = whole(m, active, 128)
    match instruction.modifiers[0]:
        case "mma_async":
            m.products.begin(m, instruction, groups)
        case "commit_group":
            m.products.close(groups)
        case "wait_group":
            m.products.finish(m, groups, int(instruction.operands[0], 0))
        case "fence":
            pass
        case _:
            raise m.unknown(instruction)


WARPS = {
    "elect": _elect,
    "shfl": _shfl,
    "vote": _vote,
    "redux": _redux,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
    "wgmma": _wgmma,
}
