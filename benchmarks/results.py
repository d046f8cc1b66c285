"""Where results go: results/<chip>/<benchmark>.json, with everything needed to read them later."""

import json
import platform
import re
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

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
    "flax",
    "optax",
    "torch",
    "triton",
    "numpy",
)
_COMPILERS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "nvidia-cuda-nvcc")


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def compiled_earlier(file: Path, key: str) -> dict[str, Any]:
    """What a file of results has under a key, for a run that adds to it; nothing where there is no file. Exits where
    compilers wrote it whose versions are others here: its header would be true of one part alone."""
    if not file.exists():
        return {}
    earlier = json.loads(file.read_text())
    wrote, here = compilers(earlier)
    if here != wrote:
        raise SystemExit(f"{file.name} is of {_listed(wrote)}, and here are {_listed(here)}: run all of it anew")
    return earlier[key]


def compilers(earlier: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The versions of the compilers that results are of, and those of the same compilers here."""
    wrote = {name: earlier["versions"][name] for name in _COMPILERS if name in earlier["versions"]}
    return wrote, versions(tuple(wrote))


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def write(benchmark: str, chip: str, results: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write one benchmark's results with chip, versions, command and day; returns the file."""
    command = shlex.join(["python", Path(sys.argv[0]).name, *map(_without_folders, sys.argv[1:])])
    path = folder / re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") / f"{benchmark}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {
        "benchmark": benchmark,
        "command": command,
        "day": time.strftime("%Y-%m-%d"),
        "chip": chip,
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions(),
        **results,
    }
    path.write_text(json.dumps(described, indent=1) + "\n")
    return path


def _processor() -> str:
    """The host's, as Linux calls it: machines whose instructions are alike still differ by library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def chip(device_kind: str) -> str:
    """The chip that JAX and PyTorch call so: its id in the catalog, where it has one."""
    if device_kind == "cpu":
        return cpu()
    known = catalog.of_kind(device_kind)
    return known.id if known else device_kind


def cpu() -> str:
    """The processor's name and number of cores, "cpu" where the system does not tell."""
    import os

    name = "cpu"
    info = Path("/proc/cpuinfo")
    if info.exists():
        flags = info.read_text()
        name = "cpu-avx512" if "avx512f" in flags else "cpu-avx2" if "avx2" in flags else "cpu"
    return f"{name}-{os.cpu_count()}-cores"


def _without_folders(argument: str) -> str:
    return Path(argument).name if "/" in argument else argument
