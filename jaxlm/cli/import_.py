"""Convert published weights into a run, once: a Hugging Face directory, or hf:ORG/NAME of the Hub."""

import argparse
import json
import sys

from jaxlm import api
from jaxlm.cli.paths import location
from jaxlm.core.addresses import with_addresses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=location, metavar="MODEL", help="a Hugging Face directory, or hf:ORG/NAME[@REVISION]"
    )
    parser.add_argument("run", type=location, metavar="RUN", help="the folder of the run to create")


def main(arguments: argparse.Namespace) -> int:
    done = api.import_run(arguments.model, arguments.run, say=lambda line: print(f"jaxlm: {line}", file=sys.stderr))
    if arguments.json:
        print(json.dumps(done._asdict()))
    else:
        print(f"{with_addresses(arguments.run)}: {done.family}, {done.parameters:,} parameters, {done.dtype}")
    return 0
