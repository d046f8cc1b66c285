"""The ladder of a run as a person reads it at its end."""

import sys
from typing import Any

from jaxlm.cli.tables import add_numbers, headed
from jaxlm.core.units import memory, or_dash, seconds

# A cause of the gap below this share of the step is not worth a word.
_SMALL = 0.01


def show(rungs: dict[str, Any]) -> None:
    """The rungs side by side, and what lies between the first and the last, on standard error."""
    from rich.console import Console

    table = headed()
    table.add_column("", no_wrap=True)
    names = ("napkin", "counted", "measured")
    add_numbers(table, names)
    table.add_row("FLOPs of a step", *(or_dash(rungs[name]["flops"], "{:.4g}".format) for name in names))
    bracket = rungs["counted"]["step_s"]
    table.add_row(
        "step",
        or_dash(rungs["napkin"]["step_s"], seconds),
        or_dash(bracket, lambda ends: " to ".join(map(seconds, ends))),
        seconds(rungs["measured"]["step_s"]),
    )
    table.add_row("memory", *(or_dash(rungs[name]["memory_bytes"], memory) for name in names))
    table.add_row("MFU", "", "", or_dash(rungs["measured"]["mfu"], "{:.1%}".format))
    console = Console(file=sys.stderr, highlight=False)
    console.print(table)
    step_s, gap = rungs["measured"]["step_s"], rungs["gap"]
    if rungs["napkin"]["step_s"] is not None and gap:
        causes = [
            f"{name.replace('_', ' ')} {'+' if s > 0 else '−'}{seconds(abs(s))}"
            for name, s in gap.items()
            if abs(s) >= _SMALL * step_s
        ]
        console.print(f"from the napkin's step to the measured one: {', '.join(causes)}")
    if rungs["inside"] is False:
        console.print("the measured step lies outside of what was counted")
