"""Tables for a person to read, and their shared cells. Rich is imported where a table is made."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxlm.core.units import gib

if TYPE_CHECKING:
    from rich.table import Table


def facts() -> "Table":
    """Return a table of names and descriptions, without a header."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


def headed(title: str | None = None, **layout: bool) -> "Table":
    """Return a table with a line below its header, without columns."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", **layout)


def add_numbers(table: "Table", columns: Iterable[str]) -> None:
    """Add columns of numbers, right-aligned and never wrapped."""
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


def print_table(table: "Table") -> None:
    """Print a table; in a file or a pipe, which have no width, nothing is cut off."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def against_capacity(needed: int, capacity: int) -> str:
    """Format the bytes that a step needs on each device, the capacity, and whether the step fits."""
    verdict = "fits" if needed <= capacity else f"does not fit by {gib(needed - capacity)} GiB"
    return f"{gib(needed)} of {gib(capacity)} GiB per device: {verdict}"
