"""The step that `jaxlm plan` and `jaxlm compile` examine: an experiment, and its mesh on chips that may be absent."""

import argparse
from typing import TYPE_CHECKING, Any

from jaxlm.cli import trained
from jaxlm.cli.paths import location
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.config import Experiment


def add_arguments(parser: argparse.ArgumentParser, more_workloads: dict[str, str] | None = None) -> None:
    """Add the experiment and the kind of step; `more_workloads` are those that are no step, with their explanation."""
    more = more_workloads or {}
    parser.add_argument(
        "config",
        nargs="?",
        type=location,
        metavar="CONFIG",
        help="a TOML file ([model] alone is enough), a RUN, or the name of a configuration that comes with jaxlm, such "
        "as llama3.1-8b (jaxlm config --list)",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.batch=512")
    parser.add_argument(
        "--workload",
        choices=("train", "prefill", "decode", *more),
        default="train",
        help="; ".join(["the kind of step (train)", *(f"{name}: {text}" for name, text in more.items())]),
    )
    trained.add_quantize(parser)
    add_chip(parser)


def add_chip(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chip",
        action="append",
        metavar="KEY=VALUE",
        help="a figure of the chip in place of the catalog's, such as memory_bytes_per_s=2.4e12, "
        "scale_out_bytes_per_s=25e9, watts=500 or usd_per_hour=2.5 (jaxlm hardware ID names them); several times",
    )


def chip(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures that --chip gives, nested. Raises InputError for what is no KEY=VALUE."""
    from jaxlm import config

    return config.assigned(arguments.chip or (), "memory_bytes_per_s=2.4e12")


def require(command: str, arguments: argparse.Namespace) -> None:
    """Raise InputError if the config or the chips are missing."""
    missing = [name for name, value in (("CONFIG", arguments.config), ("--on", arguments.on)) if value is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)} (see jaxlm {command} --help)")


def load(arguments: argparse.Namespace) -> "Experiment":
    """Return the experiment with its overrides. Raises InputError, also if --mesh and an override both set the mesh."""
    from jaxlm import config

    kind = "decode" if arguments.workload == "serve" else arguments.workload
    overrides = [*arguments.overrides, *trained.quantize_overrides(arguments)]
    experiment = config.load(arguments.config, overrides, kind)
    twice = [key for key in config.overridden(arguments.overrides) if key.startswith("mesh.")]
    if arguments.mesh is not None and twice:
        raise InputError(f"--mesh {arguments.mesh} sets the whole mesh; leave out {twice[0]}, or --mesh")
    return experiment


def fixed(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the settings of a search that the command line gives, and which it therefore leaves as they are."""
    from jaxlm import config
    from jaxlm.costs.search import VARIED

    keys = config.overridden(arguments.overrides) if arguments.workload == "train" else ()
    return tuple(name for name, key in VARIED.items() if key in keys)
