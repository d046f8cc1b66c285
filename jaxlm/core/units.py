"""Formatting of figures for a person. The figures themselves are in SI units, sizes in bytes."""

from collections.abc import Callable
from typing import Any

GIB = 2**30

_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}


def gib(size: float, digits: int = 2) -> str:
    """Format bytes as a number of GiB, without the unit."""
    return f"{size / GIB:.{digits}f}"


def memory(size: int) -> str:
    """Format bytes in GiB, or in MiB below 0.5 GiB."""
    return f"{gib(size)} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """Format seconds with three digits in s, ms, µs or ns."""
    scale = next((scale for scale in (1.0, 1e-3, 1e-6) if value >= scale), 1e-9)
    return f"{value / scale:.3g} {_PREFIXES[scale]}s"


def age(value: float) -> str:
    """Format seconds as whole seconds, minutes, hours or days."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if value >= size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"


def with_prefix(value: float, unit: str) -> str:
    """Format a value with an SI prefix, such as "3.35 TB/s"."""
    scale = next((scale for scale in _PREFIXES if abs(value) >= scale), 1e-9)
    return f"{number(value / scale)} {_PREFIXES[scale]}{unit}"


def number(value: float) -> str:
    """Format a number with four significant digits, or all digits before the point."""
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def or_dash(value: Any, shown: Callable[[Any], str]) -> str:
    """Format a value by `shown`, or None as a dash."""
    return "–" if value is None else shown(value)
