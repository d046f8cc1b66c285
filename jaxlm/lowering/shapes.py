"""Array types parsed from XLA's text: dtype, shape, layout and memory space."""

import math
import re
from dataclasses import dataclass

_BITS = {
    **{"pred": 8, "token": 0, "opaque": 0},
    **{f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)},
    **{"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
}
_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class HloArray:
    """An array of a program.

    Attributes:
      bytes: allocated size, padded to whole tiles.
      space: memory space: 0 is device memory; others, such as a TPU's VMEM (1), are on the chip.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


# An array, or a tuple of types.
HloType = HloArray | tuple["HloType", ...]


def arrays(type: HloType) -> list[HloArray]:
    """Return the arrays of a type, from left to right."""
    return [type] if isinstance(type, HloArray) else [array for part in type for array in arrays(part)]


def parse(text: str, start: int) -> tuple[HloType, int]:
    """Parse the type at an offset, such as `(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, s32[])`; also return its end."""
    while text[start] == " ":
        start += 1
    if text[start] != "(":
        found = _ARRAY.match(text, start)
        if found is None:
            raise ValueError(f"no type at {text[start : start + 80]!r}")
        return _array(*found.groups()), found.end()
    parts, at = [], start + 1
    while text[at] != ")":
        part, at = parse(text, at)
        parts.append(part)
        while text[at] in ", ":
            at += 1
    return tuple(parts), at + 1


def _array(dtype: str, sizes: str, order: str | None, layout: str | None) -> HloArray:
    # "<=8" is a size that may be smaller at run time.
    shape = tuple(int(size.strip().removeprefix("<=")) for size in sizes.split(",") if size.strip())
    layout = layout or ""
    space = int(found[1]) if (found := _SPACE.search(layout)) else 0
    padded = [shape[int(axis)] for axis in order.split(",")] if order else [*reversed(shape)]  # innermost first
    if tile := _TILE.search(layout):
        for axis, size in enumerate(reversed([int(n) for n in tile[1].split(",")])):
            if axis < len(padded):
                padded[axis] = math.ceil(padded[axis] / size) * size
    return HloArray(dtype, shape, math.ceil(math.prod(padded) * bits(dtype) / 8), space)


def bits(dtype: str) -> int:
    """Return the bits per element of a dtype; formats of eight bits and fewer have names like f8e4m3fn and f4e2m1fn."""
    if dtype in _BITS:
        return _BITS[dtype]
    if small := re.match(r"f(\d)e", dtype):
        return int(small[1])
    raise ValueError(f"unknown dtype {dtype}")
