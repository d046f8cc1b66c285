"""The environment of a run: versions, commit and devices, and the memory in use."""

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_VERSIONS = ("jaxlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def environment(devices: list) -> dict[str, Any]:
    """Return versions, git commit of this code, command line, machine and devices."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "versions": versions(*_VERSIONS),
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in devices],
    }


def memory_use(devices: list) -> dict[str, int | None]:
    """Return `memory_bytes` in use and `peak_memory_bytes` of the device that uses the most. For devices that do not
    report them, such as CPUs, both are the resident memory of the process."""
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_in_use" in one for one in stats):
        peaks = [one.get("peak_bytes_in_use", one["bytes_in_use"]) for one in stats]
        return {"memory_bytes": max(one["bytes_in_use"] for one in stats), "peak_memory_bytes": max(peaks)}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {"memory_bytes": None, "peak_memory_bytes": peak}
    now = pages * resource.getpagesize()
    return {"memory_bytes": now, "peak_memory_bytes": max(now, peak)}  # the peak was read earlier


def versions(*names: str) -> dict[str, str | None]:
    """Return the versions of packages; None for a package that is not installed."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Return the commit of this code, with the suffix "+changes" if files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("--no-optional-locks", "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
