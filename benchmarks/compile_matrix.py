"""Which kernels compile for which chips?

python benchmarks/compile_matrix.py                 prints the table
python benchmarks/compile_matrix.py --write         puts it into docs/kernels.md
python benchmarks/compile_matrix.py --on A100 v5e   some of the chips
"""

import argparse
import time
from pathlib import Path

import jax

from jaxlm.lowering import kernel_matrix

DOCUMENT = Path(__file__).parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- compile matrix -->\n", "<!-- end of compile matrix -->\n"


def write(table: str) -> None:
    """Put the table into the document."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table + END + rest.partition(END)[2])


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
        for row, problem in results[chip].items():
            if problem:
                print(f"  {row}: {problem}")
    table = kernel_matrix.table(results)
    print(table)
    if options.write:
        write(table)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
