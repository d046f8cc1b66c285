"""The interpreter: runs a kernel of PTX on arrays, and refuses what no chip could run or whose results would vary."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from machine_code.barriers import BARRIER_INSTRUCTIONS, Mbarriers
from machine_code.blocks import ThreadBlocks
from machine_code.copies import Copies
from machine_code.memory import AccessError, DeviceMemory
from machine_code.ptx import PtxInstruction, PtxKernel
from machine_code.tensor_maps import TensorMap
from machine_code.tensor_memory import TensorMemory
from machine_code.threads import THREAD_INSTRUCTIONS
from machine_code.warpgroups import WarpgroupProducts
from machine_code.warps import WARP_INSTRUCTIONS

_AT_ONCE = 2**13  # threads emulated together


class EmulationError(RuntimeError):
    """A kernel that no chip could run, or whose results would differ from run to run."""


def run(
    kernel: PtxKernel,
    grid: Sequence[int],
    operands: Sequence[Any],
    results: Sequence[Any],
    parameters: Sequence[int | Mapping[int, TensorMap]] | None = None,
    late: bool = True,
    counters: int = 0,
    sums: Mapping[int, int] = MappingProxyType({}),
) -> list[np.ndarray]:
    """Run a kernel of PTX and return its results.

    Args:
      grid: number of blocks along x, y and z.
      operands, results: arrays; only shapes and dtypes of the results are used.
      parameters: for each parameter of the kernel the index of the array it points to, counted over operands and then
        results, or tensor maps by their offsets; None where the parameters are the arrays in this order, and any
        others null.
      late: whether copies arrive as late as they may, and the first warpgroup of each block runs until it waits; else
        copies arrive at once and the last warpgroup runs first. A correct kernel gives the same results either way.
      counters: how many of the last operands are counters, by which blocks signal to one another. Unless `late`, the
        blocks of such a kernel run one after another: none may wait for one that starts later.
      sums: results to which blocks may add in any order, by index, with the index of the operand whose values each
        starts with; see `DeviceMemory`.

    Raises EmulationError where an access leaves an array, where a block reads or writes what another wrote without
    synchronization, where memory is not aligned, and on deadlock; NotImplementedError for what is not emulated.
    """
    empty = [np.empty(x.shape, x.dtype) for x in results]
    arrays = DeviceMemory([*map(np.asarray, operands), *empty], len(empty), counters, sums)
    if parameters is None:
        parameters = range(len(operands) + len(empty))
    count, threads = int(np.prod(grid)), int(np.prod(kernel.threads))
    at_once = 1 if counters and not late else max(1, _AT_ONCE // threads)
    for first in range(0, count, at_once):
        some = np.arange(first, min(first + at_once, count))
        try:
            _Interpreter(ThreadBlocks(kernel, grid, some, arrays, parameters, late), late).run()
        except AccessError as error:
            raise EmulationError(f"{kernel.name}: {error}") from None
    return arrays.results()


class _Interpreter:
    """Thread blocks with the units that work for them asynchronously."""

    def __init__(self, blocks: ThreadBlocks, late: bool):
        self._blocks = blocks
        mbarriers = Mbarriers(blocks)
        self._copies = Copies(blocks, mbarriers, late)
        self._products = WarpgroupProducts(blocks)
        self._tensor_memory = TensorMemory(blocks, mbarriers, late)
        simple = THREAD_INSTRUCTIONS | WARP_INSTRUCTIONS | BARRIER_INSTRUCTIONS
        # By opcode: called with the instruction and the mask of active threads.
        self._instructions: dict[str, Callable[[PtxInstruction, np.ndarray | None], None]] = {
            **{opcode: functools.partial(execute, blocks) for opcode, execute in simple.items()},
            "mbarrier": mbarriers.mbarrier,
            "cp": self._copies.cp,
            "wgmma": self._products.wgmma,
            "tcgen05": self._tensor_memory.tcgen05,
        }

    def run(self) -> None:
        """Run until all threads end."""
        while True:
            if step := self._blocks.advance():
                self._run_block(*step)
            elif not self._blocks.waiting():
                break
            elif not (self._copies.arrive() | self._tensor_memory.arrive()):
                raise self._blocks.deadlock()
        self._copies.end()
        self._products.end()
        self._tensor_memory.end()

    def _run_block(self, here: int, active: np.ndarray) -> None:
        everybody = None if active.all() else active
        for instruction in self._blocks.kernel.blocks[here]:
            try:
                self._step(instruction, everybody)
            except AccessError as error:
                raise AccessError(f"{instruction.text}: {error}") from None
            except (KeyError, IndexError, ValueError, TypeError, StopIteration) as error:
                raise self._blocks.unknown(instruction) from error

    def _step(self, instruction: PtxInstruction, active: np.ndarray | None) -> None:
        if instruction.predicate:
            chosen = self._blocks.values(instruction.predicate, np.dtype(bool)) != instruction.negated
            active = chosen if active is None else active & chosen
            if active.all():
                active = None
            elif not active.any():
                return
        self._instructions[instruction.opcode](instruction, active)
