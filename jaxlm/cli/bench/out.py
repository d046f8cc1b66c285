"""Figures of a measurement: shown, as JSON, or in a file."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from jaxlm.cli.paths import path
from jaxlm.core.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file."""
    parser.add_argument("--out", type=path, metavar="FILE", help="write the figures to FILE, as JSON")


def check(arguments: argparse.Namespace) -> None:
    """Raise InputError where the file cannot be written, before anything is measured."""
    from jaxlm.core.files import unwritable

    if arguments.out and (why := unwritable(arguments.out.parent)):
        raise InputError(f"--out {arguments.out}: {why}")


def give(arguments: argparse.Namespace, figures: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    """Write the figures where they are asked for, and print them: as JSON, or as `show` does."""
    from jaxlm.core.files import replace

    if arguments.out:
        replace(arguments.out, json.dumps(figures, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(figures))
    else:
        show(figures)
