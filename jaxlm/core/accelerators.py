"""The accelerators of this machine, found without starting JAX."""

import glob
import os
import sys
from pathlib import Path

# Device files of TPUs, NVIDIA and AMD GPUs on Linux (the last one: under WSL).
_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dxg")
_NVIDIA = "/proc/driver/nvidia/gpus/*/information"

# The share of a GPU's memory that JAX takes as it starts, as much as plans count on (`jaxlm.costs.plan.HEADROOM`). JAX
# takes 75 % by itself; what is left is for the CUDA context and NCCL.
GPU_MEMORY_SHARE = 0.9
# Names of the setting. JAX refuses both at once; the second is the older one.
_MEMORY_SHARE, _OLDER_NAME = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def found() -> tuple[str, ...]:
    """Return the device files of accelerators, and the GPU models that NVIDIA's driver reports."""
    files = {file for pattern in _FILES for file in glob.glob(pattern)}
    models = {f"{file}: {line}" for file in glob.glob(_NVIDIA) for line in _models(Path(file))}
    return tuple(sorted(files | models))


def platforms() -> str:
    """Return the platforms for JAX: `JAX_PLATFORMS`, or "cpu" on Linux without accelerators; "" leaves it to JAX."""
    return os.environ.get("JAX_PLATFORMS") or ("cpu" if sys.platform == "linux" and not found() else "")


def choose() -> None:
    """Configure JAX for `platforms()`, and for `GPU_MEMORY_SHARE` of a GPU unless the environment has another share.

    Without platforms JAX tries every installed plugin, and each prints a complaint.
    """
    import jax

    if chosen := platforms():
        os.environ["JAX_PLATFORMS"] = chosen
        jax.config.update("jax_platforms", chosen)
    has_gpu = any(file.startswith(_GPUS) for file in found())
    if has_gpu and chosen != "cpu" and not os.environ.get(_OLDER_NAME):
        os.environ.setdefault(_MEMORY_SHARE, str(GPU_MEMORY_SHARE))


def _models(file: Path) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
