"""Write a model as a Hugging Face directory: safetensors, config.json and its tokenizer; or adapters alone."""

import argparse
import json
import sys

from jaxlm import api
from jaxlm.cli import trained
from jaxlm.cli.paths import location
from jaxlm.core.addresses import with_addresses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=location,
        metavar="RUN",
        help="a run or a Hugging Face directory, here or in a bucket, or hf:ORG/NAME",
    )
    parser.add_argument("folder", type=location, metavar="HF_DIR", help="the Hugging Face directory to create")
    parser.add_argument(
        "--adapter", action="store_true", help="write only the adapters of a run with [lora], as a PEFT directory"
    )
    trained.add_checkpoint(parser)


def main(arguments: argparse.Namespace) -> int:
    done = api.export(
        arguments.run,
        arguments.folder,
        checkpoint=arguments.checkpoint,
        average=arguments.ema,
        adapter=arguments.adapter,
        say=lambda line: print(f"jaxlm: {line}", file=sys.stderr),
    )
    if arguments.json:
        print(json.dumps(done._asdict()))
    else:
        print(f"{with_addresses(arguments.folder)}: {done.family}, {done.parameters:,} parameters")
    return 0
