"""Which kernels compile for which chips?

python benchmarks/compile_matrix.py                 prints the table
python benchmarks/compile_matrix.py --write         puts it into docs/kernels.md, with what NVIDIA's assembler and the
                                                    TPUs' compiler say
python benchmarks/compile_matrix.py --on A100 v5e   some of the chips
"""

import argparse
import time
from pathlib import Path

import jax
import results as files

from jaxlm.lowering import kernel_matrix
from jaxlm.lowering.assembly import Assembled
from jaxlm.lowering.bundles import Scheduled

DOCUMENT = Path(__file__).parents[1] / "docs" / "kernels.md"


def write(name: str, table: str) -> None:
    """Put a table between its marks in the document."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = DOCUMENT.read_text().partition(begin)
    DOCUMENT.write_text(before + begin + table + end + rest.partition(end)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    parser.add_argument("--on", nargs="+", choices=kernel_matrix.CHIPS, help="these chips alone")
    options = parser.parse_args()
    if options.write and options.on:
        parser.error("--write needs all chips: leave --on out")
    results = {}
    for chip in options.on or kernel_matrix.CHIPS:
        start = time.perf_counter()
        results[chip] = kernel_matrix.compile_rows(chip)
        print(f"{chip}: {len(results[chip])} kernels in {time.perf_counter() - start:.0f} s")
        for row, outcome in results[chip].items():
            if outcome.problem:
                print(f"  {row}: {outcome.problem}")
    tables = {"compile matrix": kernel_matrix.table(results)}
    records = {kind: kernel_matrix.records(results, kind) for kind in (Assembled, Scheduled)}
    tables["registers"] = kernel_matrix.registers_table(records[Assembled])
    tables["schedules"] = kernel_matrix.schedules_table(records[Scheduled])
    print(*tables.values(), sep="\n")
    if options.write:
        for name, table in tables.items():
            write(name, table)
        print(files.write("assembly", "compiled", {"kernels": records[Assembled]}))
        print(files.write("schedules", "compiled", {"kernels": records[Scheduled]}))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
