"""Read the TPU compiler's schedules of kernels, without a TPU: instruction bundles and the utilisation of units.

A core issues one bundle a cycle unless it stalls. libtpu dumps schedules on undocumented flags, which it reads at
start-up; they are the same in the versions that come with JAX 0.10.2 and 0.12.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# A line of a schedule begins with the bundle's hexadecimal address.
_ADDRESS = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s*(?:[A-Z]{2})?\s*: ")
_BRANCH = re.compile(r"\bsbr\.(?:rel|abs)\b")
_UNITS = re.compile(r"^\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt$")


class ScheduledKernel(NamedTuple):
    """A kernel as the TPU compiler scheduled it.

    Attributes:
      bundles: number of all bundles, both sides of every branch.
      longest: bundles of the longest branch-free run, where a large tile spends its time.
      busy: utilisation of each unit in the longest run, by libtpu's names: MXU (matrix products), XLU (transposes and
        reductions over lanes), VALU (arithmetic), EUP (transcendentals), VLOAD and VSTORE (vectors from and to VMEM;
        FILL and SPILL are those that register pressure causes), SALU (scalars).
    """

    name: str
    bundles: int
    longest: int
    busy: Mapping[str, float]


class BranchFreeRun(NamedTuple):
    """Bundles that run one after the other, without a branch among them, and the utilisation of each unit in them."""

    bundles: int
    busy: Mapping[str, float]


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables for a new process whose libtpu writes schedules to the folder."""
    flags = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_pass_label_regex": "final_bundles|final_hlo-static-per-bundle-utilization",
    }
    return {"LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items())}


def read(folder: Path) -> Iterator[ScheduledKernel]:
    """Yield the kernels in the folder, Pallas's and XLA's own, in compilation order."""
    for name, runs in read_runs(folder):
        longest = max(runs, key=lambda run: run.bundles)
        yield ScheduledKernel(name, sum(run.bundles for run in runs), *longest)


def read_runs(folder: Path) -> Iterator[tuple[str, list[BranchFreeRun]]]:
    """Yield the name and the branch-free runs, in order of addresses, of each kernel in the folder."""
    for path in sorted(folder.iterdir()):
        if found := _UNITS.match(path.name):
            (listing,) = folder.glob(f"{path.name.partition('-')[0]}-{found[1]}-*[0-9]-final_bundles.txt")
            yield found[1].partition(".")[0], _runs(path.read_text(), listing.read_text())


def _runs(utilization: str, listing: str) -> list[BranchFreeRun]:
    """Parse the utilisation and the listing of one kernel."""
    # A title, the units, the capacity of each per bundle, a title, and a line for each bundle.
    _, units, capacity, _, *lines = utilization.splitlines()
    rows = [[int(number) for number in line.split()] for line in lines if line.strip()]
    bounds = {0, len(rows)}
    for line in listing.splitlines():
        if address := _ADDRESS.match(line):
            at = int(address[1], 16)
            # A jump target has a two-letter mark.
            bounds |= {at} if re.match(r"^\s*\w+\s*[A-Z]{2}\s*:", line) else set()
            bounds |= {at + 1} if _BRANCH.search(line) else set()

    def busy(run: list[list[int]]) -> dict[str, float]:
        return {
            unit: round(sum(row[i] for row in run) / (int(most) * len(run)), 4)
            for i, (unit, most) in enumerate(zip(units.split(", "), capacity.split(), strict=True))
        }

    ordered = sorted(bounds)
    runs = (rows[first:end] for first, end in itertools.pairwise(ordered))
    return [BranchFreeRun(len(run), busy(run)) for run in runs]
