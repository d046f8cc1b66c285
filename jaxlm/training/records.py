"""What a run writes down: lines of JSON, where it ran, its memory, and a picture of its losses."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxlm.distributed import is_first
from jaxlm.files import replace

_VERSIONS = ("jaxlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


class JsonLines:
    """A file of one JSON object per line; whole lines survive a killed process."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All whole lines."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break  # the process was killed while writing this one
        return rows

    def cut_after(self, step: int) -> None:
        """Drop the lines of later steps, by their `step`, so that a resumed run writes them again."""
        if self.path.exists():
            self.replace(row for row in self.rows() if row["step"] <= step)

    def replace(self, rows: Iterable[dict[str, Any]]) -> None:
        """Put these lines in place of all there are, at once; in a job of several processes the first writes."""
        if is_first():
            replace(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def append(self, row: dict[str, Any]) -> None:
        """Write one line through to the operating system; in a job of several processes the first writes."""
        if not is_first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def environment(devices: list) -> dict[str, Any]:
    """Versions, git commit of this code, command line and devices of a start."""
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
    """`memory_bytes` in use and `peak_memory_bytes`, of the device of these that uses the most. Where the devices do
    not tell, as CPUs, they are the resident memory of the process."""
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
    return {"memory_bytes": now, "peak_memory_bytes": max(now, peak)}  # the peak was read before


def versions(*names: str) -> dict[str, str | None]:
    """Of installed packages; None for those that are not."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of this code, "+changes" behind it where files differ; None outside a checkout of it."""
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


def plot_losses(metrics: list[dict], evaluations: list[dict], path: Path) -> None:
    """Training and held-out loss over steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], lw=1, label="training batch")
    if evaluations:
        axes.plot([e["step"] for e in evaluations], [e["loss"] for e in evaluations], "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
