"""Blocks of threads that run a kernel: registers, control, and the memory that instructions of single threads reach.

Instructions of whole warps are in `warps`, those that somebody waits for in `waiting`, Blackwell's products in
`tensor_memory`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from machine_code.arithmetic import BITS, FUNCTIONS, dtype_of, knows, number
from machine_code.memory import FIRST_ARRAY, AccessError, Arrays, Shared
from machine_code.ptx import Address, Instruction, Kernel, Operand
from machine_code.tensor_memory import TENSOR_MEMORY, TensorMemory
from machine_code.waiting import WAITING, Copies, Phases, TensorMap
from machine_code.warps import WARPS, Products

_AT_ONCE = 2**13  # threads
_TURN = 128  # those that go on together
_LARGEST_SHARED = 232_448  # bytes that a block may have, of any chip
_PARAMETERS = 60  # bits of the address where those lie that are no numbers
_AWAKE = -1  # what a thread waits for: nothing, a barrier of this number, or
_PHASE = -2  # a phase of any mbarrier
_COUNTER = -3  # a counter of any block
_ALL_BLOCKS = ("gpu", "sys")  # scopes


class EmulationError(RuntimeError):
    """A kernel that no chip could run, or that would give different results from run to run."""


def run(
    kernel: Kernel,
    grid: Sequence[int],
    operands: Sequence[Any],
    results: Sequence[Any],
    parameters: Sequence[int | Mapping[int, TensorMap]] | None = None,
    late: bool = True,
    counters: int = 0,
) -> list[np.ndarray]:
    """Run a kernel of PTX.

    Args:
      grid: how many blocks along x, y and z.
      operands, results: arrays, of results their shapes and dtypes alone.
      parameters: of each of the kernel's the array that it points to, counted over operands and then results, or
        tensor maps by their offsets; None where they are the arrays in this order, any others null.
      late: whether copies come as late as they may, and the first warpgroup of each block goes on until it waits; else
        copies come at once, and the last goes first. Right kernels do not care.
      counters: how many of the last operands are some, by which blocks tell one another what they have done. Unless
        `late`, such blocks run one after another: none may wait for one that begins behind it.

    Returns the results.

    Raises EmulationError where it reaches outside of an array, where a block reads or writes what another has written
    and has not told it, where memory is not aligned, and where threads wait for one another for ever;
    NotImplementedError for what nothing here knows.
    """
    empty = [np.empty(x.shape, x.dtype) for x in results]
    arrays = Arrays([*map(np.asarray, operands), *empty], len(empty), counters)
    if parameters is None:
        parameters = range(len(operands) + len(empty))
    count, threads = int(np.prod(grid)), int(np.prod(kernel.threads))
    at_once = 1 if counters and not late else max(1, _AT_ONCE // threads)
    for first in range(0, count, at_once):
        some = np.arange(first, min(first + at_once, count))
        try:
            Blocks(kernel, grid, some, arrays, parameters, late).run()
        except AccessError as error:
            raise EmulationError(f"{kernel.name}: {error}") from None
    return arrays.results()


class Blocks:
    """Some blocks of a grid.

    Values are arrays of one number for each of their threads, or single numbers; `active` is which threads an
    instruction is for, None where all.

    Attributes:
      count: of threads, `per_block` of each block.
      blocks: of each thread its block in the grid, `held` among those here.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        blocks: np.ndarray,
        arrays: Arrays,
        parameters: Sequence[int | Mapping[int, TensorMap]],
        late: bool,
    ):
        self.kernel, self.arrays = kernel, arrays
        self.shared = Shared(len(blocks), _LARGEST_SHARED if kernel.shared_grows else kernel.shared_size)
        self.per_block = int(np.prod(kernel.threads))
        if self.per_block % 32:
            raise NotImplementedError(f"{kernel.name}: blocks of {self.per_block} threads, no whole warps")
        self.count = len(blocks) * self.per_block
        self.held = np.repeat(np.arange(len(blocks)), self.per_block)
        self.blocks = np.repeat(blocks, self.per_block).astype(np.int32)
        self.copies, self.phases, self.products = Copies(self.count, late), Phases(), Products(self.count)
        self.tensor_memory = TensorMemory(len(blocks), self.count, late)
        self._registers: dict[str, np.ndarray] = {}
        self._known = _places(kernel, grid, blocks) | {
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
        self._at = np.zeros(self.count, np.int32)  # which basic block is next
        self._waits = np.full(self.count, _AWAKE, np.int32)
        self._expected = np.zeros(self.count, np.int32)  # at the barrier that each waits at; 0 is all
        self._asked = np.zeros(self.count, bool)  # whether a phase had ended, in vain
        # Which counter each asked last, by which instruction, and what it was at.
        self._counter = np.zeros(self.count, np.uint64)
        self._asker = np.zeros(self.count, np.int64)
        self._counted = np.zeros(self.count, np.uint32)
        self._waited_at: dict[int, str] = {}  # by what was waited for, the last that did
        turns = np.arange(self.per_block) // _TURN
        self._turns = np.tile(turns if late else turns[::-1], len(blocks))

    def run(self) -> None:
        """To the end of all threads. Of those that wait for nothing one warpgroup of each block goes on, and of it the
        threads that are furthest behind."""
        end = len(self.kernel.blocks)
        while True:
            awake = (self._waits == _AWAKE) & (self._at < end)
            if awake.any():
                ready = np.where(awake & (self._turns == self._turns[awake].min()), self._at, end)
                here = int(ready.min())
                self._run_block(here, ready == here)
            elif not self._stuck():
                return

    def _stuck(self) -> bool:
        """Whether somebody waits, now that everybody does who is not at the end: for a copy, which comes then."""
        waiting = self._waits != _AWAKE
        if not waiting.any():
            self.copies.end(self)
            self.products.end()
            self.tensor_memory.end()
            return False
        if not (self.copies.arrive(self) | self.tensor_memory.arrive(self)):
            counts = np.repeat((self._waits == _COUNTER).reshape(-1, 32).any(axis=1), 32)
            self._require_whole_warps((self._waits >= 0) & ~counts)
            where = "; ".join(self._waited_at[int(i)] for i in np.unique(self._waits[waiting]))
            raise EmulationError(f"{self.kernel.name}: {waiting.sum()} threads wait for ever: {where}")
        return True

    def _run_block(self, here: int, active: np.ndarray) -> None:
        self._at[active] = here + 1
        everybody = None if active.all() else active
        for instruction in self.kernel.blocks[here]:
            try:
                self._step(instruction, everybody)
            except AccessError as error:
                raise AccessError(f"{instruction.text}: {error}") from None
            except (KeyError, IndexError, ValueError, TypeError, StopIteration) as error:
                raise self.unknown(instruction) from error

    def _step(self, instruction: Instruction, active: np.ndarray | None) -> None:
        if instruction.predicate:
            chosen = np.broadcast_to(self.value(instruction.predicate, np.dtype(bool)), self.count)
            chosen = chosen != instruction.negated
            active = chosen if active is None else active & chosen
            if active.all():
                active = None
            elif not active.any():
                return
        if special := _SPECIAL.get(instruction.opcode):
            special(self, instruction, active)
        elif instruction.opcode in FUNCTIONS:
            _compute(self, instruction, active)
        else:
            raise self.unknown(instruction)

    def unknown(self, instruction: Instruction) -> NotImplementedError:
        """What to raise for an instruction."""
        return NotImplementedError(f"{self.kernel.name}: no emulation of {instruction.text}")

    # Registers.

    def width(self, name: str) -> int:
        """Bits of a register."""
        return self.kernel.widths[name.rstrip("0123456789") if name.startswith("%") else name]

    def value(self, operand: Operand, dtype: np.dtype) -> Any:
        """Of an operand: of a register that has more bits the low ones, before those of one that has fewer zeros."""
        if operand in self._registers:
            held = self._registers[operand]
            if held.dtype.itemsize != dtype.itemsize:
                held = held.astype(f"u{dtype.itemsize}")
            return held.view(dtype)
        if operand in self._known:
            return self._known[operand].astype(dtype)
        if operand.lstrip("-")[:1].isdigit():
            return number(operand, dtype)
        self.width(operand)  # is one, where nobody wrote: all bits are set, as floating point NaN
        return (
            np.full(self.count, True)
            if dtype.kind == "b"
            else (~np.zeros(self.count, BITS[8 * dtype.itemsize])).view(dtype)
        )

    def values(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """The same, of each thread."""
        return np.broadcast_to(self.value(operand, dtype), self.count)

    def by_warp(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """The same: [warps, 32]."""
        return self.values(operand, dtype).reshape(-1, 32)

    def write(self, name: str, value: Any, active: np.ndarray | None) -> None:
        """To a register; what is narrower is widened, by its sign where it has one."""
        if name == "_":
            return
        if name in self.products.registers:
            held = self.products.registers[name]
            if np.any(held if active is None else held & active):
                raise AccessError(f"writes {name}, which a product that nobody has waited for still uses")
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
        """Which threads an instruction is for."""
        return np.ones(self.count, bool) if active is None else active

    # Control.

    def go(self, active: np.ndarray | None, label: str | None) -> None:
        """To a label, or to the end."""
        to = len(self.kernel.blocks) if label is None else self.kernel.labels[label]
        self._at[slice(None) if active is None else active] = to
        if label is None:
            for barrier in np.unique(self._waits[self._waits >= 0]):
                self._open(barrier)

    def wait_at(
        self, barrier: np.ndarray, expected: np.ndarray | None, active: np.ndarray | None, instruction: Instruction
    ) -> None:
        """Until so many threads of a block wait at its barrier; None is all that are not at the end."""
        chosen = self.chosen(active)
        self._waits[chosen] = barrier[chosen]
        self._expected[chosen] = 0 if expected is None else expected[chosen]
        for i in np.unique(barrier[chosen]):
            self._waited_at[int(i)] = instruction.text
            self._open(i)

    def _open(self, barrier: int) -> None:
        """A barrier, in the blocks of which all wait there that are expected."""
        by_block = self._waits.reshape(-1, self.per_block)
        here = by_block == barrier
        left = (self._at < len(self.kernel.blocks)).reshape(by_block.shape).sum(axis=1)
        expected = np.where(here, self._expected.reshape(by_block.shape), 0).max(axis=1)
        wanted, waiting = np.where(expected, expected, left), here.sum(axis=1)
        if np.any(waiting > wanted):
            raise AccessError("more threads wait at a barrier than it counts")
        opened = here & (waiting == wanted)[:, None]
        self._require_whole_warps(opened.reshape(-1))
        by_block[opened] = _AWAKE

    def _require_whole_warps(self, waiting: np.ndarray) -> None:
        """That those of a warp who part, as one who waits for a counter, come together again at a barrier."""
        where = np.where(waiting, self._at, -1).reshape(-1, 32)
        if np.any(where != where[:, :1]):
            raise AccessError("a part of a warp waits")

    def ask_for_phase(self, chosen: np.ndarray, ended: np.ndarray, instruction: Instruction) -> None:
        """Threads whose phase of an mbarrier has not ended wait for any of their block to, once they ask again."""
        self._waits[chosen & ~ended & self._asked] = _PHASE
        self._asked[chosen] = ~ended[chosen]
        self._waited_at[_PHASE] = instruction.text

    def wake(self, held: int) -> None:
        """Who waits for a phase in a block."""
        block = slice(held * self.per_block, (held + 1) * self.per_block)
        self._waits[block][self._waits[block] == _PHASE] = _AWAKE
        self._asked[block] = False

    def ask_for_counter(self, chosen: np.ndarray, addresses: np.ndarray, instruction: Instruction) -> np.ndarray:
        """What it is at; where an instruction tells a thread the same again its warp waits for somebody to count."""
        counted = self._counted.copy()
        counted[chosen] = self.arrays.ask(addresses[chosen], self.blocks[chosen])
        again = chosen & (self._counter == addresses) & (self._asker == id(instruction)) & (self._counted == counted)
        self._waits[np.repeat(again.reshape(-1, 32).any(axis=1), 32) & (self._waits == _AWAKE)] = _COUNTER
        self._counter[chosen], self._asker[chosen], self._counted = addresses[chosen], id(instruction), counted
        self._waited_at[_COUNTER] = instruction.text
        return counted

    def count_up(self, chosen: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        """Add to counters, and wake who waits for any."""
        self.arrays.count(addresses[chosen], values[chosen], self.blocks[chosen])
        self._waits[self._waits == _COUNTER] = _AWAKE

    def believe(self, chosen: np.ndarray) -> None:
        """What threads have heard is known to their blocks."""
        self.arrays.believe(self.blocks[chosen])
        self._asker[chosen] = 0

    # Memory.

    def addresses(self, place: Address) -> np.ndarray:
        """Of each thread."""
        base = self.value(place.base, np.dtype(np.uint64))
        return np.broadcast_to(base + np.uint64(place.offset % 2**64), self.count)

    def load(
        self, modifiers: Sequence[str], targets: Sequence[str], addresses: np.ndarray, active: np.ndarray | None
    ) -> None:
        """To registers, one word after another."""
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
        """From registers."""
        dtype = dtype_of(modifiers)
        where = np.arange(self.count) if active is None else np.flatnonzero(active)
        memory, owners = self._memory(modifiers, addresses[where])
        words = np.stack([self.values(x, dtype)[where] for x in sources])
        memory.store(addresses[where], words.view(f"u{dtype.itemsize}"), owners[where])

    def _memory(self, modifiers: Sequence[str], addresses: np.ndarray) -> tuple[Arrays | Shared, np.ndarray]:
        """Where an instruction reaches, by its name or else by where it does, and whose it is there."""
        if {"local", "const"} & set(modifiers):
            raise NotImplementedError(f"{self.kernel.name}: .{modifiers[0]} memory")
        here = any(name.startswith("shared") for name in modifiers)
        here |= "global" not in modifiers and bool(addresses[0] < FIRST_ARRAY)
        return (self.shared, self.held) if here else (self.arrays, self.blocks)


def _compute(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    """One of the functions of a thread's own numbers."""
    modifiers = instruction.modifiers
    target, *operands = instruction.operands
    types = [dtype_of(modifiers)] * len(operands)
    if instruction.opcode in ("add", "sub", "fma") and modifiers[-2:] in (("f32", "bf16"), ("f32", "f16")):
        modifiers = modifiers[:-1]  # of what is narrow is made float32, and the last is
        types[-1] = dtype_of(modifiers)
    if not knows(instruction.opcode, modifiers):
        raise m.unknown(instruction)
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
    values = [m.value(x, each) for x, each in zip(operands, types, strict=True)]
    if modifiers != instruction.modifiers:
        values = [x.astype(dtype) for x in values]
    with np.errstate(all="ignore"):
        m.write(target, FUNCTIONS[instruction.opcode](modifiers, *values), active)


def _cvta(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    """All spaces are parts of one."""
    m.write(instruction.operands[0], m.value(instruction.operands[1], np.dtype(np.uint64)), active)


def _mov(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    """Also between one register and its parts."""
    target, source = instruction.operands
    dtype = dtype_of(instruction.modifiers)
    if isinstance(source, tuple):
        part = np.dtype(f"u{dtype.itemsize // len(source)}")
        m.write(target, np.stack([m.values(x, part) for x in source], axis=1).view(f"u{dtype.itemsize}")[:, 0], active)
    elif isinstance(target, tuple):
        parts = np.ascontiguousarray(m.values(source, dtype)).reshape(-1, 1).view(f"u{dtype.itemsize // len(target)}")
        for i, name in enumerate(target):
            m.write(name, parts[:, i], active)
    else:
        m.write(target, m.value(source, dtype), active)


def _ld(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    target, place = instruction.operands
    if instruction.modifiers[0].startswith("param"):
        if place.offset or dtype_of(instruction.modifiers).itemsize != 8:
            raise m.unknown(instruction)
        m.write(target, m.value(place.base, np.dtype(np.uint64)), active)
    elif instruction.modifiers[0] == "relaxed" and instruction.modifiers[1] in _ALL_BLOCKS:
        m.write(target, m.ask_for_counter(m.chosen(active), m.addresses(place), instruction), active)
    else:
        targets = target if isinstance(target, tuple) else (target,)
        m.load(instruction.modifiers, targets, m.addresses(place), active)


def _st(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    place, source = instruction.operands
    sources = source if isinstance(source, tuple) else (source,)
    m.store(instruction.modifiers, sources, m.addresses(place), active)


def _red(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    if instruction.modifiers not in (("release", scope, "global", "add", "u32") for scope in _ALL_BLOCKS):
        raise m.unknown(instruction)
    place, value = instruction.operands
    m.count_up(m.chosen(active), m.addresses(place), m.values(value, np.dtype(np.uint32)))


def _fence(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    if instruction.modifiers[0] in ("acquire", "acq_rel", "sc") and instruction.modifiers[1] in _ALL_BLOCKS:
        m.believe(m.chosen(active))


def _bra(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    m.go(active, instruction.operands[0])


def _ret(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    m.go(active, None)


def _nothing(m: Blocks, instruction: Instruction, active: np.ndarray | None) -> None:
    """What orders or speeds up what is in order here."""


_SPECIAL: dict[str, Callable[..., None]] = {
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
    **WARPS,
    **WAITING,
    **TENSOR_MEMORY,
}


def _places(kernel: Kernel, grid: Sequence[int], blocks: np.ndarray) -> dict[str, np.ndarray]:
    """The registers that say where each thread is."""
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
