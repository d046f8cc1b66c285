"""Formatting of figures for a person, and sizes as a person writes them. Figures are in SI units, sizes in bytes."""

import re
from collections.abc import Callable
from typing import Any

GIB = 2**30

_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}
# The least seconds that are shown in a unit, and its length in seconds.
_TIMES = {3 * 86400.0: ("days", 86400.0), 7200.0: ("h", 3600.0), 120.0: ("min", 60.0)}
# The least bytes that are shown in a unit, its size in bytes, and its digits after the point.
_SIZES = {2**40: ("TiB", 2**40, 2), GIB // 2: ("GiB", GIB, 2), 2**20: ("MiB", 2**20, 0), 2**10: ("KiB", 2**10, 0)}

# The units of a size that a person writes, in bytes.
_UNITS = {
    **{"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    **{"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}

# The units of a time that a person writes, in seconds.
_DURATIONS = {"ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """Return the seconds of a time, such as "30d" or "500ms". Raises ValueError for what is none."""
    time = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]*)", text, re.ASCII)
    if not time or time[2] not in _DURATIONS or not float(time[1]):
        raise ValueError(f"{text!r} must be a time such as 500ms, 12h or 30d")
    return float(time[1]) * _DURATIONS[time[2]]


def parse_memory(text: str) -> int:
    """Return the bytes of a size, such as "2GiB". Raises ValueError for what is none."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if not size or size[2] not in _UNITS or not float(size[1]):
        raise ValueError(f"{text!r} must be a size such as 512MiB or 2GiB")
    return int(float(size[1]) * _UNITS[size[2]])


def gib(size: float) -> str:
    """Format bytes as a number of GiB, without the unit."""
    return f"{size / GIB:.2f}"


def memory(size: float) -> str:
    """Format bytes of memory in the binary unit that fits, such as "1.50 GiB"."""
    for least, (unit, scale, digits) in _SIZES.items():
        if size >= least:
            return f"{size / scale:,.{digits}f} {unit}"
    return f"{size:.0f} B"


def size(value: float) -> str:
    """Format bytes that are read, written or sent in the decimal unit that fits, such as "1.5 MB"."""
    return with_prefix(value, "B")


def seconds(value: float) -> str:
    """Format seconds with three digits in the unit that fits, from ns to days."""
    for least, (unit, scale) in _TIMES.items():
        if value >= least:
            return f"{number(value / scale, 3)} {unit}"
    rounded = float(f"{value:.3g}")  # 999.6 ms are 1 s
    scale = next((scale for scale in (1.0, 1e-3, 1e-6) if rounded >= scale), 1e-9)
    return f"{value / scale:.3g} {_PREFIXES[scale]}s" if value else "0 s"


def age(value: float) -> str:
    """Format seconds as whole seconds, minutes, hours or days."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if value >= size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"


def with_prefix(value: float, unit: str) -> str:
    """Format a value with an SI prefix, such as "3.35 TB/s"."""
    scale = next((scale for scale in _PREFIXES if abs(value) >= scale), 1e-9) if value else 1.0
    return f"{number(value / scale)} {_PREFIXES[scale]}{unit}"


def number(value: float, digits: int = 4) -> str:
    """Format a number with so many significant digits, or all digits before the point."""
    return f"{value:,.{digits}g}" if value < 10**digits else f"{value:,.0f}"


def or_dash(value: Any, shown: Callable[[Any], str]) -> str:
    """Format a value by `shown`, or None as a dash."""
    return "–" if value is None else shown(value)
