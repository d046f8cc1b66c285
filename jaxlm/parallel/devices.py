"""The devices of this machine, started as a mesh needs them."""

import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlm.core import accelerators
from jaxlm.core.allocator import keep_freed_memory
from jaxlm.core.errors import InputError
from jaxlm.parallel import processes
from jaxlm.parallel.layout import Layout

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Each emulated device has threads of its own.
_MOST_EMULATED = 1024


def mesh_here(least: int, layout: Callable[[int], Layout]) -> "Mesh":
    """Start this machine's devices and return a mesh over those of all processes.

    Args:
      least: devices that the mesh needs at least.
      layout: gives the layout on the number of devices that are here.

    Raises InputError as `start` and `layout` do, or where a process would be left without any device.
    """
    from jaxlm.parallel.mesh import make_mesh

    devices = start(least)
    mesh = make_mesh(layout(len(devices)), devices)
    idle = {device.process_index for device in devices} - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise InputError(
            f"a mesh of {mesh.size} of {len(devices)} devices leaves process {', '.join(map(str, sorted(idle)))} "
            f"without any; start fewer processes, or let the sizes of [mesh] multiply to {len(devices)}"
        )
    return mesh


def start(wanted: int) -> list[Any]:
    """Start JAX's backend and return the devices of all processes. The CPU of this process is split into its part of
    `wanted` devices, unless the environment sets their number.

    Raises InputError where so many are not emulated, or where the platform of JAX_PLATFORMS is not to be had.
    """
    import jax

    named = os.environ.get("JAX_PLATFORMS")
    accelerators.choose()
    if (emulated := emulated_for(wanted)) > 1:
        jax.config.update("jax_num_cpu_devices", emulated)
    if accelerators.platforms() == "cpu":
        keep_freed_memory()
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts if a plugin of that name could not start
        if named in (None, "", "cpu"):
            raise
        why = str(error) or "its plugin did not start"
        raise InputError(f"JAX_PLATFORMS={named} is not available here ({why}); change it, or unset it") from None
    return devices


def set_by_environment() -> int | None:
    """Return the devices that JAX_NUM_CPU_DEVICES, or else XLA_FLAGS, splits the CPU of each process into; None where
    neither does."""
    given = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(given) if given.isdigit() else int(flags[-1]) if flags else None


def emulated_for(wanted: int) -> int:
    """Return the devices that the CPU of each process is split into for a mesh of `wanted` devices; 1 where the
    environment sets their number. Raises InputError where so many are not emulated."""
    if set_by_environment() is not None:
        return 1
    emulated = math.ceil(wanted / processes.process_count()) if wanted > 1 else 1
    if emulated > _MOST_EMULATED and accelerators.platforms() == "cpu":
        raise InputError(
            f"the mesh needs {emulated} devices of this CPU, and at most {_MOST_EMULATED} are emulated; lower "
            f"{', '.join(f'mesh.{axis}' for axis in Layout())}"
        )
    return min(emulated, _MOST_EMULATED)


def describe(mesh: "Mesh") -> str:
    """Describe a mesh in one line: the number and kind of its devices, and its axes."""
    device = mesh.devices.flat[0]
    kind = "emulated CPU device" if device.platform == "cpu" and mesh.size > 1 else device.device_kind
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} {kind}{'s' if mesh.size > 1 else ''}" + (f": {axes}" if axes else "")
