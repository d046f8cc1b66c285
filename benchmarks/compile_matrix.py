"""Which kernels compile for which chips?

python benchmarks/compile_matrix.py                 prints the table
python benchmarks/compile_matrix.py --write         puts it into docs/kernels.md, with what NVIDIA's assembler and the
                                                    TPUs' compiler say; of programs that the same compilers have
                                                    compiled before, what they said then
python benchmarks/compile_matrix.py --on A100 v5e   some of the chips
"""

import argparse
import json
import operator
import time
from pathlib import Path

import jax
import results as files

from jaxlm.lowering import kernel_matrix, kernel_tables
from jaxlm.lowering.assembly import Assembled
from jaxlm.lowering.bundles import Scheduled
from jaxlm.lowering.kernel_matrix import Outcome

DOCUMENT = Path(__file__).parents[1] / "docs" / "kernels.md"
RESULTS = files.FOLDER / "compiled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    parser.add_argument("--on", nargs="+", choices=kernel_matrix.CHIPS, help="these chips alone")
    options = parser.parse_args()
    if options.write and options.on:
        parser.error("--write needs all chips: leave --on out")
    known = compiled_before() if options.write else {}
    results = {}
    for chip in options.on or kernel_matrix.CHIPS:
        start = time.perf_counter()
        before = {(row, outcome.program): outcome for (on, row), outcome in known.items() if on == chip}
        outcomes = kernel_matrix.compile_rows(chip, {program for _, program in before})
        results[chip] = {row: before.get((str(row), made.program), made) for row, made in outcomes.items()}
        print(f"{chip}: {len(outcomes)} kernels in {time.perf_counter() - start:.0f} s")
        for row, outcome in outcomes.items():
            if outcome.problem:
                print(f"  {row}: {outcome.problem}")
    tables = {"compile matrix": kernel_tables.compiled(results)}
    records = {kind: kernel_matrix.records(results, kind) for kind in (Assembled, Scheduled)}
    tables["registers"] = kernel_tables.registers(records[Assembled])
    tables["loops"] = kernel_tables.loops(records[Assembled])
    tables["schedules"] = kernel_tables.schedules(records[Scheduled])
    print(*tables.values(), sep="\n")
    if options.write:
        for name, table in tables.items():
            write(name, table)
        print(files.write("assembly", "compiled", {"kernels": records[Assembled]}))
        print(files.write("schedules", "compiled", {"kernels": records[Scheduled]}))
        print(files.write("compile_matrix", "compiled", {"programs": programs(results)}))


def compiled_before() -> dict[tuple[str, str], Outcome]:
    """What the results files have of these compilers, by chip and row."""
    file = RESULTS / "compile_matrix.json"
    earlier = json.loads(file.read_text()) if file.exists() else None
    if earlier is None or operator.ne(*files.compilers(earlier)):
        return {}
    kernels = (json.loads((RESULTS / f"{name}.json").read_text())["kernels"] for name in ("assembly", "schedules"))
    return kernel_matrix.recorded(earlier["programs"], *kernels)


def programs(results: dict[str, dict[kernel_matrix.MatrixRow, Outcome]]) -> list[dict[str, str]]:
    """What compiled, a record each."""
    return [
        {"chip": chip, "row": str(row), "program": outcome.program}
        for chip, by in results.items()
        for row, outcome in by.items()
        if not outcome.problem
    ]


def write(name: str, table: str) -> None:
    """Put a table between its marks in the document."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = DOCUMENT.read_text().partition(begin)
    DOCUMENT.write_text(before + begin + table + end + rest.partition(end)[2])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
