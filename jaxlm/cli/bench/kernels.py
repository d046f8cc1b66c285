"""Benchmark the kernels on this machine against XLA's own versions and PyTorch's.

Each operation of kernels_pallas is timed forward and in training (forward and backward) on random data, alongside the
chip's own rates of copying and multiplication. Results go to FOLDER/<chip>/kernels.json. After an interruption the same
command resumes and skips the case that it was interrupted in.
"""

import argparse
import json
import sys
from pathlib import Path

from jaxlm.cli.paths import path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operations", nargs="*", default=[], metavar="OPERATION", help="such as rms_norm; default: all")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only cases of such names, as '* 8192 × 128'; may be given again",
    )
    parser.add_argument(
        "--out", type=path, default=Path("benchmarks/results"), metavar="FOLDER", help="folder for the results"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement; the median is reported")


def main(arguments: argparse.Namespace) -> int:
    from jaxlm.core import accelerators
    from jaxlm.core.errors import InputError
    from jaxlm.costs.hardware import catalog

    accelerators.choose()
    from kernels_pallas.bench import run, show
    from kernels_pallas.bench.record import results_file

    say = (lambda row: None) if arguments.json else show.show_row
    device = run.device()
    known = catalog.of_kind(device)
    file = results_file(arguments.out, known.id if known else device)
    try:
        results = run.benchmark(arguments.operations, arguments.rounds, say, file, arguments.case)
    except ValueError as error:
        raise InputError(str(error)) from None
    except KeyboardInterrupt:
        print(f"jaxlm: {show.STOPPED}", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps(results))
    else:
        show.show_whole(results, file)
    return 0
