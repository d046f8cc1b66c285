"""Make the table of measured implementations from results files: core/measured.json, by which None chooses.

python -m kernels_pallas.bench.choose                                of all benchmarks/results/*/kernels.json of chips
python -m kernels_pallas.bench.choose RESULTS.json [RESULTS.json …]  of these files, in this order

Of a row that two files have the later file counts. Rows of CPUs are left out: no kernel runs there.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels_pallas.core import measured
from kernels_pallas.core.measured import TABLE, MeasuredRow
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.core.target import of_kind

RESULTS = "benchmarks/results/*/kernels.json"


def rows_of(results: dict[str, Any], file: str) -> list[MeasuredRow]:
    """Return the rows of a results file of `kernels_pallas.bench`, without those of peers; none of a CPU's.

    Raises ValueError for a case that its operation no longer has, whose class is not known, and for a time that is
    none.
    """
    if of_kind("gpu", results["device"]).compute_capability is None and not results["device"].startswith("TPU"):
        return []
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in results["rows"]:
        operation = OPERATIONS[row["operation"]]
        if not 0 < row["seconds"] < math.inf:
            raise ValueError(f"{row['operation']}, {row['case']}: {row['seconds']} is no time in seconds")
        if row["implementation"] in ("reference", *operation.implementations, *operation.others):
            of_case = times.setdefault((row["operation"], row["case"], row["direction"]), {})
            of_case[row["implementation"]] = round(1e3 * row["seconds"], 4)
    rows = []
    for (name, case_name, direction), milliseconds in times.items():
        operation = OPERATIONS[name]
        case = next((case for case in operation.cases if case.name == case_name), None)
        if case is None:
            raise ValueError(f"{name} has no case {case_name!r} any more; measure again")
        call = operation.classify(case.structs(case.dtypes[0]), case.options)
        fastest_first = dict(sorted(milliseconds.items(), key=lambda item: (item[1], item[0])))
        rows.append(MeasuredRow(results["device"], file, name, case_name, direction, call, fastest_first))
    return rows


def table(files: Iterable[Path], root: Path) -> list[MeasuredRow]:
    """Return the rows of results files, sorted. `root`: the folder of the repository, from which files are named.

    Raises OSError, and ValueError for a file that is none of `kernels_pallas.bench` or lies elsewhere.
    """
    rows = {}
    for file in files:
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
            of_file = rows_of(read, file.resolve().relative_to(root.resolve()).as_posix())
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} holds no results of kernels_pallas.bench: {error!r}") from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        for row in of_file:
            rows[row.chip, row.operation, row.case, row.direction] = row
    return [rows[key] for key in sorted(rows)]


def written(rows: Sequence[MeasuredRow]) -> str:
    """Return the table as the file holds it, a line for each row."""
    lines = (json.dumps(row._asdict() | {"call": row.call._asdict()}, ensure_ascii=False) for row in rows)
    return "[\n" + ",\n".join(f" {line}" for line in lines) + "\n]\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench.choose", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS", help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    files = options.results or sorted(root.glob(RESULTS))
    try:
        rows = table(files, root)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"no row of a GPU or TPU is in {', '.join(map(str, files)) or RESULTS}; run it in the repository")
    dropped = sorted(measured.chips() - {row.chip for row in rows})
    partial = TABLE.with_suffix(".partial")
    partial.write_text(written(rows), encoding="utf-8")
    partial.replace(TABLE)  # whole at any time: every call reads it
    print(f"wrote {len(rows)} rows of {', '.join(sorted({row.chip for row in rows}))} to {TABLE}")
    if dropped:
        print(f"it has no rows of {', '.join(dropped)} any more: give their results files too")
    for file in options.results:
        if all(row.results != file.resolve().relative_to(root.resolve()).as_posix() for row in rows):
            print(f"{file}: of a CPU, or a later file has all of its rows")


if __name__ == "__main__":
    main()
