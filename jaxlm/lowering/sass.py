"""NVIDIA's machine code, disassembled: in which loop a kernel spends its time, and what a warp asks of an SM there."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs.hardware.chips import Chip

_KERNEL = re.compile(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;|^\s*(\.L_\w+):", re.MULTILINE)
_JUMP = re.compile(r"BRA\b.*`\((\.L_\w+)\)")
# A loop without one of these only waits.
_WORK = re.compile(r"F(?!ENCE)[A-Z]|H[A-Z]|MUFU|LDG|STG")
_SPECIAL = re.compile(r"MUFU\b")
_FLOAT32 = re.compile(r"F(ADD|MUL|FMA)\b")
_INTEGER = re.compile(r"(FMNMX|FSEL|FSETP|IADD3|VIADD|LOP3|ISETP|SEL|SHF|PRMT|LEA|I?MNMX)\b")
_WARPGROUP_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x(\d+)\.")
_WARP_PRODUCT = re.compile(r"HMMA\.16(8)(4|8|16)\.")
_OF_DEVICE = re.compile(r"(?:LDG|STG|LDGSTS)\.")
_BITS = re.compile(r"\.[US]?(8|16|64|128)\b")
_ROWS = 16  # of a product, that one warp makes

_QUARTERS = 4  # of an SM
# Of a quarter, a cycle: lanes by compute capability that make float32, and those of all that make exponentials and
# their kin, or compare, choose, shift and add integers (CUDA C++ Programming Guide, throughput of arithmetic
# instructions).
_FLOAT32_LANES = {"8.0": 16, "9.0": 32}
_SPECIAL_LANES, _INTEGER_LANES = 4, 16
# Likewise multiply-adds of matrices in numbers of 16 bits (NVIDIA's papers on the A100 and H100 architectures).
_MULTIPLY_ADDS = {"8.0": 256, "9.0": 512}
_WARP = 32


class Hot(NamedTuple):
    """What one warp does once around a kernel's innermost loop: of several the one that multiplies most, or else has
    the most instructions; of a kernel without loops in all.

    Attributes:
      instructions: so many cycles its quarter of an SM issues for it.
      special: of them exponentials, roots and their kin.
      float32: sums, products and both.
      integer: what compares, chooses, shifts and adds integers; moves and conversions are none of these.
      multiply_adds: of matrices in numbers of 16 bits; those of tf32, which take twice as long, count twice. Those of
        Blackwell's tcgen05 are not known: its instructions do not name their shapes.
      bytes: that its instructions read of device memory and write to it; not those of the copy engine.
    """

    instructions: int
    special: int
    float32: int
    integer: int
    multiply_adds: int
    bytes: int


def knows(chip: Chip) -> bool:
    """Whether `cycles` is known of a chip: of Blackwell's products machine code does not say how large they are."""
    return chip.compute_capability in _MULTIPLY_ADDS


def cycles(chip: Chip, hot: Hot, cached: bool = False) -> dict[str, float]:
    """How long a warp keeps each unit of its quarter of an SM busy: ISSUE (one instruction a cycle), SPECIAL
    (exponentials), FLOAT32 and INTEGER (arithmetic), and of what it has any TENSOR (products of matrices) and, unless
    what it reads is `cached`, MEMORY (its share of the bandwidth at the highest clock). KeyError unless it `knows`."""
    asked = {
        "ISSUE": hot.instructions,
        "SPECIAL": hot.special * _WARP / _SPECIAL_LANES,
        "FLOAT32": hot.float32 * _WARP / _FLOAT32_LANES[chip.compute_capability],
        "INTEGER": hot.integer * _WARP / _INTEGER_LANES,
    }
    if hot.multiply_adds:
        asked["TENSOR"] = hot.multiply_adds / _MULTIPLY_ADDS[chip.compute_capability]
    if hot.bytes and not cached:
        bytes_per_cycle = chip.memory_bytes_per_s / (chip.on_chip.clock_hz * chip.on_chip.cores * _QUARTERS)
        asked["MEMORY"] = hot.bytes / bytes_per_cycle
    return asked


def hottest(listing: str) -> dict[str, Hot]:
    """Of each kernel in what `nvdisasm -c` writes, by name.

    Raises NotImplementedError of a product by mma or wgmma whose size it cannot read.
    """
    return {name: _hottest(code) for name, code in _KERNEL.findall(listing)}


def _hottest(code: str) -> Hot:
    instructions: list[tuple[str, str]] = []  # each with its predicate
    places: dict[str, int] = {}
    for predicate, instruction, label in _LINE.findall(code):
        if label:
            places[label] = len(instructions)
        elif not instruction.startswith("NOP"):
            instructions.append((predicate, instruction))
    instructions.pop()  # behind the end, which jumps to itself
    loops = list(_loops(instructions, places))
    inner = [one for one in loops if not any(one != other and _within(other, one) for other in loops)]
    if not inner:
        return _asks(instructions)
    return max((_asks(instructions[first : last + 1]) for first, last in inner), key=_weight)


def _weight(hot: Hot) -> tuple[int, int]:
    """Of two loops that multiply alike one has a mask, for the few blocks that need it."""
    return hot.multiply_adds, -hot.instructions if hot.multiply_adds else hot.instructions


def _loops(instructions: list[tuple[str, str]], places: dict[str, int]) -> Iterator[tuple[int, int]]:
    """First and last instructions of those that do something; where waiting is out of line, behind the end of all
    threads, it jumps back, too."""
    last: dict[int, int] = {}
    for i, (_, instruction) in enumerate(instructions):
        if (found := _JUMP.match(instruction)) and places[found[1]] <= i:
            loop = instructions[places[found[1]] : i + 1]
            if any(_WORK.match(each) for _, each in loop) and ("", "EXIT") not in loop:
                last[places[found[1]]] = i
    yield from last.items()


def _within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


def _asks(instructions: list[tuple[str, str]]) -> Hot:
    texts = [instruction for _, instruction in instructions]
    of_kinds = (sum(bool(kind.match(text)) for text in texts) for kind in (_SPECIAL, _FLOAT32, _INTEGER))
    return Hot(len(texts), *of_kinds, sum(map(_multiply_adds, texts)), sum(map(_bytes, texts)))


def _multiply_adds(instruction: str) -> int:
    if not instruction.startswith(("HMMA.", "HGMMA.")):
        return 0
    found = _WARPGROUP_PRODUCT.match(instruction) or _WARP_PRODUCT.match(instruction)
    if found is None:
        raise NotImplementedError(f"how much {instruction.split()[0]} multiplies")
    return _ROWS * int(found[1]) * int(found[2]) * (2 if "TF32" in instruction else 1)


def _bytes(instruction: str) -> int:
    if not _OF_DEVICE.match(instruction):
        return 0
    bits = _BITS.search(instruction.split()[0])
    return 32 * (int(bits[1]) if bits else 32) // 8
