"""Units in which figures are shown to a person. Figures themselves are in SI units, sizes in bytes."""

from collections.abc import Callable
from typing import Any

GIB = 2**30

_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}


def gib(size: float, digits: int = 2) -> str:
    """Bytes as a number of GiB, without the unit."""
    return f"{size / GIB:.{digits}f}"


def memory(size: int) -> str:
    """Bytes in GiB, or in MiB below half of one."""
    return f"{gib(size)} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """Three digits, with the prefix that leaves one to three of them before the point; no multiples of seconds."""
    scale = next((scale for scale in (1.0, 1e-3, 1e-6) if value >= scale), 1e-9)
    return f"{value / scale:.3g} {_PREFIXES[scale]}s"


def with_prefix(value: float, unit: str) -> str:
    """Such as "3.35 TB/s"."""
    scale = next((scale for scale in _PREFIXES if abs(value) >= scale), 1e-9)
    return f"{number(value / scale)} {_PREFIXES[scale]}{unit}"


def number(value: float) -> str:
    """Four digits, or all of those before the point."""
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def or_dash(value: Any, shown: Callable[[Any], str]) -> str:
    """The value as `shown`, or a dash for None."""
    return "–" if value is None else shown(value)
