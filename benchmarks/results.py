"""Result files: results/<chip>/<benchmark>.json, with the machine, versions and command that produced them."""

import json
import platform
import re
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxlm.core import files
from jaxlm.costs.hardware import catalog

FOLDER = Path(__file__).parent / "results"
_PACKAGES = (
    "jaxlm",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvdisasm",
    "nvidia-nvptxcompiler",
    "flax",
    "optax",
    "torch",
    "transformers",
    "llama-cpp-python",
    "ray",
    "triton",
    "numpy",
)
_COMPILERS = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu"),
    *("nvidia-cuda-nvcc", "nvidia-nvptxcompiler"),
)


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def compiled_earlier(file: Path, key: str) -> dict[str, Any]:
    """Return a results file's value at a key, for a run that adds to it; empty if there is no file.

    Exits if the file is of other compiler versions than those installed, since its header would hold for one part only.
    """
    if not file.exists():
        return {}
    earlier = json.loads(file.read_text())
    wrote, installed = compilers(earlier)
    if installed != wrote:
        raise SystemExit(
            f"{file.name} is of {_listed(wrote)}, but {_listed(installed)} is installed: run all cases again"
        )
    return earlier[key]


def compilers(earlier: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the compiler versions that results were recorded with, and those installed of the same compilers."""
    wrote = {name: earlier["versions"][name] for name in _COMPILERS if name in earlier["versions"]}
    return wrote, versions(tuple(wrote))


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def file_of(benchmark: str, chip: str, folder: Path = FOLDER) -> Path:
    """Return the file of one benchmark's results."""
    return folder / re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") / f"{benchmark}.json"


def of_today(file: Path) -> dict[str, Any]:
    """Return a results file of this day and these versions, to which a run may add; empty where there is none."""
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return earlier if (earlier["day"], earlier["versions"]) == (_today(), versions()) else {}


def write(benchmark: str, chip: str, results: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write one benchmark's results with chip, versions, command and day, and return the file."""
    command = shlex.join(["python", Path(sys.argv[0]).name, *map(_without_folders, sys.argv[1:])])
    path = file_of(benchmark, chip, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {
        "benchmark": benchmark,
        "command": command,
        "day": _today(),
        "chip": chip,
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions(),
        **results,
    }
    files.replace(path, json.dumps(described, indent=1) + "\n")
    return path


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _processor() -> str:
    """Return the host processor's name on Linux: equal instruction sets still differ by model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def chip(device_kind: str) -> str:
    """Return the catalog id of the chip that JAX and PyTorch name so; the name itself if it has none."""
    if device_kind == "cpu":
        return cpu()
    known = catalog.of_kind(device_kind)
    return known.id if known else device_kind


def cpu() -> str:
    """Return the processor's vector extension and number of cores; "cpu" if the extension is unknown."""
    import os

    name = "cpu"
    info = Path("/proc/cpuinfo")
    if info.exists():
        flags = info.read_text()
        name = "cpu-avx512" if "avx512f" in flags else "cpu-avx2" if "avx2" in flags else "cpu"
    return f"{name}-{os.cpu_count()}-cores"


def _without_folders(argument: str) -> str:
    return Path(argument).name if "/" in argument else argument
