"""Hopper's matrix products, which a warpgroup of four warps begins and later waits for (wgmma)."""

from typing import Any

import numpy as np
from machine_code import tensor_cores
from machine_code.arithmetic import DTYPES
from machine_code.blocks import ThreadBlocks
from machine_code.memory import AccessError
from machine_code.ptx import Operand, PtxInstruction
from machine_code.warps import whole

_U32, _U64, _BOOL = np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(bool)


class WarpgroupProducts:
    """Pending products of all warpgroups.

    Operands in shared memory are read, and sums written, as late as possible: when the warpgroup waits for them.
    Operands in registers are read at once, and must not change until then: `ThreadBlocks.in_use` names them.
    """

    def __init__(self, blocks: ThreadBlocks) -> None:
        self._blocks = blocks
        self._read: dict[str, np.ndarray] = {}  # registers in use that are operands only
        self._pending: list[tuple] = []
        self._closed = np.zeros(blocks.count // 128, np.int32)  # groups that each warpgroup has committed

    def wgmma(self, instruction: PtxInstruction, active: np.ndarray | None) -> None:
        """Execute wgmma.*."""
        groups = whole(self._blocks, active, 128)
        match instruction.modifiers[0]:
            case "mma_async":
                self._begin(instruction, groups)
            case "commit_group":
                self._closed[groups] += 1
            case "wait_group":
                self._finish(groups, int(instruction.operands[0], 0))
            case "fence":
                pass
            case _:
                raise self._blocks.unknown(instruction)

    def _begin(self, instruction: PtxInstruction, groups: np.ndarray) -> None:
        """Begin a product of these warpgroups and read its operands in registers."""
        blocks = self._blocks
        *_, shape, to, kind, other = instruction.modifiers
        sums, left, right, kept, *signs = instruction.operands
        if to != "f32" or kind != other or signs[:2] != ["1", "1"]:
            raise blocks.unknown(instruction)
        columns, depth = map(int, shape.removeprefix("m64n").split("k"))
        flips = [text != "0" for text in signs[2:]]
        a: Any = _SharedOperand(blocks, left, 64, depth, kind, any(flips[:-1])) if isinstance(left, str) else None
        if a is None:
            registers = [blocks.by_warp(x, _U32).reshape(-1, 4, 32) for x in left]
            a = tensor_cores.left_tile(registers, kind, depth)  # [groups, 4, 16, depth]
        b = _SharedOperand(blocks, right, columns, depth, kind, any(flips[-1:]))
        added = blocks.values(kept, _BOOL)
        read = left if isinstance(left, tuple) else ()
        for name in sums:  # a product may continue another's sum, but not write an operand
            if np.any(self._read.get(name, False) & np.repeat(groups, 128)):
                raise AccessError(f"accumulates in {name}, which a pending product still reads")
        self._pending.append((groups, self._closed.copy(), read, sums, a, b, added))
        self._hold(groups, read, sums)

    def _finish(self, groups: np.ndarray, left: int) -> None:
        """Complete all but the last `left` committed groups of these warpgroups."""
        pending, self._pending, self._read = self._pending, [], {}
        self._blocks.in_use.clear()
        for wanted, closed, read, sums, *operands in pending:
            now = groups & wanted & (closed < self._closed - left)
            if now.any():
                self._multiply(now, sums, *operands)
            if np.any(wanted & ~now):
                self._pending.append((wanted & ~now, closed, read, sums, *operands))
        for wanted, _, read, sums, *_ in self._pending:
            self._hold(wanted, read, sums)

    def _hold(self, groups: np.ndarray, read: tuple[str, ...], sums: tuple[str, ...]) -> None:
        threads = np.repeat(groups, 128)
        for held, names in ((self._read, read), (self._blocks.in_use, (*read, *sums))):
            for name in names:
                held[name] = held.get(name, False) | threads

    def _multiply(self, groups: np.ndarray, sums: tuple, a: Any, b: "_SharedOperand", added: np.ndarray) -> None:
        blocks = self._blocks
        left = a.read(groups).reshape(-1, 4, 16, b.depth) if isinstance(a, _SharedOperand) else a[groups]
        right = np.swapaxes(b.read(groups), -1, -2)[:, None]
        threads = np.repeat(groups, 128)
        with np.errstate(all="ignore"):
            products = tensor_cores.sums(tensor_cores.multiply_tiles(left, right), b.outer)
            for name, product in zip(sums, products, strict=True):
                total = np.zeros(blocks.count, np.float32)
                total[threads] = product.reshape(-1)
                before = blocks.value(name, np.dtype(np.float32))
                blocks.write(name, np.where(added, before + total, total), threads)

    def end(self) -> None:
        """Raise AccessError if a product is pending once all threads ended."""
        if self._pending:
            raise AccessError("the last thread exits before a product completes")


class _SharedOperand:
    """An operand of wgmma in shared memory, [outer, depth] for each warpgroup."""

    def __init__(self, blocks: ThreadBlocks, description: Operand, outer: int, depth: int, kind: str, transposed: bool):
        described = blocks.values(description, _U64).reshape(-1, 128)
        if np.any(described != described[:, :1]):
            raise AccessError("threads of a warpgroup give different matrix descriptors")
        self._blocks, self._descriptions = blocks, described[:, 0]
        self.outer, self.depth, self._kind, self._transposed = outer, depth, kind, transposed

    def read(self, groups: np.ndarray) -> np.ndarray:
        """Return the operand of these warpgroups: [groups, outer, depth] in float32."""
        size = DTYPES[self._kind].itemsize
        places = tensor_cores.places_of_matrix(
            self._descriptions[groups], self.outer, self.depth, size, self._transposed
        )
        local = np.broadcast_to(self._blocks.local.reshape(-1, 128)[groups][:, :1, None], places.shape)
        words = self._blocks.shared.load(places.reshape(-1), size, 1, local.reshape(-1))[0].reshape(places.shape)
        return tensor_cores.numbers(words, self._kind)
