"""The accelerators of this machine, found without starting JAX."""

import glob
import os
import sys
from pathlib import Path

# Where Linux shows a TPU, an NVIDIA or an AMD GPU (the last one: under WSL).
_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
_NVIDIA = "/proc/driver/nvidia/gpus/*/information"


def found() -> tuple[str, ...]:
    """The device files of accelerators, and the models that NVIDIA's driver names."""
    files = {file for pattern in _FILES for file in glob.glob(pattern)}
    models = {f"{file}: {line}" for file in glob.glob(_NVIDIA) for line in _models(Path(file))}
    return tuple(sorted(files | models))


def platforms() -> str:
    """The platforms that JAX is to use: as `JAX_PLATFORMS` says, or the CPU where Linux shows nothing else; "" leaves
    it to JAX."""
    return os.environ.get("JAX_PLATFORMS") or ("cpu" if sys.platform == "linux" and not found() else "")


def choose() -> None:
    """Have JAX use these platforms. Else it asks every compiler that is installed for its chips, and each complains."""
    import jax

    if chosen := platforms():
        os.environ["JAX_PLATFORMS"] = chosen
        jax.config.update("jax_platforms", chosen)


def _models(file: Path) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
