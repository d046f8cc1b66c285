"""The layout of an experiment's mesh, and what it must divide."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.schema import table_at
from jaxlm.models.config import ModelConfig
from jaxlm.parallel import layout_choice
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.layout_choice import ModelSize
from jaxlm.parallel.rules import ENGINE, RULES, TRAIN, Kind

# Keys of sizes that may be rounded up to suit a mesh; others are bound to one another.
_PADDABLE = ("vocab_size", "d_ff")
# What a mesh must divide in inference, where what it does not divide may stay whole.
_DIVIDED = frozenset({"heads", "experts"})
_INFERENCE = replace(ENGINE, may_stay_whole=ENGINE.may_stay_whole - _DIVIDED)


def layout(experiment: Experiment, devices: int, kind: Kind = "train") -> Layout:
    """Return the experiment's mesh layout on this many devices, checked.

    Raises InputError where it does not fit the devices or, in training, the model and the batch.
    """
    if kind == "train":
        mesh_layout = layout_of_any_batch(experiment, devices)
    else:
        mesh_layout = experiment.mesh.layout(devices)
        layout_choice.check_used(mesh_layout, RULES[kind])
    check_layout(experiment, mesh_layout, kind, devices)
    if kind == "train":
        _check_used(experiment, mesh_layout)
    return mesh_layout


def layout_of_any_batch(experiment: Experiment, devices: int) -> Layout:
    """Return the experiment's mesh layout in training on this many devices, for a batch that it divides.

    Raises InputError where it does not fit the devices or the model.
    """
    sizes = divided_by_mesh(experiment.model)
    mesh_layout = layout_choice.training_layout(experiment.mesh, devices, TRAIN, sizes)
    layout_choice.check_divides(mesh_layout, TRAIN, sizes, devices)
    return mesh_layout


def say_layout(experiment: Experiment, layout: Layout) -> str | None:
    """Return a line that says that a step of training has another layout than its mesh gives, which does not divide the
    model, or that an axis of it has no experts to shard; None where neither is so."""
    divided = layout_choice.say_divided(experiment.mesh, layout, TRAIN, divided_by_mesh(experiment.model))
    over = _several(TRAIN.over("experts"), layout)
    if not over or _has_experts(experiment.model):
        return divided
    shards, (like, *_) = layout.over(over), TRAIN.over("embed")
    idle = f"{layout_choice.describe_axes(over)} = {shards} is more of mesh.{like}: the model has no experts"
    return f"{divided}; {idle}" if divided else idle


def _has_experts(model: ModelConfig) -> bool:
    return any(size.axis == "experts" for size in divided_by_mesh(model))


def check_layout(experiment: Experiment, layout: Layout, kind: Kind = "train", devices: int | None = None) -> None:
    """Raise InputError where a layout does not divide the model or the batch in training, naming the number to change,
    or a mesh of so many `devices`.

    In inference the heads of queries and the experts must divide too; another dimension that the layout does not divide
    stays whole on every device.
    """
    if kind != "train":
        layout_choice.check_divides(layout, _INFERENCE, _divided_in_inference(experiment.model), devices)
        return
    training = experiment.training
    layout_choice.check_divides(layout, TRAIN, divided_by_mesh(experiment.model), devices)
    _check_rounds(experiment, layout)
    over = _several(TRAIN.over("batch"), layout)
    rows, parts = training.batch // training.microbatches, layout.over(over)
    if rows % parts:
        fitting = math.ceil(rows / parts) * parts * training.microbatches
        raise InputError(
            f"{layout_choice.describe_axes(over)} = {parts} does not divide the {rows} rows of a microbatch "
            f"(training.batch / training.microbatches): set training.batch to {fitting}"
        )
    if layout.over(TRAIN.over("layers")) > 1:
        check_stages(experiment)
    if training.local_sgd is not None and devices is not None and layout.over(TRAIN.replicas) == 1:
        raise InputError(
            f"training.local_sgd trains a replica for each shard of {layout_choice.describe_axes(TRAIN.replicas)}, and "
            "there is 1: set it to the number of slices, for example, or leave training.local_sgd out"
        )
    over = _several(TRAIN.over("sequence"), layout)
    chunks = 2 * layout.over(over)  # `jaxlm.parallel.columns`
    if chunks > 2 and training.sequence % chunks:
        fitting = math.ceil(training.sequence / chunks) * chunks
        raise InputError(
            f"2 × {layout_choice.describe_axes(over)} = {chunks} does not divide training.sequence = "
            f"{training.sequence}, of which each device has two chunks: set training.sequence to {fitting}"
        )
    in_order = [block.attention.kind for block in experiment.model.layers if block.attention.carries_states]
    if over and in_order:
        raise InputError(
            f"model.attention.kind = {in_order[0]} reads the tokens of a sequence in order: set "
            f"{layout_choice.describe_axes(over)} to 1"
        )


def _several(mesh_axes: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """Return those mesh axes that have several devices."""
    return tuple(axis for axis in mesh_axes if layout[axis] > 1)


def check_stages(experiment: Experiment) -> None:
    """Raise InputError for what a step does not do on the stages of a pipeline."""
    (axis,) = TRAIN.over("layers")
    if experiment.training.local_sgd is not None:
        raise InputError(f"training.local_sgd is of whole models: leave it out, or set mesh.{axis} to 1")
    if experiment.dpo is not None:
        raise InputError(f"mesh.{axis} carries text alone, and [dpo] compares answers: set it to 1")
    if experiment.records.norms_every is not None:
        raise InputError(f"records.norms_every looks at all layers of a device: leave it out, or set mesh.{axis} to 1")


def _check_rounds(experiment: Experiment, layout: Layout) -> None:
    """Raise InputError where stages do not divide the microbatches that go around them together, or these the batch."""
    (axis,) = TRAIN.over("layers")
    rounds, stages, training = experiment.execution.pipeline_rounds, layout[axis], experiment.training
    if rounds == 1 or stages == 1:
        return
    shards = layout.over(TRAIN.over("batch"))
    microbatches = math.ceil(training.microbatches / stages) * stages
    batch = math.ceil(training.batch / (microbatches * shards)) * microbatches * shards
    wrong, right = [], []
    if training.microbatches != microbatches:
        given = f"training.microbatches = {training.microbatches}, which go around {rounds} times together"
        wrong.append(f"mesh.{axis} = {stages} does not divide {given}")
        right.append(f"training.microbatches to {microbatches}")
    if training.batch != batch:
        wrong.append(f"{microbatches} microbatches of {shards} shards do not divide training.batch = {training.batch}")
        right.append(f"training.batch to {batch}")
    if wrong:
        divides = training.batch % (training.microbatches * shards) == 0
        otherwise = ", or execution.pipeline_rounds to 1" if divides else ""
        raise InputError(f"{', and '.join(wrong)}: set {' and '.join(right)}{otherwise}")


def _check_used(experiment: Experiment, layout: Layout) -> None:
    """Raise InputError for settings of a mesh axis on a mesh that is final and has none, or of experts in a model that
    has none. A search may yet find a mesh."""
    execution, default = experiment.execution, type(experiment.execution)()
    for logical, keys in (
        ("layers", ("pipeline_rounds", "pipeline_gather")),
        ("sequence", ("context_parallel",)),
        ("experts", ("expert_parallel",)),
    ):
        (axis,) = TRAIN.over(logical)
        for key in keys:
            value, unset = (getattr(each, key) for each in (execution, default))
            if value == unset:
                continue
            if logical == "experts" and not _has_experts(experiment.model):
                raise InputError(
                    f"execution.{key} = {value} is of experts, and the model has none: set execution.{key} to {unset}"
                )
            if layout[axis] == 1:
                raise InputError(
                    f"execution.{key} = {value} needs mesh.{axis} above 1: raise it, or set execution.{key} to {unset}"
                )


def may_serve(layout: Layout, model: ModelConfig) -> bool:
    """Return whether a layout divides what it must divide in inference (`check_layout`)."""
    return layout_choice.divides(layout, _INFERENCE, _divided_in_inference(model))


def _divided_in_inference(model: ModelConfig) -> list[ModelSize]:
    return [size for size in divided_by_mesh(model) if size.axis in _DIVIDED]


def divided_by_mesh(model: ModelConfig) -> list[ModelSize]:
    """Return the sizes of a model that a mesh must divide, each once."""
    sizes: dict[ModelSize, None] = {}
    for i, (_, block) in enumerate(model.entries):
        for name, section in (("attention", block.attention), ("feed_forward", block.feed_forward)):
            for key, axis in section.logical_axes.items():
                if (size := functools.reduce(_member, key.split("."), section)) is None:
                    continue
                own = model.pattern and key in table_at(name, model.pattern[i].patch)
                place = f"model.pattern[{i}]" if own else "model"
                sizes[ModelSize(axis, f"{place}.{name}.{key}", size, key in _PADDABLE)] = None
    tables = (("vocab", "vocab_size"), ("embed", "d_model"))
    return [*sizes, *(ModelSize(axis, f"model.{key}", getattr(model, key), key in _PADDABLE) for axis, key in tables)]


def _member(section: Any, key: str) -> Any:
    """Return the value of a key; None of a table that is not there."""
    return None if section is None else getattr(section, key)
