"""A training step that the memory here cannot hold, refused before it starts."""

import math
import os
from typing import TYPE_CHECKING

from jaxlm.config import mesh_layout
from jaxlm.config.experiment import Experiment
from jaxlm.core import accelerators, units
from jaxlm.core.errors import InputError
from jaxlm.models.bounds import parameters_at_most, values_per_token_at_most
from jaxlm.parallel.devices import emulated_for, set_by_environment
from jaxlm.parallel.processes import process_count
from jaxlm.parallel.rules import TRAIN

if TYPE_CHECKING:
    from jaxlm.costs.counted.memory import Memory

# A step that by count needs this many times the memory is refused; below, the count may be wrong, and a line says so.
_CERTAIN = 2


def check_before_reading(experiment: Experiment) -> None:
    """Raise InputError where the CPU of this machine has not the devices of a mesh, cannot run its stages or share the
    heads of attention, or has no memory for a step.

    Starts no JAX backend, and imports JAX for stages, shared heads and large models alone: with small ones bad text is
    found sooner.
    """
    if accelerators.platforms() != "cpu":
        return
    here = set_by_environment() or emulated_for(experiment.mesh.least().size)
    layout = mesh_layout.layout(experiment, here * process_count())
    if (stages := layout.over(TRAIN.over("layers"))) > 1:
        from jaxlm.costs.stages import stage_layers
        from jaxlm.training.staged import check_dtype

        check_dtype(experiment.execution, "cpu")
        stage_layers(experiment.model, stages, experiment.execution.pipeline_rounds)
    shares_heads = experiment.execution.context_parallel == "heads"  # which counting refuses where it cannot
    if _at_most(experiment) < (capacity := _of_this_machine()) and not shares_heads:
        return
    from jaxlm.costs.counted.memory import memory
    from jaxlm.costs.workload import Workload

    # Emulated devices share the machine.
    check(memory(Workload.of(experiment, layout).on_cpu()), capacity // math.ceil(layout.size / process_count()))


def check(needed: "Memory", capacity: int | None) -> None:
    """Raise InputError where a device cannot hold a training step."""
    if capacity is None or needed.total <= _CERTAIN * capacity:
        return
    state = needed.state
    fewer = "lower training.batch or training.sequence, raise training.microbatches, or set execution.remat=full"
    remedy = fewer if state <= capacity else "choose a smaller model, or more devices"
    raise InputError(
        f"a step needs {units.memory(needed.total)} of memory on each device ({units.memory(state)} for parameters, "
        f"gradients and optimizer), which has {units.memory(capacity)}: {remedy}; jaxlm plan says what fits which chips"
    )


def _of_this_machine() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _at_most(experiment: Experiment) -> int:
    """Return more bytes than a step of a model of usual proportions takes, without counting it."""
    model, training = experiment.model, experiment.training
    per_token = values_per_token_at_most(model, training.sequence)
    return 32 * parameters_at_most(model) + 4 * training.batch * training.sequence * per_token
