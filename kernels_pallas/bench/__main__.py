"""Time every operation on this machine's device against XLA's own version, libraries and PyTorch.

python -m kernels_pallas.bench                            all operations; writes benchmarks/results/<chip>/kernels.json
python -m kernels_pallas.bench rms_norm --out DIR         one operation

If the process ends early, the same command resumes, and skips the row that was running when it ended.
"""

import argparse
import sys
from pathlib import Path

from kernels_pallas.bench.record import results_file
from kernels_pallas.bench.run import benchmark, device
from kernels_pallas.bench.show import STOPPED, show_row, show_whole
from kernels_pallas.core.registry import OPERATIONS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench", description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(OPERATIONS)}; default: all")
    parser.add_argument("--case", action="append", default=[], metavar="PATTERN", help="such as '* 8192 × 128'")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of results")
    parser.add_argument("--rounds", type=int, default=7, help="of each measurement, whose median counts")
    options = parser.parse_args(arguments)
    file = results_file(options.out, device())
    try:
        results = benchmark(options.operations, options.rounds, show_row, file, options.case)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        raise SystemExit(130) from None
    show_whole(results, file)


if __name__ == "__main__":
    main()
