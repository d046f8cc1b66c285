"""The environment of a run: versions, commit and devices, the memory in use, and what else the machine does."""

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


class MachineLoad:
    """The work of other programs on this machine since this object was made."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def others(self) -> float | None:
        """Return the share of all cores that other programs, or other virtual machines, have kept busy until now.

        None where the system does not tell.
        """
        now = _processor_seconds()
        if self._before is None or now is None:
            return None
        whole, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        return min(max(busy - own, 0.0) / whole, 1.0) if whole > 0 else None


def _processor_seconds() -> tuple[float, float, float] | None:
    """Return the seconds of all cores, of those the busy ones, and of those the ones of this process."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]  # idle and waiting for a disk are 3 and 4
    except (OSError, ValueError):
        return None
    own, per_second = os.times(), os.sysconf("SC_CLK_TCK")
    spent = own.user + own.system + own.children_user + own.children_system
    return sum(ticks) / per_second, (sum(ticks) - sum(ticks[3:5])) / per_second, spent


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
