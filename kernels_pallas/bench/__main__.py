"""Time every operation on the device that is here, against XLA's own version, libraries' and PyTorch's.

python -m kernels_pallas.bench                            all operations; writes benchmarks/results/<chip>/kernels.json
python -m kernels_pallas.bench rms_norm --out DIR         one of them

Where it ends before all is measured, the same command goes on, and leaves out what it ended in.
"""

import argparse
import sys
from pathlib import Path

from kernels_pallas.bench.record import results_file
from kernels_pallas.bench.run import benchmark, device
from kernels_pallas.registry import OPERATIONS

STOPPED = "stopped: the same command goes on from here"


def show(row: dict) -> None:
    """One line for one row."""
    name = f"{row['operation']:<22} {row['case']:<30} {row['direction']:<9} {row['implementation']:<13}"
    if "reason" in row:
        print(f"{name} left out: {row['reason']}", flush=True)
        return
    speedup = "" if row["speedup"] is None else f"{row['speedup']:6.2f} × XLA"
    print(
        f"{name} {row['seconds'] * 1e6:12.1f} µs  "
        f"{row['bytes_per_s'] / 1e9:8.1f} GB/s ({row['of_copy']:4.0%} of copy)  "
        f"{row['flops_per_s'] / 1e12:8.2f} TFLOP/s ({row['of_matmul']:4.0%} of matmul) {speedup}",
        flush=True,
    )


def show_ceilings(results: dict) -> str:
    """What the chip itself did."""
    limits = results["ceilings"]
    return (
        f"copy {limits['copy_bytes_per_s'] / 1e9:.1f} GB/s, {limits['matmul_dtype']} matmul "
        f"{limits['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(OPERATIONS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of results")
    parser.add_argument("--rounds", type=int, default=7, help="of each measurement, whose median counts")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench", description=__doc__.splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    file = results_file(options.out, device())
    try:
        results = benchmark(options.operations, options.rounds, show, file)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        raise SystemExit(130) from None
    print(f"{show_ceilings(results)}; wrote {file}")


if __name__ == "__main__":
    main()
