"""Measure this machine: the kernels against XLA's own versions and PyTorch's.

Each operation of kernels_pallas is timed forward and in training (forward and backward), on random data, beside what
the chip itself can copy and multiply; results go to FOLDER/<chip>/kernels.json.
"""

import argparse
import json
from pathlib import Path

from jaxlm.cli.paths import path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["kernels"], help="what to measure")
    parser.add_argument("operations", nargs="*", default=[], metavar="OPERATION", help="such as rms_norm; default: all")
    parser.add_argument("--out", type=path, default=Path("benchmarks/results"), metavar="FOLDER", help="of results")
    parser.add_argument("--rounds", type=int, default=7, help="of each measurement, whose median counts")


def main(arguments: argparse.Namespace) -> int:
    from jaxlm import accelerators
    from jaxlm.costs import hardware
    from jaxlm.errors import InputError

    accelerators.choose()
    from kernels_pallas.bench import __main__ as shown
    from kernels_pallas.bench import run

    say = (lambda row: None) if arguments.json else shown.show
    try:
        results = run.benchmark(arguments.operations, arguments.rounds, say, arguments.out)
    except ValueError as error:
        raise InputError(str(error)) from None
    known = hardware.of_kind(results["device"])
    file = run.write(results, arguments.out, known.id if known else None)
    print(json.dumps(results) if arguments.json else f"{shown.show_ceilings(results)}; wrote {file}")
    return 0
