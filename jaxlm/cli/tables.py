"""How figures look to a person: tables, durations, and a dash for what is not known."""

from collections.abc import Callable
from typing import Any


def print_table(table: Any) -> None:
    """Print a rich table; nothing is cut off in a file or a pipe, which have no width of their own."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def seconds(value: float) -> str:
    """With the prefix that leaves one to three digits before the point."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def or_dash(value: Any, shown: Callable[[Any], str]) -> str:
    """The value as `shown`, or a dash for None."""
    return "–" if value is None else shown(value)
