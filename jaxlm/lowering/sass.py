"""NVIDIA's machine code, disassembled: in which loop a kernel spends its time, and what a warp asks of an SM there."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs.hardware.chips import Chip

_KERNEL = re.compile(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;|^\s*(\.L_\w+):", re.MULTILINE)
_JUMP = re.compile(r"BRA\b.*`\((\.L_\w+)\)")
# A loop without one of these only waits.
_WORK = re.compile(r"F[A-Z]|H[A-Z]|MUFU|LDG|STG")
_WARPGROUP_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x(\d+)\.")
_WARP_PRODUCT = re.compile(r"HMMA\.16(8)(8|16)\.")
_OF_DEVICE = re.compile(r"(?:LDG|STG|LDGSTS)\.")
_BITS = re.compile(r"\.[US]?(8|16|64|128)\b")
_ROWS = 16  # of a product, that one warp makes

_QUARTERS = 4  # of an SM
# Of a quarter, a cycle: the lanes that make exponentials and their kin (CUDA C++ Programming Guide, throughput of
# arithmetic instructions), and by compute capability multiply-adds of matrices in numbers of 16 bits (NVIDIA's papers
# on the A100 and H100 architectures).
_SPECIAL_LANES = 4
_MULTIPLY_ADDS = {"8.0": 256, "9.0": 512}


class Hot(NamedTuple):
    """What one warp does once around a kernel's innermost loop: of several the one that multiplies most, or else has
    the most instructions; of a kernel without loops in all.

    Attributes:
      instructions: so many cycles its quarter of an SM issues for it.
      special: of them exponentials, roots and their kin.
      multiply_adds: of matrices in numbers of 16 bits; those of tf32, which take twice as long, count twice. Those of
        Blackwell's tcgen05 are not known: its instructions do not name their shapes.
      bytes: that its instructions read of device memory and write to it; not those of the copy engine.
    """

    instructions: int
    special: int
    multiply_adds: int
    bytes: int


def knows(chip: Chip) -> bool:
    """Whether `cycles` is known of a chip: of Blackwell's products machine code does not say how large they are."""
    return chip.compute_capability in _MULTIPLY_ADDS


def cycles(chip: Chip, hot: Hot) -> dict[str, float]:
    """How long a warp keeps each unit of its quarter of an SM busy: ISSUE (one instruction a cycle), SPECIAL
    (exponentials), TENSOR (products of matrices), and where there are none MEMORY (its share of the bandwidth at the
    highest clock): products find most of what they read in caches."""
    asked = {"ISSUE": hot.instructions, "SPECIAL": hot.special * 32 / _SPECIAL_LANES}
    if hot.multiply_adds:
        return asked | {"TENSOR": hot.multiply_adds / _MULTIPLY_ADDS[chip.compute_capability]}
    bytes_per_cycle = chip.memory_bytes_per_s / (chip.on_chip.clock_hz * chip.on_chip.cores * _QUARTERS)
    return asked | {"MEMORY": hot.bytes / bytes_per_cycle}


def hottest(listing: str) -> dict[str, Hot]:
    """Of each kernel in what `nvdisasm -c` writes, by name."""
    return {name: _hottest(code) for name, code in _KERNEL.findall(listing)}


def _hottest(code: str) -> Hot:
    instructions: list[str] = []
    places: dict[str, int] = {}
    for instruction, label in _LINE.findall(code):
        if label:
            places[label] = len(instructions)
        elif not instruction.startswith("NOP"):
            instructions.append(instruction)
    loops = list(_loops(instructions, places))
    inner = [one for one in loops if not any(one != other and _within(other, one) for other in loops)]
    if not inner:
        return _asks(instructions)
    return max((_asks(instructions[first : last + 1]) for first, last in inner), key=_weight)


def _weight(hot: Hot) -> tuple[int, int]:
    """Of two loops that multiply alike one has a mask, for the few blocks that need it."""
    return hot.multiply_adds, -hot.instructions if hot.multiply_adds else hot.instructions


def _loops(instructions: list[str], places: dict[str, int]) -> Iterator[tuple[int, int]]:
    """First and last instructions of those that do something; where waiting is out of line, behind everything, it jumps
    back, too."""
    for last, instruction in enumerate(instructions):
        found = _JUMP.match(instruction)
        if found and places[found[1]] <= last:
            loop = instructions[places[found[1]] : last + 1]
            if any(map(_WORK.match, loop)) and not any(each.startswith("NANOSLEEP") for each in loop):
                yield places[found[1]], last


def _within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


def _asks(instructions: list[str]) -> Hot:
    special = sum(instruction.startswith("MUFU") for instruction in instructions)
    return Hot(len(instructions), special, sum(map(_multiply_adds, instructions)), sum(map(_bytes, instructions)))


def _multiply_adds(instruction: str) -> int:
    found = _WARPGROUP_PRODUCT.match(instruction) or _WARP_PRODUCT.match(instruction)
    return _ROWS * int(found[1]) * int(found[2]) * (2 if "TF32" in instruction else 1) if found else 0


def _bytes(instruction: str) -> int:
    if not _OF_DEVICE.match(instruction):
        return 0
    bits = _BITS.search(instruction.split()[0])
    return 32 * (int(bits[1]) if bits else 32) // 8
