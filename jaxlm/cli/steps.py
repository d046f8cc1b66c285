"""The step that `jaxlm plan` and `jaxlm compile` examine: an experiment, and its mesh on chips that may be absent."""

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


def on_mesh(experiment: "Experiment", text: str | None) -> "Experiment":
    """Return the experiment on the mesh of --mesh, such as "fsdp=8,tensor=2", or on its own mesh without --mesh. Axes
    that are not named default to data 1, tensor 1 and fsdp the rest. Raises InputError."""
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
    """Return the number of shards of a batch on the experiment's mesh. Raises InputError if the mesh does not divide
    the devices of the target."""
    from jaxlm.parallel.rules import TRAIN

    return experiment.mesh.layout(target.devices).over(TRAIN.over("batch"))


def with_batch(experiment: "Experiment", parts: int, kind: "Kind") -> "Experiment":
    """Return the experiment with its default batch rounded up to a multiple of `parts`, in training per microbatch. A
    batch that was given explicitly stays."""
    training = experiment.training
    if "batch" in training.model_fields_set:
        return experiment
    parts *= training.microbatches if kind == "train" else 1
    batch = parts * math.ceil(training.batch / parts)
    return experiment.model_copy(update={"training": training.model_copy(update={"batch": batch})})


def held(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the settings that the command line fixes, and that a search therefore keeps."""
    from jaxlm import config

    given = config.overridden(arguments.overrides) if arguments.workload == "train" else ()
    return tuple(key for key in ("microbatches", "remat") if f"training.{key}" in given)
