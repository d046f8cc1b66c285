"""The choice between layers in a loop and layers written out, where `execution.scan_layers` is "auto".

A loop on a GPU copies what layers keep into stacks and out of them (`jaxlm.costs.counted.layer_stacks`); written-out
layers compile for longer. The choice follows from the workload and the memory of a device alone: a run that is resumed
on the same chip compiles the same program.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.target import Target, of_devices
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.stack_memory import first_stage, stack_memory
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout

# The most layers that are written out. On two cores a CPU's program with 12 layers compiles in twice the time of the
# loop, and each further layer takes as long again.
_MOST_LAYERS = {"gpu": 48, "cpu": 12}


class LayerChoice(NamedTuple):
    """The choice for equal layers of a training step, in a loop or written out, and its reason."""

    in_loop: bool
    reason: str

    def __str__(self) -> str:
        return f"layers {'in a loop' if self.in_loop else 'written out'}: {self.reason}"

    def row(self) -> dict[str, Any]:
        """Return the choice as JSON."""
        return {"scan_layers": self.in_loop, "reason": self.reason}


def choose(work: Workload, capacity: int | None, stack: Stack = JAXLM) -> LayerChoice:
    """Choose for a training step on its platform, whose devices have `capacity` bytes of memory (None: unknown), of a
    pipeline for its first stage."""
    execution, platform = work.execution, work.platform
    if execution.scan_layers != "auto":
        return LayerChoice(execution.scan_layers, f"execution.scan_layers = {str(execution.scan_layers).lower()}")
    if stack.layers == "unrolled":
        return LayerChoice(False, "other software, without a loop over layers")
    layers = first_stage(work, stack).stage_layers.model.num_layers
    name, remat = platform.upper(), "named" if isinstance(work.remat, tuple) else work.remat
    if platform == "tpu":
        return LayerChoice(True, name)
    if layers > (most := _MOST_LAYERS[platform]):
        return LayerChoice(True, f"{name}, {layers} layers, more than {most}")
    # XLA for CPUs computes nothing again in written-out layers: it merges what rematerialisation repeats.
    if work.remat == "full" or (platform == "cpu" and work.remat != "none"):
        return LayerChoice(True, f"{name}, remat {remat}")
    if platform == "gpu" and capacity is not None:
        needed, in_loop = (stack_memory(work.with_execution(scan_layers=each), stack).total for each in (False, True))
        if needed > capacity and in_loop < needed:
            sizes = f"{units.memory(needed)}, more than a device's {units.memory(capacity)}"
            return LayerChoice(True, f"{name}, counted memory of {sizes}")
    return LayerChoice(False, f"{name}, {layers} layer{'s' * (layers > 1)}, remat {remat}")


def resolved(work: Workload, capacity: int | None, stack: Stack = JAXLM) -> Workload:
    """Return a workload whose `scan_layers` is chosen, if it trains; see `choose`."""
    return work.with_execution(scan_layers=choose(work, capacity, stack).in_loop) if work.kind == "train" else work


def with_choice(experiment: Experiment, work: Workload) -> Experiment:
    """Return the experiment with the `scan_layers` of a workload of it that is `resolved`."""
    chosen = {"scan_layers": work.execution.scan_layers}
    return experiment.model_copy(update={"execution": experiment.execution.model_copy(update=chosen)})


def on_mesh(work: Workload, mesh: Mesh) -> tuple[Workload, Target | None]:
    """Return a workload, `resolved`, on the chips of a mesh, and these chips; None for devices that no catalog has."""
    device = mesh.devices.flat[0]
    try:
        target = of_devices(device.device_kind, device.platform, mesh.size)
    except InputError:
        target = None
    if target:
        work = work.on(target.chip)
    elif device.platform == "cpu":
        work = work.on_cpu()
    elif device.platform == "tpu":
        work = replace(work, platform="tpu")
    return work, target


def experiment_on(experiment: Experiment, mesh: Mesh) -> Experiment:
    """Return the experiment with its `scan_layers` chosen for training on the devices of a mesh."""
    work, target = on_mesh(Workload.of(experiment, Layout(mesh.shape)), mesh)
    return with_choice(experiment, resolved(work, target and target.chip.device_capacity()))
