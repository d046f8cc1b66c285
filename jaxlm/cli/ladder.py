"""The ladder of a run as a person reads it at its end."""

import sys
from collections.abc import Iterator
from typing import Any

from jaxlm.cli.tables import TextTable, names, numbers, print_sentence
from jaxlm.core.units import memory, or_dash, seconds

# A cause of the gap below this share of the step is not worth a word.
_SMALL = 0.01
# Other programs that take this share of the machine slow a step down.
_BUSY = 0.1


def show(rungs: dict[str, Any]) -> None:
    """Print the rungs side by side, and what lies between the first and the last, on standard error."""
    rows = ("napkin", "counted", "measured")
    table = TextTable([*names(""), *numbers(*rows)])
    table.add("FLOPs of a step", *(or_dash(rungs[name]["flops"], "{:.4g}".format) for name in rows))
    table.add("step", *(or_dash(rungs[name]["step_s"], seconds) for name in rows))
    if bracket := rungs["counted"]["bracket_s"]:
        table.add("within", "", " to ".join(map(seconds, bracket)), "")
    table.add("memory", *(or_dash(rungs[name]["memory_bytes"], memory) for name in rows))
    table.add("MFU", "", "", or_dash(rungs["measured"]["mfu"], "{:.1%}".format))
    table.print(sys.stderr)
    for line in _explained(rungs):
        print_sentence(line, sys.stderr)


def _explained(rungs: dict[str, Any]) -> Iterator[str]:
    """Yield the causes of the gap, and by how much a measured step lies outside the counted bracket."""
    step_s, gap, bracket = rungs["measured"]["step_s"], rungs["gap"], rungs["counted"]["bracket_s"]
    if rungs["napkin"]["step_s"] is not None and gap:
        causes = [
            f"{name.replace('_', ' ')} {'+' if s > 0 else '−'}{seconds(abs(s))}"
            for name, s in gap.items()
            if abs(s) >= _SMALL * step_s
        ]
        yield f"the measured step differs from the napkin's by: {', '.join(causes)}"
    if rungs["inside"] is not False:
        return
    lower, upper = bracket
    if step_s < lower:
        yield f"a step took {step_s / lower:.2f} times the low end of the counted bracket"
        return
    others = rungs["measured"]["other_load"] or 0.0
    why = f"; meanwhile other programs used {others:.0%} of this machine" if others >= _BUSY else ""
    yield f"a step took {step_s / upper:.2f} times the upper end of the counted bracket{why}"
