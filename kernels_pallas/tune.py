"""Find the fastest sizes of blocks for the chip that is here, and put them into blocks.json.

python -m kernels_pallas.tune                    all operations
python -m kernels_pallas.tune rms_norm --dry-run

Each kernel starts from what it runs with now. One number after the other is halved and doubled, and what is faster by
more than two per cent is kept, until nothing is; sizes that do not compile are passed over.
"""

import argparse
from typing import Any

import jax

from kernels_pallas import tuning
from kernels_pallas.bench.run import cases, program
from kernels_pallas.bench.timing import measure
from kernels_pallas.cases import Case, Operation
from kernels_pallas.registry import OPERATIONS, check

_ENOUGH = 0.98


def tune(operation: Operation, case: Case, implementation: str) -> dict[tuning.Kernel, Any]:
    """The fastest sizes of all kernels that forward and backward of a case run; empty where it does not serve here, or
    runs with no sizes."""
    try:
        with tuning.trying({}) as asked:
            program(operation, case, implementation, training=True)
    except NotImplementedError:
        return {}
    except Exception as error:  # a case that is too large for this chip leaves the others to be tuned
        reason = str(error).partition("\n")[0][:200]
        print(f"{operation.name}, {case.name}, {implementation}: left out: {reason}", flush=True)
        return {}
    best = {kernel: got.blocks for kernel, got in asked.items()}
    fastest = _seconds(operation, case, implementation, best)
    for kernel, (_, free) in asked.items():
        improved = True
        while improved:
            improved = False
            for field in free:
                for factor in (0.5, 2):
                    size = int(getattr(best[kernel], field) * factor)
                    other = {**best, kernel: best[kernel]._replace(**{field: size})}
                    taken = _seconds(operation, case, implementation, other) if size else None
                    if taken is not None and (fastest is None or taken < fastest * _ENOUGH):
                        best, fastest, improved = other, taken, True
    return {} if fastest is None else best


def _seconds(operation: Operation, case: Case, implementation: str, blocks: dict) -> float | None:
    """Of a training call with these sizes; None where they do not compile or run."""
    try:
        with tuning.trying(blocks):
            run = program(operation, case, implementation, training=True)
        return measure(run, rounds=3).median
    except Exception:  # compilers refuse in many ways; every one of them means: not these sizes
        return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.tune", description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(OPERATIONS)}; default: all")
    parser.add_argument("--dry-run", action="store_true", help="print what is fastest, and write nothing")
    options = parser.parse_args(arguments)
    try:
        check(options.operations)
    except ValueError as error:
        parser.error(str(error))
    device, tuned = jax.devices()[0].device_kind, False
    for name in options.operations or OPERATIONS:
        operation = OPERATIONS[name]
        found: dict[tuning.Kernel, Any] = {}
        for case in cases(operation):
            for implementation in operation.implementations:
                for kernel, blocks in tune(operation, case, implementation).items():
                    print(f"{kernel}: {blocks}", flush=True)
                    found[kernel] = blocks
        tuned = tuned or bool(found)
        if found and not options.dry_run:  # at once: the next operation may take hours
            tuning.record(device, found)
            print(f"wrote {tuning.TABLE}")
    if not tuned:
        print(f"no kernel runs on {device}: there is nothing to tune")


if __name__ == "__main__":
    main()
