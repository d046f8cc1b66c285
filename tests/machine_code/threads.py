"""Instructions of single threads: arithmetic, moves, memory accesses, counters and jumps."""

from collections.abc import Callable

import numpy as np
from machine_code.arithmetic import FUNCTIONS, dtype_of, knows
from machine_code.blocks import ThreadBlocks
from machine_code.ptx import PtxInstruction

_ALL_BLOCKS = ("gpu", "sys")  # scopes


def _compute(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    """Execute one of FUNCTIONS."""
    modifiers = instruction.modifiers
    target, *operands = instruction.operands
    types = [dtype_of(modifiers)] * len(operands)
    if instruction.opcode in ("add", "sub", "fma") and modifiers[-2:] in (("f32", "bf16"), ("f32", "f16")):
        modifiers = modifiers[:-1]  # narrow operands are widened to float32, which the last already is
        types[-1] = dtype_of(modifiers)
    if not knows(instruction.opcode, modifiers):
        raise blocks.unknown(instruction)
    dtype = dtype_of(modifiers)
    match instruction.opcode:
        case "selp" | "setp" if len(operands) > 2:
            types[2] = np.dtype(bool)
        case "shl" | "shr" | "shf":
            types[-1] = np.dtype(np.uint32)
        case "bfe":
            types[1:] = [np.dtype(np.uint32)] * 2
        case "mad" if "wide" in modifiers:
            types[2] = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    values = [blocks.value(x, each) for x, each in zip(operands, types, strict=True)]
    if modifiers != instruction.modifiers:
        values = [x.astype(dtype) for x in values]
    with np.errstate(all="ignore"):
        blocks.write(target, FUNCTIONS[instruction.opcode](modifiers, *values), active)


def _cvta(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    """Copy an address: all state spaces are parts of one here."""
    blocks.write(instruction.operands[0], blocks.value(instruction.operands[1], np.dtype(np.uint64)), active)


def _mov(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    """Move a value; also pack a register from parts, or unpack it."""
    target, source = instruction.operands
    dtype = dtype_of(instruction.modifiers)
    if isinstance(source, tuple):
        part = np.dtype(f"u{dtype.itemsize // len(source)}")
        packed = np.stack([blocks.values(x, part) for x in source], axis=1).view(f"u{dtype.itemsize}")[:, 0]
        blocks.write(target, packed, active)
    elif isinstance(target, tuple):
        whole = np.ascontiguousarray(blocks.values(source, dtype)).reshape(-1, 1)
        parts = whole.view(f"u{dtype.itemsize // len(target)}")
        for i, name in enumerate(target):
            blocks.write(name, parts[:, i], active)
    else:
        blocks.write(target, blocks.value(source, dtype), active)


def _ld(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    target, place = instruction.operands
    if instruction.modifiers[0].startswith("param"):
        if place.offset or dtype_of(instruction.modifiers).itemsize != 8:
            raise blocks.unknown(instruction)
        blocks.write(target, blocks.value(place.base, np.dtype(np.uint64)), active)
    elif instruction.modifiers[0] == "relaxed" and instruction.modifiers[1] in _ALL_BLOCKS:
        counted = blocks.ask_for_counter(blocks.chosen(active), blocks.addresses(place), instruction)
        blocks.write(target, counted, active)
    else:
        targets = target if isinstance(target, tuple) else (target,)
        blocks.load(instruction.modifiers, targets, blocks.addresses(place), active)


def _st(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    place, source = instruction.operands
    sources = source if isinstance(source, tuple) else (source,)
    blocks.store(instruction.modifiers, sources, blocks.addresses(place), active)


def _red(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    if instruction.modifiers not in (("release", scope, "global", "add", "u32") for scope in _ALL_BLOCKS):
        raise blocks.unknown(instruction)
    place, value = instruction.operands
    blocks.count_up(blocks.chosen(active), blocks.addresses(place), blocks.values(value, np.dtype(np.uint32)))


def _fence(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    if instruction.modifiers[0] in ("acquire", "acq_rel", "sc") and instruction.modifiers[1] in _ALL_BLOCKS:
        blocks.acquire(blocks.chosen(active))


def _bra(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    blocks.go(active, instruction.operands[0])


def _ret(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    blocks.go(active, None)


def _nothing(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    """Do nothing: the instruction orders or speeds up what is in order here."""


THREAD_INSTRUCTIONS: dict[str, Callable[[ThreadBlocks, PtxInstruction, np.ndarray | None], None]] = {
    **dict.fromkeys(FUNCTIONS, _compute),
    "cvta": _cvta,
    "mov": _mov,
    "ld": _ld,
    "st": _st,
    "red": _red,
    "fence": _fence,
    "bra": _bra,
    "ret": _ret,
    "exit": _ret,
    **dict.fromkeys(("membar", "griddepcontrol", "prefetch", "setmaxnreg"), _nothing),
}
