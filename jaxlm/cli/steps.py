"""The step that `jaxlm plan` and `jaxlm compile` are asked about: an experiment, and its mesh on chips that need not be
here."""

import argparse
import math
import re
from typing import TYPE_CHECKING

from jaxlm.cli.paths import path
from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.config import Experiment
    from jaxlm.costs.hardware.target import Target
    from jaxlm.parallel.rules import Kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", type=path, metavar="CONFIG", help="a TOML file; one with [model] alone will do"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as training.batch=512")
    parser.add_argument("--workload", choices=("train", "prefill", "decode"), default="train", help="the step (train)")


def require(command: str, arguments: argparse.Namespace) -> None:
    """Raises InputError where the config or the chips are not given."""
    missing = [name for name, value in (("CONFIG", arguments.config), ("--on", arguments.on)) if value is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)} (see jaxlm {command} --help)")


def load(arguments: argparse.Namespace) -> "Experiment":
    """The experiment with its overrides. Raises InputError, also where both --mesh and overrides say the mesh."""
    from jaxlm import config

    experiment = config.load(arguments.config, arguments.overrides, arguments.workload)
    twice = [key for key in config.overridden(arguments.overrides) if key.startswith("mesh.")]
    if arguments.mesh is not None and twice:
        raise InputError(f"--mesh {arguments.mesh} says the whole mesh; leave out {twice[0]}, or --mesh")
    return experiment


def on_mesh(experiment: "Experiment", text: str | None) -> "Experiment":
    """The experiment on the mesh of --mesh, such as "fsdp=8,tensor=2", or on its own without it; data and tensor are 1
    and fsdp is the rest where they are not named. Raises InputError."""
    from jaxlm.costs.hardware.target import COUNT
    from jaxlm.parallel.config import MeshConfig
    from jaxlm.parallel.layout import AXES

    if text is None:
        return experiment
    sizes: dict[str, int] = {}
    for axis, _, size in (part.partition("=") for part in text.replace(" ", "").split(",")):
        if axis not in AXES or not re.fullmatch(COUNT, size):
            raise InputError(
                f"--mesh {text!r} is not AXIS=N,… with axes {', '.join(AXES)} and numbers up to 999999, "
                "such as fsdp=8,tensor=2"
            )
        if axis in sizes:
            raise InputError(f"--mesh {text!r} gives {axis} twice; give it once")
        sizes[axis] = int(size)
    return experiment.model_copy(update={"mesh": MeshConfig(**sizes)})


def parts(experiment: "Experiment", target: "Target") -> int:
    """Into how many parts the experiment's mesh cuts a batch on these chips. Raises InputError where it does not divide
    them."""
    from jaxlm.parallel.rules import TRAIN

    return experiment.mesh.layout(target.devices).over(TRAIN.over("batch"))


def with_batch(experiment: "Experiment", parts: int, kind: "Kind") -> "Experiment":
    """With a batch, where none was given, that is filled up until it divides into so many parts, in training each
    microbatch of it."""
    training = experiment.training
    if "batch" in training.model_fields_set:
        return experiment
    parts *= training.microbatches if kind == "train" else 1
    batch = parts * math.ceil(training.batch / parts)
    return experiment.model_copy(update={"training": training.model_copy(update={"batch": batch})})


def held(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Which of the settings that a search turns the command line gives, and which it therefore leaves as they are."""
    from jaxlm import config

    given = config.overridden(arguments.overrides) if arguments.workload == "train" else ()
    return tuple(key for key in ("microbatches", "remat") if f"training.{key}" in given)
