"""The devices of this machine, as the mesh that an experiment asks for."""

import math
import os
from typing import TYPE_CHECKING

from jaxlm import config
from jaxlm.config import Experiment

if TYPE_CHECKING:
    from jax.sharding import Mesh


def make_mesh(experiment: Experiment) -> "Mesh":
    """The experiment's mesh. A CPU is split into as many devices as it needs, where nobody said otherwise.

    Raises InputError where the devices here cannot make it.
    """
    import jax

    from jaxlm import sharding

    mesh = experiment.mesh
    wanted = math.prod(size for size in (mesh.data, mesh.fsdp, mesh.tensor) if size != "all")
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if wanted > 1 and not chosen:
        jax.config.update("jax_num_cpu_devices", wanted)
    devices = jax.devices()
    return sharding.make_mesh(*config.mesh_sizes(experiment, len(devices)), devices)


def describe(mesh: "Mesh") -> str:
    """One line: how many devices of which kind, and how they are factored."""
    device = mesh.devices.flat[0]
    kind = "emulated CPU device" if device.platform == "cpu" and mesh.size > 1 else device.device_kind
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} {kind}{'s' if mesh.size > 1 else ''}" + (f": {axes}" if axes else "")
