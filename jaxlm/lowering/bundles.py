"""What a TPU's compiler schedules of a program's kernels, without a chip: bundles of instructions, of which a core
issues one a cycle unless something makes it wait, and which of its units they keep busy.

libtpu writes its schedules where flags ask for them, which it reads as it starts and which nothing documents; those of
the versions that come with JAX 0.10.2 and 0.12 are the same.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# A line of a schedule begins with the bundle's address, in hexadecimal after the first.
_ADDRESS = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s*(?:[A-Z]{2})?\s*: ")
_BRANCH = re.compile(r"\bsbr\.(?:rel|abs)\b")
_UNITS = re.compile(r"^\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt$")


class Scheduled(NamedTuple):
    """One kernel.

    Attributes:
      bundles: of all its instructions, both sides of every branch.
      longest: bundles of its longest run without a branch, where a large tile spends its time.
      busy: by unit, as libtpu calls it, which part of what it could begin in the longest run it does begin: MXU (matrix
        products), XLU (transposes and reductions over lanes), VALU (arithmetic), EUP (exponentials and their kin),
        VLOAD and VSTORE (vectors from and to VMEM, of these FILL and SPILL for want of registers), SALU (scalars).
    """

    name: str
    bundles: int
    longest: int
    busy: Mapping[str, float]


def environment(folder: Path) -> dict[str, str]:
    """Variables for a new process, in which libtpu writes schedules to the folder."""
    flags = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_pass_label_regex": "final_bundles|final_hlo-static-per-bundle-utilization",
    }
    return {"LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items())}


def read(folder: Path) -> Iterator[Scheduled]:
    """The kernels that were compiled since the folder was empty, Pallas's and XLA's own, as they were compiled."""
    for path in sorted(folder.iterdir()):
        if found := _UNITS.match(path.name):
            (listing,) = folder.glob(f"{path.name.partition('-')[0]}-{found[1]}-*[0-9]-final_bundles.txt")
            yield _scheduled(found[1], path.read_text(), listing.read_text())


def _scheduled(name: str, utilization: str, listing: str) -> Scheduled:
    """Of both files' texts."""
    # A title, the units, how many instructions each can begin in a bundle, a title, and a line for each bundle.
    _, units, capacity, _, *lines = utilization.splitlines()
    rows = [[int(number) for number in line.split()] for line in lines if line.strip()]
    bounds = {0, len(rows)}
    for line in listing.splitlines():
        if address := _ADDRESS.match(line):
            at = int(address[1], 16)
            # What can be jumped to is marked.
            bounds |= {at} if re.match(r"^\s*\w+\s*[A-Z]{2}\s*:", line) else set()
            bounds |= {at + 1} if _BRANCH.search(line) else set()
    ordered = sorted(bounds)
    first, end = max(zip(ordered, ordered[1:], strict=False), key=lambda run: run[1] - run[0])
    run = rows[first:end]
    busy = {
        unit: round(sum(row[i] for row in run) / (int(most) * len(run)), 4)
        for i, (unit, most) in enumerate(zip(units.split(", "), capacity.split(), strict=True))
    }
    return Scheduled(name.partition(".")[0], len(rows), end - first, busy)
