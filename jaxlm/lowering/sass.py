"""Read NVIDIA's disassembled machine code: a kernel's hot loop, and the cycles that it needs of each unit of an SM."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.costs.hardware.chips import Chip

_KERNEL = re.compile(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;|^\s*(\.L_\w+):", re.MULTILINE)
_JUMP = re.compile(r"BRA\b.*`\((\.L_\w+)\)")
# A loop without any of these only waits.
_WORK = re.compile(r"F(?!ENCE)[A-Z]|H[A-Z]|MUFU|LDG|STG")
_SPECIAL = re.compile(r"MUFU\b")
_FLOAT32 = re.compile(r"F(ADD|MUL|FMA)\b")
_INTEGER = re.compile(r"(FMNMX|FSEL|FSETP|IADD3|VIADD|LOP3|ISETP|SEL|SHF|PRMT|LEA|I?MNMX)\b")
_WARPGROUP_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x(\d+)\.")
_WARP_PRODUCT = re.compile(r"HMMA\.16(8)(4|8|16)\.")
_DEVICE_MEMORY = re.compile(r"(?:LDG|STG|LDGSTS)\.")
_BITS = re.compile(r"\.[US]?(8|16|64|128)\b")
_ROWS = 16  # rows of a matrix product that one warp computes

_QUARTERS = 4  # per SM
# Lanes of an SM's quarter, results per cycle: float32 by compute capability; transcendentals, and integer operations,
# comparisons and selects, on all chips (CUDA C++ Programming Guide, throughput of arithmetic instructions).
_FLOAT32_LANES = {"8.0": 16, "9.0": 32}
_SPECIAL_LANES, _INTEGER_LANES = 4, 16
# 16-bit matrix multiply-adds of a quarter per cycle (NVIDIA's A100 and H100 architecture whitepapers).
_MULTIPLY_ADDS = {"8.0": 256, "9.0": 512}
_WARP = 32


class HotLoop(NamedTuple):
    """The work of one warp in one iteration of a kernel's hot loop.

    The hot loop is an innermost loop: the one with the most matrix multiply-adds, or else with the most instructions.
    A kernel without loops counts as a whole.

    Attributes:
      instructions: all instructions, one issue cycle each.
      special: exponentials, roots and other transcendentals.
      float32: additions, multiplications and fused multiply-adds.
      integer: integer additions, comparisons, selects and shifts; moves and conversions are not counted.
      multiply_adds: 16-bit matrix multiply-adds; tf32, which takes twice as long, counts twice. Those of Blackwell's
        tcgen05 are unknown, for its instructions do not name their shapes.
      bytes: read and written in device memory, by load and store instructions as read here; those of the copy engine
        (TMA), which name no sizes, are added from `tile_products.TileWork`.
    """

    instructions: int
    special: int
    float32: int
    integer: int
    multiply_adds: int
    bytes: int


def supports(chip: Chip) -> bool:
    """Return whether `cycles` supports a chip; Blackwell's machine code does not state the sizes of its products."""
    return chip.compute_capability in _MULTIPLY_ADDS


def cycles(chip: Chip, hot: HotLoop, cached: bool = False) -> dict[str, float]:
    """Return the cycles for which one iteration keeps each unit of an SM's quarter busy.

    The units are ISSUE (one instruction a cycle), SPECIAL (transcendentals), FLOAT32 and INTEGER (arithmetic); TENSOR
    (matrix products) if there are any; and MEMORY (a share of the bandwidth at the highest clock) if there are accesses
    and these are not `cached`.

    Raises KeyError for a chip that `supports` does not accept.
    """
    busy = {
        "ISSUE": hot.instructions,
        "SPECIAL": hot.special * _WARP / _SPECIAL_LANES,
        "FLOAT32": hot.float32 * _WARP / _FLOAT32_LANES[chip.compute_capability],
        "INTEGER": hot.integer * _WARP / _INTEGER_LANES,
    }
    if hot.multiply_adds:
        busy["TENSOR"] = hot.multiply_adds / _MULTIPLY_ADDS[chip.compute_capability]
    if hot.bytes and not cached:
        bytes_per_cycle = chip.memory_bytes_per_s / (chip.on_chip.clock_hz * chip.on_chip.cores * _QUARTERS)
        busy["MEMORY"] = hot.bytes / bytes_per_cycle
    return busy


def hot_loops(listing: str) -> dict[str, HotLoop]:
    """Return the hot loop of each kernel in the output of `nvdisasm -c`, by kernel name.

    Raises NotImplementedError for an mma or wgmma instruction of unknown size.
    """
    return {name: _hot_loop(code) for name, code in _KERNEL.findall(listing)}


def _hot_loop(code: str) -> HotLoop:
    instructions: list[tuple[str, str]] = []  # each with its predicate
    places: dict[str, int] = {}
    for predicate, instruction, label in _LINE.findall(code):
        if label:
            places[label] = len(instructions)
        elif not instruction.startswith("NOP"):
            instructions.append((predicate, instruction))
    instructions.pop()  # the jump to itself after the end
    loops = list(_loops(instructions, places))
    inner = [one for one in loops if not any(one != other and _within(other, one) for other in loops)]
    if not inner:
        return _work(instructions)
    return max((_work(instructions[first : last + 1]) for first, last in inner), key=_weight)


def _weight(hot: HotLoop) -> tuple[int, int]:
    """Sort key of loops. Of two with equal products, the longer applies a mask that only few blocks need."""
    return hot.multiply_adds, -hot.instructions if hot.multiply_adds else hot.instructions


def _loops(instructions: list[tuple[str, str]], places: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last instruction of each loop that does work.

    Out-of-line waits after the end of all threads also jump back; they are not loops.
    """
    last: dict[int, int] = {}
    for i, (_, instruction) in enumerate(instructions):
        if (found := _JUMP.match(instruction)) and places[found[1]] <= i:
            loop = instructions[places[found[1]] : i + 1]
            if any(_WORK.match(each) for _, each in loop) and ("", "EXIT") not in loop:
                last[places[found[1]]] = i
    yield from last.items()


def _within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


def _work(instructions: list[tuple[str, str]]) -> HotLoop:
    texts = [instruction for _, instruction in instructions]
    kinds = (sum(bool(kind.match(text)) for text in texts) for kind in (_SPECIAL, _FLOAT32, _INTEGER))
    return HotLoop(len(texts), *kinds, sum(map(_multiply_adds, texts)), sum(map(_bytes, texts)))


def _multiply_adds(instruction: str) -> int:
    if not instruction.startswith(("HMMA.", "HGMMA.")):
        return 0
    found = _WARPGROUP_PRODUCT.match(instruction) or _WARP_PRODUCT.match(instruction)
    if found is None:
        raise NotImplementedError(f"unknown size of {instruction.split()[0]}")
    return _ROWS * int(found[1]) * int(found[2]) * (2 if "TF32" in instruction else 1)


def _bytes(instruction: str) -> int:
    if not _DEVICE_MEMORY.match(instruction):
        return 0
    bits = _BITS.search(instruction.split()[0])
    return 32 * (int(bits[1]) if bits else 32) // 8
