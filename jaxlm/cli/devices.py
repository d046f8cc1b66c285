"""The devices of this machine, as the mesh that an experiment specifies."""

import ctypes
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.core import accelerators
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware import calibration, catalog
from jaxlm.costs.hardware.chips import Chip
from jaxlm.parallel import processes
from jaxlm.parallel.layout import AXES
from jaxlm.parallel.rules import Kind

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Each emulated device has threads of its own.
_MOST_EMULATED = 1024
# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def make_mesh(experiment: Experiment, kind: Kind = "train") -> "Mesh":
    """Return the experiment's mesh over the devices of all processes, for steps of a kind. A CPU is split into the
    number of devices that the mesh needs of this process, unless that number was set explicitly.

    Raises InputError if the devices here cannot form the mesh.
    """
    import jax

    from jaxlm.parallel.mesh import make_mesh

    named = os.environ.get("JAX_PLATFORMS")
    accelerators.choose()
    wanted = experiment.mesh.least().size
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if wanted > 1 and not chosen:
        emulated = math.ceil(wanted / processes.process_count())
        if emulated > _MOST_EMULATED and accelerators.platforms() == "cpu":
            raise InputError(
                f"the mesh needs {emulated} devices of this CPU, and at most {_MOST_EMULATED} are emulated; lower "
                f"{', '.join(f'mesh.{axis}' for axis in AXES)}"
            )
        jax.config.update("jax_num_cpu_devices", min(emulated, _MOST_EMULATED))
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts if a plugin of that name could not start
        if named in (None, "", "cpu"):
            raise
        why = str(error) or "its plugin did not start"
        raise InputError(f"JAX_PLATFORMS={named} is not available here ({why}); change it, or unset it") from None
    if devices[0].platform == "cpu":
        keep_freed_memory()
    made = make_mesh(config.layout(experiment, len(devices), kind), devices)
    idle = {device.process_index for device in devices} - {device.process_index for device in made.devices.flat}
    if idle:
        raise InputError(
            f"a mesh of {made.size} of {len(devices)} devices leaves process {', '.join(map(str, sorted(idle)))} "
            f"without any; start fewer processes, or let {' × '.join(f'mesh.{axis}' for axis in AXES)} "
            f"be {len(devices)}"
        )
    return made


def calibrated(say: Callable[[str], None]) -> None:
    """Calibrate a CPU once per machine, or once per attempt if the result cannot be cached, so that times can be
    counted. The measurement runs in a process of its own, whose memory is released."""
    if accelerators.platforms() != "cpu":
        return
    try:
        catalog.find(catalog.HOST)
        return
    except InputError:
        pass
    try:
        calibration.check_writable()
        kept = True
        say("measuring this machine, once: jaxlm hardware host shows the figures")
    except InputError as error:
        kept = False
        say(f"measuring this machine, for this attempt alone: {error}")
    code = "import sys; from jaxlm.cli import main; sys.exit(main(['hardware', 'host', '--measure', '--json']))"
    with tempfile.TemporaryDirectory() as folder:
        where = {} if kept else {"XDG_CACHE_HOME": folder}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **where})
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        say(f"this machine could not be measured ({why}); nothing is counted in seconds")
    elif not kept:
        (row,) = json.loads(done.stdout)["rows"]
        calibration.use(Chip.model_validate({key: row[key] for key in row.keys() & Chip.model_fields.keys()}))


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. XLA's CPU programs allocate all temporaries anew at each call; returning them to
    the system and clearing them again page by page takes about a third of a small step (`benchmarks/README.md`)."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, 0)  # no block has a mapping of its own, which freeing would unmap
    mallopt(_M_TRIM_THRESHOLD, -1)  # the end of the heap is never returned
    mallopt(_M_ARENA_MAX, 1)  # one heap, so that every thread can reuse what another freed
    mallopt(_M_TOP_PAD, 2**26)  # the heap grows by 64 MiB


def describe(mesh: "Mesh") -> str:
    """Describe a mesh in one line: the number and kind of its devices, and its axes."""
    device = mesh.devices.flat[0]
    kind = "emulated CPU device" if device.platform == "cpu" and mesh.size > 1 else device.device_kind
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} {kind}{'s' if mesh.size > 1 else ''}" + (f": {axes}" if axes else "")
