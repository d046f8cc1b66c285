"""Keep a model with its matrices in few bits, as a run, and measure its loss on a text before and after."""

import argparse
import json
import sys
from typing import get_args

from jaxlm import api
from jaxlm.cli import trained
from jaxlm.cli.paths import location
from jaxlm.core import units
from jaxlm.core.addresses import with_addresses
from jaxlm.core.errors import InputError
from jaxlm.models.quantize_config import GROUPS, QuantizeKind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=location,
        metavar="MODEL",
        help="a run or a Hugging Face directory, here or in a bucket, or hf:ORG/NAME",
    )
    parser.add_argument("run", type=location, metavar="RUN", help="the folder of the run to create")
    parser.add_argument("--to", choices=get_args(QuantizeKind), required=True, help="the width (execution.quantize)")
    parser.add_argument(
        "--group",
        type=int,
        choices=GROUPS,
        help="inputs that share a scale (execution.quantize_group)",
    )
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="a file, directory or glob of text to measure the loss on"
    )
    trained.add_checkpoint(parser)


def main(arguments: argparse.Namespace) -> int:
    if arguments.group is not None and arguments.to == "w8a8":
        raise InputError("--group is not of w8a8, which has one scale for all inputs: leave it out, or give --to int8")
    if arguments.group not in (None, 32) and arguments.to == "mxfp4":
        raise InputError("--group of mxfp4 is 32: leave it out, or give --to int4")
    if not arguments.data:
        raise InputError("--data names no text; give a file, directory or glob")

    from jaxlm.cli.progress import Bar

    done = api.quantize(
        arguments.model,
        arguments.run,
        to=arguments.to,
        data=arguments.data,
        group=arguments.group,
        checkpoint=arguments.checkpoint,
        average=arguments.ema,
        display=Bar(steps=0),
        say=lambda line: print(f"jaxlm: {line}", file=sys.stderr),
    )
    if arguments.json:
        print(json.dumps(done.row()))
        return 0
    print(
        f"{with_addresses(arguments.run)}: {done.quantize}, {done.parameters:,} parameters in "
        f"{units.memory(done.bytes)}\n"
        f"perplexity {done.before.perplexity:.4f} before, {done.after.perplexity:.4f} after (loss "
        f"{done.before.loss:.4f}, {done.after.loss:.4f}), over {done.after.tokens:,} tokens"
    )
    return 0
