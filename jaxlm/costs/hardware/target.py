"""Targets of several chips: a slice of TPUs, or domains of any other chip. Imports no JAX."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.core.schema import COUNT
from jaxlm.costs.hardware.catalog import HOST, find, of_kind
from jaxlm.costs.hardware.chip_changes import with_figures
from jaxlm.costs.hardware.chips import Chip, parse_topology, show_topology


@dataclass(frozen=True)
class Target:
    """The chips that a job runs on. `topology` is the slice of a TPU, such as (4, 4); for other chips it is (domains,
    chips in each), such as (2, 8) for two nodes of eight. `slices`: the number of equal slices of a TPU, which the
    network of the data center joins."""

    chip: Chip
    topology: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, text: str, figures: Mapping[str, Any] | None = None) -> "Target":
        """Parse `<id>[:<count or topology>]`: "h200-sxm:8", "h200-sxm:2x8", "tpu-v5e:4x4", "tpu-v5e:2*16x16", "host".

        `figures`: those of the chip that are not the catalog's (`chip_changes.with_figures`). A count of TPU chips
        means the most cubic slice of that size, and `2*` two slices. Without a count, a TPU is the smallest slice and
        any other target is one chip. Raises InputError if there is no such slice, and names the nearest, or if
        the chip's memory is not published.
        """
        id, colon, size = text.strip().partition(":")
        chip = with_figures(find(id), figures) if figures else find(id)
        for name in ("memory_bytes", "memory_bytes_per_s"):
            if getattr(chip, name) is None:
                raise InputError(f"{id} has no published {name}; give that of its board with --chip {name}=NUMBER")
        slices, times, topology = size.rpartition("*")
        if times and chip.slices:
            size = topology if re.fullmatch(COUNT, slices) else ""
        if colon and not re.fullmatch(f"{COUNT}(x{COUNT}){{0,2}}", size):
            raise InputError(
                f"{text!r} names no chips; write {id}:COUNT or {id}:TOPOLOGY of numbers up to 999999, such as "
                f"{_example(chip)}"
            )
        wanted = parse_topology(size) if colon else ()
        return cls(chip, _slice(chip, wanted) if chip.slices else _domains(chip, wanted), int(slices or 1))

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.topology)

    @property
    def devices(self) -> int:
        """The number of devices that JAX shards over."""
        return self.chips * self.chip.devices_per_chip

    @property
    def wraparound(self) -> tuple[bool, ...]:
        """One boolean for each axis of a TPU slice: whether its two ends are joined. Empty for other chips."""
        return self.chip.link.wraps(self.topology) if self.chip.slices else ()

    def part(self, parts: int) -> "Target":
        """Return one of equal parts of the target, of whole slices or domains. Raises InputError where these do not
        divide into them."""
        if parts == 1:
            return self
        whole = self.slices if self.chip.slices else self.chips
        if whole % parts:
            raise InputError(f"{self} does not divide into {parts} equal parts")
        if self.chip.slices:
            return Target(self.chip, self.topology, self.slices // parts)
        return Target(self.chip, _domains(self.chip, (self.chips // parts,)))

    def __str__(self) -> str:
        whole = self.chip.slices or self.topology != _domains(self.chip, (self.chips,))
        several = f"{self.slices}*" if self.slices > 1 else ""
        return f"{self.chip.id}:{several}{show_topology(self.topology) if whole else self.chips}"


def of_devices(kind: str, platform: str, count: int) -> Target:
    """Return the target of `count` devices whose JAX device kind is `kind`. CPU devices, emulated ones too, share this
    machine. Raises InputError for devices that are not in the catalog, and on a machine that is not calibrated."""
    if platform == "cpu":
        host = find(HOST)
        share = {"devices_per_chip": count, "device_memory_bytes": host.device_capacity() // count}
        return Target(host.model_copy(update=share), (1, 1))
    chip = of_kind(kind)
    if chip is None:
        raise InputError(f"devices of the kind {kind!r} are not in the catalog")
    return Target.parse(f"{chip.id}:{count // chip.devices_per_chip}")


def _example(chip: Chip) -> str:
    """Return an example of a target of this chip, for a message."""
    if chip.slices:
        return str(Target(chip, [slice for slice in chip.legal_slices() if math.prod(slice) <= 64][-1]))
    return f"{chip.id}:{chip.link.domain}" if chip.link and chip.link.domain else chip.id


def _slice(chip: Chip, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the legal slice with a topology or a count of chips; without either, the smallest."""
    legal = chip.legal_slices()
    if not wanted:
        return legal[0]
    if wanted in legal:
        return wanted
    if len(wanted) == 1:
        for slice in legal:  # the most cubic comes first
            if math.prod(slice) == wanted[0]:
                return slice

    def distance(slice: tuple[int, ...]) -> tuple[float, float]:
        pairs = itertools.zip_longest(sorted(slice), sorted(wanted), fillvalue=1)
        return abs(math.log(math.prod(slice) / math.prod(wanted))), sum(abs(math.log(a / b)) for a, b in pairs)

    near = [f"{show_topology(slice)} ({math.prod(slice)} chips)" for slice in sorted(legal, key=distance)[:3]]
    what = f"{show_topology(wanted)}" if len(wanted) > 1 else f"{wanted[0]} chips"
    raise InputError(f"{chip.id} has no slice of {what}; the nearest are {', '.join(near)}")


def _domains(chip: Chip, wanted: tuple[int, ...]) -> tuple[int, int]:
    """Return (domains, chips in each) from a count or from these two numbers."""
    if math.prod(wanted) == 1:
        return 1, 1
    if chip.link is None or chip.link.domain is None:
        known = "link to others of its kind" if chip.link is None else "size of its domain"
        raise InputError(f"{chip.id} has no known {known}; write {chip.id} for one of them")
    domain = chip.link.domain
    *above, chips = wanted
    if len(above) > 1:
        raise InputError(f"{chip.id} has no topology {show_topology(wanted)}; write a count, or NODESxCHIPS")
    if above and chips > domain:
        raise InputError(f"{chip.id} has at most {domain} chips in one domain, not {chips}")
    if above or chips <= domain:
        return (above or [1])[0], chips
    domains, over = divmod(chips, domain)
    if over:
        near = f"{domains * domain} or {(domains + 1) * domain}"
        raise InputError(f"{chip.id} comes in domains of {domain}, which do not add up to {chips}; take {near}")
    return domains, domain
