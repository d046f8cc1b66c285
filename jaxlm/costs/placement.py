"""An experiment on chips that need not be here: its mesh, and a batch that divides over it."""

import math
import re
from dataclasses import replace

from jaxlm import config
from jaxlm.config import Experiment, divisors
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware.target import COUNT, Target
from jaxlm.costs.workload import Workload
from jaxlm.parallel.config import ALL, MeshConfig
from jaxlm.parallel.layout import AXES, Layout
from jaxlm.parallel.rules import RULES, Kind


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


def layout_on(experiment: Experiment, target: Target, kind: Kind) -> Layout:
    """Return the layout of a step on these chips.

    In inference, where `mesh.fsdp` would take the devices that are left, they go to `data`, and `tensor` is what is
    given or else the smallest on which the step fits: no weight is then sent for a token.

    Raises InputError where the mesh does not divide the chips or, in training, the model and the batch.
    """
    mesh = experiment.mesh
    layout = config.layout(experiment, target.devices, kind)
    if kind == "train" or mesh.fsdp != ALL or mesh.data != 1:
        return layout
    work = Workload.of(experiment, kind=kind).on(target.chip)
    for tensor in divisors(target.devices) if mesh.tensor == 1 else (mesh.tensor,):
        layout = Layout(data=target.devices // tensor, tensor=tensor)
        if memory(replace(work, layout=layout)).total <= target.chip.device_capacity():
            break
    return layout


def batch_shards(experiment: Experiment, target: Target, kind: Kind) -> int:
    """Return the number of shards of a batch on these chips. Raises InputError as `layout_on` does."""
    mesh = experiment.mesh.layout(target.devices) if kind == "train" else layout_on(experiment, target, kind)
    return mesh.over(RULES[kind].over("batch"))


def with_batch(experiment: Experiment, parts: int, kind: Kind) -> Experiment:
    """Pad a batch that was not given until it divides into this many parts, in training each of its microbatches."""
    training = experiment.training
    if "batch" in training.model_fields_set:
        return experiment
    parts *= training.microbatches if kind == "train" else 1
    batch = parts * math.ceil(training.batch / parts)
    return experiment.model_copy(update={"training": training.model_copy(update={"batch": batch})})
