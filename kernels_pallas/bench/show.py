"""Standard output of a benchmark, while it runs and at its end."""

import shutil
import textwrap
from pathlib import Path
from typing import Any

from kernels_pallas.bench.run import SMALL

STOPPED = "stopped: the same command goes on from here"


def show_row(row: dict[str, Any]) -> None:
    """Print a row on one line, or on several where the terminal, or without one 80 columns, is narrower."""
    name = f"{row['operation']:<22} {row['case']:<30} {row['direction']:<9} {row['implementation']:<13}"
    if "reason" in row:
        _print(name, f"left out: {row['reason']}")
        return
    # What a small case reads stays in caches, which are faster than any copy.
    of_copy = "" if row["case"].startswith(SMALL) else f" ({row['of_copy']:4.0%} of copy)"
    speedup = "" if row["speedup"] is None else f"{row['speedup']:6.2f} × XLA"
    figures = (
        f"{row['seconds'] * 1e6:12.1f} µs  {row['bytes_per_s'] / 1e9:8.1f} GB/s{of_copy}  "
        f"{row['flops_per_s'] / 1e12:8.2f} TFLOP/s ({row['of_matmul']:4.0%} of matmul) {speedup}"
    )
    _print(name, figures)


def _print(name: str, what: str) -> None:
    line, width = f"{name} {what}", shutil.get_terminal_size().columns
    if len(line) > width:
        indented = textwrap.wrap(" ".join(what.split()), width, initial_indent="  ", subsequent_indent="  ")
        line = "\n".join([" ".join(name.split()), *indented])
    print(line, flush=True)


def show_whole(results: dict[str, Any], file: Path) -> None:
    """Print last lines: the chip's measured ceilings and the path of the results."""
    limits = results["ceilings"]
    print(
        f"copy {limits['copy_bytes_per_s'] / 1e9:.1f} GB/s, {limits['matmul_dtype']} matmul "
        f"{limits['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s"
    )
    print(f"wrote {file}")
