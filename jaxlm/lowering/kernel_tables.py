"""Markdown pages of the compile matrix and of the compilers' figures for its kernels."""

from collections.abc import Callable

from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering.kernel_matrix import GPUS, MatrixRow, Outcome, rows
from jaxlm.lowering.sass import HotLoop, cycles, supports

# How rows of matrix products begin, most of whose reads hit the caches. Few rows wait for a quantised matrix.
CACHED = ("matmul", "grouped_matmul", "flash_attention", "quantized_matmul | triton | 4096 ×")
CACHED += ("quantized_grouped_matmul | triton | 4096 ×",)


def compiled(results: dict[str, dict[MatrixRow, Outcome]]) -> str:
    """Return the results by chip as a Markdown page: ✓ compiles, ✗ fails, – is not lowered for the chip."""
    lines = [
        f"| operation | implementation | case | {' | '.join(results)} |",
        "| --- | --- | --- |" + " --- |" * len(results),
    ]
    for row in rows():
        cells = ("–" if row not in by else "✗" if by[row].problem else "✓" for by in results.values())
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return _page("Kernels that compile, by chip", "what-compiles", lines)


def registers(records: list[dict]) -> str:
    """Return the registers per thread of each row's kernels by assembler and chip as a Markdown page.

    Kernels stand in the order of their names.
    """

    def cell(record: dict) -> str:
        notes = [f"{record['spilled']} B spilled"] if record["spilled"] else []
        notes += [record["remarks"]] if record["remarks"] else []
        return f"{record['registers']}" + (f" ({', '.join(notes)})" if notes else "")

    return _kernels_page("Registers of each thread", "what-the-assembler-says", records, {"": cell})


def loops(records: list[dict]) -> str:
    """Return each row's busiest unit in the hot loop of each kernel as a Markdown page, by assembler and chip.

    A cell gives the cycles, the unit, and the share of these cycles in which instructions are issued. The chip's second
    column gives the matrix products done in relation to those needed. Kernels stand in the order of their names.
    """

    def busiest(record: dict) -> str:
        busy = cycles(chip_of(record), HotLoop(**record["hot"]), record["row"].startswith(CACHED))
        unit = max(busy, key=lambda unit: busy[unit])
        return f"{busy[unit]:,.0f} {unit}" + ("" if unit == "ISSUE" else f" {busy['ISSUE'] / busy[unit]:.0%}")

    def products(record: dict) -> str:
        done, needed = record["hot"]["multiply_adds"], record["needed"]
        return f"{done / needed:.2f}" if done and needed else "–"

    def chip_of(record: dict) -> Chip:
        return Target.parse(GPUS[record["chip"]]).chip

    known = [record for record in records if supports(chip_of(record))]
    return _kernels_page(
        "The busiest unit of an SM in each kernel's hot loop",
        "what-a-warp-asks-of-its-sm",
        known,
        {"": busiest, ": products done ÷ needed": products},
    )


def schedules(records: list[dict]) -> str:
    """Return the bundles of each kernel's longest branch-free run and its busiest unit by chip, as a Markdown page.

    Kernels stand in the order of their names.
    """

    def cell(record: dict) -> str:
        unit = max(record["busy"], key=lambda unit: record["busy"][unit])
        return f"{record['longest']:,} {unit} {record['busy'][unit]:.0%}"

    return _kernels_page(
        "The longest branch-free run of each TPU kernel", "what-the-tpus-compiler-schedules", records, {"": cell}
    )


def _kernels_page(title: str, section: str, records: list[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    """Return a page with a row for each case, and assembler where there are several.

    Each chip has these columns, named after it and the columns' keys.
    """
    headings = [f"{chip}{name}" for chip in dict.fromkeys(record["chip"] for record in records) for name in columns]
    cells: dict[str, dict[str, list[str]]] = {}
    for record in records:
        row = cells.setdefault(_row(record), {})
        for name, cell in columns.items():
            row.setdefault(f"{record['chip']}{name}", []).append(cell(record))
    first = ["operation", "implementation", "case", *(["assembler"] if "assembler" in records[0] else [])]
    lines = [f"| {' | '.join([*first, *headings])} |", "|" + " --- |" * len([*first, *headings])]
    lines += [
        f"| {row} | {' | '.join(' · '.join(by.get(heading, ['–'])) for heading in headings)} |"
        for row, by in cells.items()
    ]
    return _page(title, section, lines)


def _row(record: dict) -> str:
    return record["row"] + (f" | CUDA {record['assembler']}" if "assembler" in record else "")


def _page(title: str, section: str, lines: list[str]) -> str:
    """Return a page of benchmarks/results/compiled that links to the section of docs/kernels.md that explains it."""
    explained = f"[docs/kernels.md](../../../docs/kernels.md#{section}) explains it."
    return "\n".join(
        (f"# {title}", "", f"Written by `benchmarks/compile_matrix.py --write`; {explained}", "", *lines, "")
    )
