"""The step that `jaxlm plan` and `jaxlm compile` are asked about: an experiment, and its mesh on chips that need not be
here."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlm.errors import InputError

if TYPE_CHECKING:
    from jaxlm.config import Experiment, MeshConfig
    from jaxlm.costs.hardware import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="a TOML file; one with [model] alone will do"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.batch=512")
    parser.add_argument("--workload", choices=("train", "prefill", "decode"), default="train", help="the step (train)")


def require(command: str, arguments: argparse.Namespace) -> None:
    """Raises InputError where the config or the chips are not given."""
    missing = [name for name, value in (("CONFIG", arguments.config), ("--on", arguments.on)) if value is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)} (see jaxlm {command} --help)")


def divided(arguments: argparse.Namespace, target: "Target") -> "tuple[Experiment, tuple[int, int, int]]":
    """The experiment and its (data, fsdp, tensor), which are checked. A batch that nobody gave is filled up until the
    mesh divides it."""
    from jaxlm import config

    experiment = config.load(arguments.config, arguments.overrides)
    mesh = experiment.mesh if arguments.mesh is None else parse_mesh(arguments.mesh)
    sizes = config.divided(mesh, target.devices)
    experiment = with_batch(arguments, experiment, sizes[0] * sizes[1])
    config.check_mesh(experiment, *sizes)
    return experiment, sizes


def with_batch(arguments: argparse.Namespace, experiment: "Experiment", parts: int) -> "Experiment":
    """With a batch that divides into so many parts per microbatch, where none was given."""
    from jaxlm import config

    if "batch" in experiment.training.model_fields_set:
        return experiment
    parts *= experiment.training.microbatches
    batch = parts * math.ceil(experiment.training.batch / parts)
    return config.load(arguments.config, [*arguments.overrides, f"training.batch={batch}"])


def parse_mesh(text: str) -> "MeshConfig":
    """The mesh of "fsdp=8,tensor=2"; data and tensor are 1 and fsdp is the rest where they are not named."""
    from jaxlm.config import MeshConfig

    sizes = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
    if not sizes.keys() <= MeshConfig.model_fields.keys() or not all(n.isdecimal() and int(n) for n in sizes.values()):
        raise InputError(f"--mesh {text!r} is not AXIS=N,… with axes data, fsdp, tensor, such as fsdp=8,tensor=2")
    return MeshConfig(**{axis: int(size) for axis, size in sizes.items()})
