"""The step that `jaxlm plan` and `jaxlm compile` examine: an experiment, and its mesh on chips that may be absent."""

import argparse
from typing import TYPE_CHECKING

from jaxlm.cli.paths import location
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.config import Experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--workload", choices=("train", "prefill", "decode"), default="train", help="the kind of step (train)"
    )


def require(command: str, arguments: argparse.Namespace) -> None:
    """Raise InputError if the config or the chips are missing."""
    missing = [name for name, value in (("CONFIG", arguments.config), ("--on", arguments.on)) if value is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)} (see jaxlm {command} --help)")


def load(arguments: argparse.Namespace) -> "Experiment":
    """Return the experiment with its overrides. Raises InputError, also if --mesh and an override both set the mesh."""
    from jaxlm import config

    experiment = config.load(arguments.config, arguments.overrides, arguments.workload)
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
