"""The table of measured implementations, by which a call that names none chooses.

`measured.json` holds the times of a chip's results file: `python -m kernels_pallas.bench.choose` writes it. A GPU
without rows of its own takes those of one of equal compute capability; no other chip's rows serve.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kernels_pallas.core import target
from kernels_pallas.core.target import TargetChip

TABLE = Path(__file__).parent / "measured.json"

# A call is measured forward alone, and forward and backward together.
Direction = Literal["forward", "training"]


class CallClass(NamedTuple):
    """The properties of a call that decide which implementation is the fastest.

    Attributes:
      width: numbers in a row of its operands: the larger head dim of attention, otherwise the columns.
      size: queries times keys of a sequence of attention, otherwise the number of rows.
      bits: of a number of the first operand.
      mask: of attention "full", "causal" (both known while tracing) or "intervals" (any other); "" elsewhere.
    """

    width: int
    size: int
    bits: int
    mask: str = ""

    @classmethod
    def of_rows(cls, x: Any) -> "CallClass":
        """Return the class of an operation on rows x [..., W], an array or its shape and dtype."""
        return cls(x.shape[-1] if x.shape else 1, math.prod(x.shape[:-1]), 8 * x.dtype.itemsize)

    def distance(self, other: "CallClass") -> tuple[float, float, float]:
        """Return how far another class is: by the width first, then the mask, then the size."""
        return _octaves(self.width, other.width), float(self.mask != other.mask), _octaves(self.size, other.size)

    def __str__(self) -> str:
        return " ".join([*[self.mask] * bool(self.mask), f"width {self.width}", f"size {self.size:,}"])


class MeasuredRow(NamedTuple):
    """The times of one call on a chip.

    Attributes:
      chip: JAX's name of the chip. results: the file that holds the measurement, in the repository.
      case: name of the case. milliseconds: by implementation, the fastest first.
    """

    chip: str
    results: str
    operation: str
    case: str
    direction: Direction
    call: CallClass
    milliseconds: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self.milliseconds.items())
        return f"{self.case}, {self.direction}, on {self.chip} ({self.results}): {times}"


def nearest(operation: str, call: CallClass, direction: Direction, chip: TargetChip) -> MeasuredRow | None:
    """Return the row of the nearest call that was measured on a chip, or None where the table has none that serves it.

    Rows are of numbers with as many bits as the call's.
    """
    rows = [
        row
        for row in _of_chip(chip)
        if (row.operation, row.direction, row.call.bits) == (operation, direction, call.bits)
    ]
    return min(rows, key=lambda row: (call.distance(row.call), row.chip, row.case), default=None)


def chips() -> frozenset[str]:
    """Return JAX's names of the chips that the table has rows of."""
    return frozenset(row.chip for row in _table(TABLE))


def _of_chip(chip: TargetChip) -> list[MeasuredRow]:
    rows = _table(TABLE)
    if own := [row for row in rows if row.chip == chip.kind]:
        return own
    capability = chip.compute_capability
    return [row for row in rows if capability and target.of_kind("gpu", row.chip).compute_capability == capability]


def _octaves(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1)) - math.log2(max(b, 1)))


@functools.cache
def _table(path: Path) -> tuple[MeasuredRow, ...]:
    """Return the rows of a file as `rows_of` of `kernels_pallas.bench.choose` has them."""
    read = json.loads(path.read_text(encoding="utf-8"))
    return tuple(MeasuredRow(**row | {"call": CallClass(**row["call"])}) for row in read)
