"""An experiment on chips that need not be here: its mesh, and a batch that the mesh divides."""

import math
from dataclasses import replace

from jaxlm.config import mesh_layout
from jaxlm.config.experiment import Experiment
from jaxlm.config.step_sizes import SIZE_KEYS, sizes
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.stack import JAXLM
from jaxlm.costs.stack_memory import stack_memory
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout, can_cross, over_slices
from jaxlm.parallel.layout_choice import describe_axes, inference_layout, parse_mesh
from jaxlm.parallel.rules import RULES, TRAIN, Kind


def on_mesh(experiment: Experiment, text: str | None) -> Experiment:
    """Return the experiment on the mesh of --mesh, such as "fsdp=8,tensor=2", or on its own mesh for None.
    Raises InputError."""
    return experiment if text is None else experiment.model_copy(update={"mesh": parse_mesh(text)})


def layout_on(experiment: Experiment, target: Target, kind: Kind) -> Layout:
    """Return the layout of a step on these chips; in inference the one that `layout_choice.inference_layout`
    chooses among those on which the step fits in memory.

    Raises InputError where the mesh does not divide the chips, the heads or, in training, the model and the batch.
    """
    if kind == "train":
        return mesh_layout.layout(experiment, target.devices, kind)
    work = Workload.of(experiment, kind=kind).on(target.chip)

    def fits(layout: Layout) -> bool:
        is_divided = all(mesh_layout.may_serve(layout, model) for model in work.models)
        is_divided = is_divided and can_cross(layout, target.slices)
        size = stack_memory(replace(work, layout=layout), JAXLM) if is_divided else None
        return size is not None and size.total <= target.chip.device_capacity()

    layout = inference_layout(experiment.mesh, target.devices, work.rules, fits)
    mesh_layout.check_layout(experiment, layout, kind, target.devices)
    return layout


def check_cache(experiment: Experiment, work: Workload) -> None:
    """Raise InputError where inference.cache_memory does not hold one sequence of a step of inference."""
    most = experiment.inference.settings().cache_bytes
    if work.kind == "train" or most is None:
        return
    needed = kv_cache(replace(work, batch=work.batch_shards))
    if needed > most:
        raise InputError(
            f"inference.cache_memory = {experiment.inference.cache_memory} does not hold one sequence of "
            f"{work.sequence:,} tokens, which needs {units.memory(needed)} on each device: raise it, or lower "
            f"{SIZE_KEYS[work.kind][1]}"
        )


def may_have_stages(experiment: Experiment, target: Target) -> bool:
    """Return whether a run on these chips can lay its layers on stages, if its model can."""
    try:
        mesh_layout.check_stages(experiment)
    except InputError:
        return False
    return target.chip.kind != "cpu" or experiment.execution.dtype == "float32"  # XLA compiles nothing else there


def say_slices(target: Target, layout: Layout) -> str | None:
    """Return a line that says that parameters cross the network between slices in every layer; None where they do
    not."""
    if target.slices == 1:
        return None
    crossing = over_slices(layout, target.slices)
    axes = [axis for axis, slices in crossing.items() if slices > 1 and axis in TRAIN.over("embed")]
    if not axes:
        return None
    first, *_ = TRAIN.replicas
    return (
        f"{describe_axes(axes)} = {layout.over(axes)} crosses the network between {target.slices} slices in every "
        f"layer: gradients alone cross it, once a step, with mesh.{first}={target.slices}"
    )


def batch_shards(experiment: Experiment, target: Target, kind: Kind) -> int:
    """Return the number of shards of a batch on these chips. Raises InputError as `layout_on` does."""
    mesh = experiment.mesh.layout(target.devices) if kind == "train" else layout_on(experiment, target, kind)
    return mesh.over(RULES[kind].over("batch"))


def say_mesh(experiment: Experiment, work: Workload) -> str | None:
    """Return a line that says that a step of training has another layout than the experiment's mesh gives, which does
    not divide the model; None where it has the same."""
    return mesh_layout.say_layout(experiment, work.layout) if work.kind == "train" else None


def say_batch(experiment: Experiment, work: Workload) -> str | None:
    """Return a line that says that a step has another batch than the experiment, which gives none; None where it has
    the same."""
    name = SIZE_KEYS[work.kind][0]
    if work.batch == sizes(experiment, work.kind)[0]:
        return None
    return f"{name} is not set: {work.batch} sequences, so that the mesh divides them"


def with_batch(experiment: Experiment, parts: int, kind: Kind) -> Experiment:
    """Pad a batch that was not given until it divides into this many parts, in training each of its microbatches."""
    name, _, key = SIZE_KEYS[kind][0].partition(".")
    section = getattr(experiment, name)
    if key in section.model_fields_set:
        return experiment
    parts *= experiment.training.microbatches if kind == "train" else 1
    batch = parts * math.ceil(getattr(section, key) / parts)
    return experiment.model_copy(update={name: section.model_copy(update={key: batch})})
