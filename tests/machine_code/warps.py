"""Instructions of whole warps."""

from collections.abc import Callable

import numpy as np
from machine_code import tensor_cores
from machine_code.blocks import ThreadBlocks
from machine_code.memory import AccessError
from machine_code.ptx import Address, PtxInstruction

_U32, _BOOL = np.dtype(np.uint32), np.dtype(bool)


def whole(blocks: ThreadBlocks, active: np.ndarray | None, size: int = 32) -> np.ndarray:
    """Return the mask of the warps, or groups of `size` threads, that take part.

    Raises AccessError where only some threads of one do.
    """
    if blocks.per_block % size:
        raise AccessError(f"blocks of {blocks.per_block} threads are not whole groups of {size}")
    if active is None:
        return np.ones(blocks.count // size, bool)
    groups = active.reshape(-1, size)
    if np.any(groups.any(axis=1) != groups.all(axis=1)):
        raise AccessError(f"only a part of {size} threads executes an instruction that needs all of them")
    return groups[:, 0]


def _require_all(blocks: ThreadBlocks, instruction: PtxInstruction, members: str) -> None:
    """Raise NotImplementedError unless a mask is of all threads of a warp."""
    if np.any(blocks.value(members, _U32) != np.uint32(2**32 - 1)):
        raise blocks.unknown(instruction)


def _elect(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    """Elect the first thread of each warp."""
    whole(blocks, active)
    lane, chosen, members = instruction.operands
    _require_all(blocks, instruction, members)
    blocks.write(lane, np.uint32(0), active)
    blocks.write(chosen, np.arange(blocks.count) % 32 == 0, active)


def _shfl(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    whole(blocks, active)
    target, *rest = instruction.operands
    inside = [rest.pop(0)] if len(rest) > 4 else []
    *rest, members = rest
    _require_all(blocks, instruction, members)
    values, operand, clamp = (blocks.by_warp(x, _U32) for x in rest)
    result, found = tensor_cores.shuffle(instruction.modifiers[1], values, operand, clamp)
    blocks.write(target, result.reshape(-1), active)
    for name in inside:
        blocks.write(name, found.reshape(-1), active)


def _vote(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    whole(blocks, active)
    target, source, members = instruction.operands
    _require_all(blocks, instruction, members)
    if "ballot" not in instruction.modifiers or source.startswith("!"):
        raise blocks.unknown(instruction)
    blocks.write(target, np.repeat(tensor_cores.flags(blocks.by_warp(source, _BOOL)), 32), active)


def _redux(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    whole(blocks, active)
    target, source, members = instruction.operands
    _require_all(blocks, instruction, members)
    match instruction.modifiers:
        case ("sync", "max" | "min" as operation, *propagates, "f32") if propagates in ([], ["NaN"]):
            reduce, dtype = getattr(np, operation + "imum" if propagates else "f" + operation), np.dtype(np.float32)
        case ("sync", "max" | "min" as operation, "s32"):
            reduce, dtype = getattr(np, operation + "imum"), np.dtype(np.int32)
        case _:
            raise blocks.unknown(instruction)
    reduced = reduce.reduce(blocks.by_warp(source, dtype), axis=1)
    blocks.write(target, np.repeat(reduced, 32), active)


def _ldmatrix(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    warps = whole(blocks, active)
    targets, place = instruction.operands
    addresses, local = _rows(blocks, place, len(targets), warps)
    rows = blocks.shared.load(addresses, 2, 8, local).T.reshape(-1, len(targets), 8, 8)
    found = tensor_cores.matrices_of_rows(rows, "trans" in instruction.modifiers)
    for i, name in enumerate(targets):
        values = np.zeros((blocks.count // 32, 32), np.uint32)
        values[warps] = found[:, i]
        blocks.write(name, values.reshape(-1), active)


def _stmatrix(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    warps = whole(blocks, active)
    place, sources = instruction.operands
    rows = tensor_cores.rows_of_matrices(np.stack([blocks.by_warp(x, _U32)[warps] for x in sources], axis=1))
    if "trans" in instruction.modifiers:
        rows = np.swapaxes(rows, -1, -2)
    addresses, local = _rows(blocks, place, len(sources), warps)
    blocks.shared.store(addresses, np.ascontiguousarray(rows.reshape(-1, 8).T), local)


def _rows(blocks: ThreadBlocks, place: Address, count: int, warps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses of the eight rows of each warp's matrices, one from each thread, and their blocks."""
    addresses = blocks.addresses(place).reshape(-1, 32)[warps][:, : 8 * count]
    local = np.broadcast_to(blocks.local.reshape(-1, 32)[warps][:, :1], addresses.shape)
    return addresses.reshape(-1), local.reshape(-1)


def _mma(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    whole(blocks, active)
    targets, *sources = instruction.operands
    operands = [[blocks.by_warp(x, _U32) for x in registers] for registers in sources]
    with np.errstate(all="ignore"):
        results = tensor_cores.multiply(instruction.modifiers, *operands)
    for name, values in zip(targets, results, strict=True):
        blocks.write(name, values.reshape(-1), active)


WARP_INSTRUCTIONS: dict[str, Callable[[ThreadBlocks, PtxInstruction, np.ndarray | None], None]] = {
    "elect": _elect,
    "shfl": _shfl,
    "vote": _vote,
    "redux": _redux,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
}
