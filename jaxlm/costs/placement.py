"""An experiment on chips that need not be here: its mesh, and a batch that divides over it."""

import math
import re

from jaxlm.config import Experiment
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.target import COUNT, Target
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.layout import AXES
from jaxlm.parallel.rules import TRAIN, Kind


def on_mesh(experiment: Experiment, text: str | None) -> Experiment:
    """Return the experiment on the mesh of --mesh, such as "fsdp=8,tensor=2", or on its own without it. Axes that are
    not named are 1, fsdp the rest. Raises InputError."""
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


def batch_parts(experiment: Experiment, target: Target) -> int:
    """Return the number of parts that the experiment's mesh cuts a batch into. Raises InputError where the mesh does
    not divide these chips."""
    return experiment.mesh.layout(target.devices).over(TRAIN.over("batch"))


def with_batch(experiment: Experiment, parts: int, kind: Kind) -> Experiment:
    """Pad a batch that was not given until it divides into this many parts, in training each of its microbatches."""
    training = experiment.training
    if "batch" in training.model_fields_set:
        return experiment
    parts *= training.microbatches if kind == "train" else 1
    batch = parts * math.ceil(training.batch / parts)
    return experiment.model_copy(update={"training": training.model_copy(update={"batch": batch})})
