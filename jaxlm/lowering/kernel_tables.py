"""The compile matrix, and what compilers say of its kernels, as Markdown tables."""

from collections.abc import Callable

from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering.kernel_matrix import GPUS, MatrixRow, Outcome, rows
from jaxlm.lowering.sass import Hot, cycles, knows

# Operations that read most of what they read from caches.
MULTIPLYING = ("matmul", "flash_attention")


def compiled(results: dict[str, dict[MatrixRow, Outcome]]) -> str:
    """The results by chip as a Markdown table: ✓ compiles, – is not lowered for it."""
    lines = [
        f"| operation | implementation | case | {' | '.join(results)} |",
        "| --- | --- | --- |" + " --- |" * len(results),
    ]
    for row in rows():
        cells = ("–" if row not in by else "✗" if by[row].problem else "✓" for by in results.values())
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def registers(records: list[dict]) -> str:
    """Of each row the registers of its kernels by chip, in the order of their names, as a Markdown table."""

    def cell(record: dict) -> str:
        return f"{record['registers']}" + (f" ({record['spilled']} B spilled)" if record["spilled"] else "")

    return _kernels_table(records, cell)


def loops(records: list[dict]) -> str:
    """Of each row the unit that its kernels ask most of, for how many cycles, and which part of them instructions are
    issued in, in the order of their names, as a Markdown table."""

    def cell(record: dict) -> str:
        asked = cycles(chip_of(record), Hot(**record["hot"]), record["row"].startswith(MULTIPLYING))
        unit = max(asked, key=lambda unit: asked[unit])
        return f"{asked[unit]:,.0f} {unit}" + ("" if unit == "ISSUE" else f" {asked['ISSUE'] / asked[unit]:.0%}")

    def chip_of(record: dict) -> Chip:
        return Target.parse(GPUS[record["chip"]]).chip

    return _kernels_table([record for record in records if knows(chip_of(record))], cell)


def schedules(records: list[dict]) -> str:
    """Of each row the longest run of its kernels by chip, and the unit that it keeps busiest, in the order of their
    names, as a Markdown table."""

    def cell(record: dict) -> str:
        unit = max(record["busy"], key=lambda unit: record["busy"][unit])
        return f"{record['longest']:,} {unit} {record['busy'][unit]:.0%}"

    return _kernels_table(records, cell)


def _kernels_table(records: list[dict], cell: Callable[[dict], str]) -> str:
    chips = list(dict.fromkeys(record["chip"] for record in records))
    cells: dict[str, dict[str, list[str]]] = {}
    for record in records:
        cells.setdefault(record["row"], {}).setdefault(record["chip"], []).append(cell(record))
    lines = [
        f"| operation | implementation | case | {' | '.join(chips)} |",
        "| --- | --- | --- |" + " --- |" * len(chips),
    ]
    lines += [
        f"| {row} | {' | '.join(' · '.join(by.get(chip, ['–'])) for chip in chips)} |" for row, by in cells.items()
    ]
    return "\n".join(lines) + "\n"
