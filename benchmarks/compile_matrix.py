"""Compile every kernel for every chip, and tabulate the result (docs/kernels.md).

python benchmarks/compile_matrix.py                 print the tables
python benchmarks/compile_matrix.py --write         write them, and the figures of NVIDIA's assembler and the TPU
                                                    compiler, to results/compiled; programs that the same compilers
                                                    have compiled before keep their recorded figures
python benchmarks/compile_matrix.py --on A100 v5e   compile for some of the chips
"""

import argparse
import json
import operator
import time

import jax
import results as files

from jaxlm.lowering import kernel_matrix, kernel_tables
from jaxlm.lowering.assemblers import assemblers
from jaxlm.lowering.assembly import AssembledKernel
from jaxlm.lowering.bundles import ScheduledKernel
from jaxlm.lowering.kernel_matrix import Outcome

RESULTS = files.FOLDER / "compiled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the tables and figures to {RESULTS}")
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
    records = {kind: kernel_matrix.records(results, kind) for kind in (AssembledKernel, ScheduledKernel)}
    pages = {
        "compile_matrix": kernel_tables.compiled(results),
        "registers": kernel_tables.registers(records[AssembledKernel]),
        "loops": kernel_tables.loops(records[AssembledKernel]),
        "schedules": kernel_tables.schedules(records[ScheduledKernel]),
    }
    print(*pages.values(), sep="\n")
    if options.write:
        for name, page in pages.items():
            (RESULTS / f"{name}.md").write_text(page)
        print(files.write("assembly", "compiled", {"kernels": records[AssembledKernel]}))
        print(files.write("schedules", "compiled", {"kernels": records[ScheduledKernel]}))
        print(files.write("compile_matrix", "compiled", {"programs": programs(results)}))


def compiled_before() -> dict[tuple[str, str], Outcome]:
    """Return the recorded outcomes by chip and row; none if other compilers produced them.

    Kernels of GPUs have to be recorded by each assembler at hand.
    """
    file = RESULTS / "compile_matrix.json"
    earlier = json.loads(file.read_text()) if file.exists() else None
    if earlier is None or operator.ne(*files.compilers(earlier)):
        return {}
    kernels = (json.loads((RESULTS / f"{name}.json").read_text())["kernels"] for name in ("assembly", "schedules"))
    releases = {assembler.release for assembler in assemblers()}
    return {
        (chip, row): outcome
        for (chip, row), outcome in kernel_matrix.recorded(earlier["programs"], *kernels).items()
        if chip not in kernel_matrix.ASSEMBLED or {kernel.assembler for kernel in outcome.kernels} == releases
    }


def programs(results: dict[str, dict[kernel_matrix.MatrixRow, Outcome]]) -> list[dict[str, str]]:
    """Return one record for each program that compiled."""
    return [
        {"chip": chip, "row": str(row), "program": outcome.program}
        for chip, by in results.items()
        for row, outcome in by.items()
        if not outcome.problem
    ]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
