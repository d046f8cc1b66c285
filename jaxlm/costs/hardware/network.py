"""Counted times of collectives on a target. Units are SI; rates are one-way.

The model is the scaling book's (github:jax-ml/scaling-book): the longer of latency and transfer,

    seconds = max(hops · latency, bytes / rate)                                                    (sharding.md, case 2)

with links at their published rates and free of other traffic; programs are slower, if anything. A member that gathers
V bytes over n members lacks V (n − 1) / n bytes, and cannot have them sooner than its links deliver them. That takes
V / W on a ring with rate W in both directions together, times (n − 1) / n, which the book drops (sharding.md, "What
Have We Learned?"), and twice as long on a row whose ends are not joined. Not counted: reduction inside switches (SHARP
saves 30 % of an all-reduce, gpus.md), work on the chip, and networks thinner than a fat tree.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.target import Target

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

# One step over the network between domains. NCCL counts this much for each level of a tree of nodes
# (github:NVIDIA/nccl:src/graph/tuning.cc, hwLat: network, tree, LL); no vendor of chips publishes it.
NETWORK_LATENCY_S = 5e-6

# The two devices of a TPU v7x are joined six times as fast as by a link of the torus
# (https://docs.cloud.google.com/tpu/docs/tpu7x, "Dual-chiplet architecture").
DIE_TO_DIE_LINKS = 6


@dataclass(frozen=True)
class Dimension:
    """A dimension along which the devices of a target are laid out: `x`, `y`, `z` of a torus, `core` of a chip,
    `domain` (through a switch, links between all pairs or the host), `network` between domains. `ring`: its two ends
    are joined."""

    name: str
    size: int
    ring: bool = False

    @property
    def level(self) -> int:
        """The level of the hierarchy, from the inside: chip 0, torus or domain 1, network 2."""
        return {"core": 0, "network": 2}.get(self.name, 1)


@dataclass(frozen=True)
class Span:
    """The members of a group along one dimension.

    A group may be a part of a row: then `sharing` groups are interleaved on the same links.
    """

    dimension: Dimension
    size: int
    sharing: int = 1

    @property
    def ring(self) -> bool:
        """True if the span goes all the way around a ring."""
        return self.dimension.ring and self.size * self.sharing == self.dimension.size

    @property
    def split(self) -> bool:
        """True if the span is a part of a row of a torus."""
        return self.dimension.name in "xyz" and self.size < self.dimension.size

    def __str__(self) -> str:
        name, whole = self.dimension.name, self.dimension.size
        others = {
            "core": "cores of a chip",
            "domain": f"of {whole} in the domain",
            "network": "domains over the network",
        }
        if name in others:
            return f"{self.size} {others[name]}"
        shared = f", links shared by {self.sharing}" if self.sharing > 1 else ""
        return f"{self.size} {f'of {whole} ' * self.split}on {name} ({'ring' if self.ring else 'line'}{shared})"


class _Links(NamedTuple):
    """The links of a span, for one device: bytes/s over all of them (`rate`) and to one neighbour (`path`); the latency
    to the farthest member and to the next one; seconds · rate of an all-to-all per byte of its operand
    (`crossing`)."""

    rate: float
    path: float
    farthest_s: float
    next_s: float
    crossing: float


class _GroupLinks(NamedTuple):
    """The links of a group, by span, its latency, and what bounds how it gathers or scatters (`_bounds`)."""

    links: dict[Span, _Links]
    farthest_s: float
    bounds: list[tuple[int, float]]


class Network:
    """The layout of a mesh on a target, and the times of collectives over its axes.

    `mesh` maps axes to sizes, outermost first, in the order of `jaxlm.parallel.layout.AXES`. The layout is that
    of `jaxlm.parallel.mesh.make_mesh`: the outer axes go over the network between domains as far as they divide
    (`plan` refuses those that may not), and the rest is laid on the torus by the rule of
    `jax.experimental.mesh_utils.create_device_mesh`. Where that rule winds a slice of 4 or 8 chips along a ring, this
    class keeps the torus. Within a domain all places are equivalent.

    Raises InputError unless the mesh and the target have the same number of devices.
    """

    def __init__(self, target: Target, mesh: Mapping[str, int]):
        said = " × ".join(f"{axis}={size}" for axis, size in mesh.items())
        if any(size < 1 for size in mesh.values()):
            raise InputError(f"axes of a mesh have at least one device, not {said}")
        if math.prod(mesh.values()) != target.devices:
            raise InputError(
                f"a mesh of {said} has {math.prod(mesh.values())} devices; {target} has {target.devices} of them"
            )
        self.target = target
        self.mesh = dict(mesh)
        self._dimensions = _dimensions(target)
        *inner, network = self._dimensions
        outer, left = [], network.size
        for size in mesh.values():
            outer.append(math.gcd(size, left))
            left //= outer[-1]
        within = [size // over for size, over in zip(mesh.values(), outer, strict=True)]
        parts = _lay_out([dimension.size for dimension in inner], within)
        # For each axis, the number of its members along each dimension.
        self._spans: dict[tuple[str, ...], tuple[Span, ...]] = {}
        self._groups: dict[tuple[str, ...], _GroupLinks] = {}
        self._parts = {axis: (*part, over) for axis, part, over in zip(mesh, parts, outer, strict=True)}

    def spans(self, axes: str | Sequence[str]) -> tuple[Span, ...]:
        """Return the spans of a group over these axes, from the inside outwards; none for a group of one."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if names not in self._spans:
            self._spans[names] = self._spans_over(set(names))
        return self._spans[names]

    def _spans_over(self, axes: set[str]) -> tuple[Span, ...]:
        if unknown := axes - set(self.mesh):
            raise InputError(f"the mesh has no axis {', '.join(sorted(unknown))}; it has {', '.join(self.mesh)}")
        spans = []
        for i, dimension in enumerate(self._dimensions):
            size, block, stride = 1, 1, 1
            for axis in reversed(self.mesh):  # the members of inner axes are neighbours
                part = self._parts[axis][i]
                stride *= part
                if axis in axes and part > 1:
                    size, block = size * part, stride
            if size > 1:
                spans.append(Span(dimension, size, block // size))
        return tuple(sorted(spans, key=lambda span: span.dimension.level))

    def over(self, axes: str | Sequence[str]) -> int:
        """Return the number of devices of a group over these axes."""
        return math.prod(self.mesh[axis] for axis in ([axes] if isinstance(axes, str) else axes))

    def describe(self) -> dict[str, str]:
        """Return, for each axis, the layout of its members: "8 of 8 in the domain × 2 domains over the network"."""
        return {axis: " × ".join(map(str, self.spans(axis))) or "1 device" for axis in self.mesh}

    def seconds(self, kind: str, bytes: float, axes: str | Sequence[str]) -> float:
        """Return the seconds of one collective over these axes, while all groups of the mesh run it at once.

        `bytes` are those of the larger side on one device: the result of an all-gather; the operand of a
        reduce-scatter, an all-reduce (a reduce-scatter and an all-gather), an all-to-all or a collective-permute (by
        one place along the axes, the shortest way). A group of one takes no time. An unpublished latency counts as
        zero. Raises InputError for an unpublished rate, and for a kind that is not in `KINDS`.
        """
        if kind not in KINDS:
            raise InputError(f"there is no collective {kind!r}; the kinds are {', '.join(KINDS)}")
        return _seconds(kind, bytes, self._group((axes,) if isinstance(axes, str) else tuple(axes)))

    def seconds_between_domains(self, kind: str, bytes: float) -> float:
        """Return the seconds of one collective, as `seconds` does, of groups with one device in each domain."""
        span = Span(self._dimensions[-1], self._dimensions[-1].size)
        return _seconds(kind, bytes, self._linked((span,)))

    def _group(self, axes: tuple[str, ...]) -> _GroupLinks:
        if axes not in self._groups:
            self._groups[axes] = self._linked(self.spans(axes))
        return self._groups[axes]

    def _linked(self, spans: Sequence[Span]) -> _GroupLinks:
        links = {span: self._links(span) for span in spans}
        return _GroupLinks(links, sum(link.farthest_s for link in links.values()), _bounds(links))

    def _links(self, span: Span) -> _Links:
        chip, n, name = self.target.chip, span.size, span.dimension.name
        direct = (n - 1) / n
        if name == "network":  # a fat tree, all cards at their full rate (gpus.md, "Beyond the node level")
            rate = chip.figure("scale_out_bytes_per_s") / chip.devices_per_chip
            return _Links(rate, rate, math.ceil(math.log2(n)) * NETWORK_LATENCY_S, NETWORK_LATENCY_S, direct)
        rate, hop_s = chip.figure("link.bytes_per_s"), chip.link.latency_s or 0.0
        neighbours = 2 * (chip.link.axes or 1)
        if name == "core":  # on one chip there is no hop
            rate *= DIE_TO_DIE_LINKS / neighbours
            return _Links(rate, rate, 0.0, 0.0, direct)
        rate /= chip.devices_per_chip  # the devices of a chip share its links
        if name == "domain" and chip.link.topology == "mesh":  # links to members outside the group are idle
            path = rate / (chip.link.domain - 1)
            return _Links(path * (n - 1), path, hop_s, hop_s, direct)
        if name == "domain":
            return _Links(rate, rate, hop_s, hop_s, direct)
        path, hop_s = rate / neighbours / span.sharing, hop_s * span.sharing
        # Every member of one half sends to every member of the other half, over one link or, around a ring, two.
        crossing = (n // 2) * (n - n // 2) / n
        if span.ring:
            return _Links(2 * path, path, n // 2 * hop_s, hop_s, crossing)
        return _Links(path, path, (n - 1) * hop_s, (n - 1) * hop_s, crossing)


def _seconds(kind: str, bytes: float, group: _GroupLinks) -> float:
    """Return the seconds of one collective of a group, as `Network.seconds` does."""
    links, farthest_s, bounds = group
    if not links:
        return 0.0
    if kind == "collective-permute":
        return max(bytes / min(link.path for link in links.values()), sum(link.next_s for link in links.values()))
    if kind == "all-to-all":
        carried = _exchange(links, bytes)
    else:
        carried = max(bytes * (n - 1) / n / rate for n, rate in bounds)
    once = max(carried, farthest_s)
    return 2 * once if kind == "all-reduce" else once


def _bounds(links: Mapping[Span, _Links]) -> list[tuple[int, float]]:
    """Return, for each way that bytes come to one member as a group gathers, the number of members that have a part of
    them each, and the bytes per second.

    Levels work at the same time and the slowest decides; bytes enter a chip or a domain once, divided among the links
    of all its members (gpus.md, "Cross-node collectives"). A torus uses all directions at once (sharding.md, case 2).
    """
    bounds, inner = [], 1
    for _, group in itertools.groupby(links.items(), lambda item: item[0].dimension.level):
        level = dict(group)
        members = math.prod(span.size for span in level)
        # What one member lacks comes over all its links; what a plane of a torus lacks, over those into the plane.
        bounds.append((members, sum(link.rate for link in level.values()) * inner))
        bounds += [(span.size, link.rate * members / span.size * inner) for span, link in level.items()]
        inner *= members
    return bounds


def _exchange(links: Mapping[Span, _Links], bytes: float) -> float:
    """Return the seconds in which each member sends an equal part of `bytes` to every member, without latency.

    A level carries the bytes that stay within the levels outside it, and every direction of a torus carries all of
    these: on an even ring a quarter of an all-gather (sharding.md, "AllToAll"; gpus.md, "Cross-node collectives").
    """
    slowest = 0.0
    for span, link in links.items():
        outside = math.prod(other.size for other in links if other.dimension.level > span.dimension.level)
        slowest = max(slowest, bytes * link.crossing / outside / link.rate)
    return slowest


def _dimensions(target: Target) -> list[Dimension]:
    """Return the dimensions of a target, the network last."""
    chip, link, domains = target.chip, target.chip.link, 1
    if chip.slices:
        domains = target.slices
        inner = list(map(Dimension, "xyz", target.topology, target.wraparound))
    else:
        domains, chips = target.topology
        inner = [Dimension("domain", chips)]
        if link and link.topology == "ring":
            inner = [Dimension("x", chips, chips == link.domain)]
        elif link and link.topology == "torus2d":  # a count gives no shape: take the squarest
            short = max(n for n in range(1, math.isqrt(chips) + 1) if chips % n == 0)
            inner = list(map(Dimension, "xy", (chips // short, short), link.wraps((chips // short, short))))
    if chip.devices_per_chip > 1:
        # The order breaks ties: JAX has cores last, but first in slices of one or two planes of 2 × 2.
        small = all(row.size <= 2 for row in inner[:2])
        inner.insert(0 if small else len(inner), Dimension("core", chip.devices_per_chip))
    return [*inner, Dimension("network", domains)]


def _lay_out(dimensions: Sequence[int], axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, for each axis of a mesh, the number of its members along each dimension. Inner axes choose first."""
    free, parts = tuple(dimensions), []
    for axis in reversed(axes):
        parts.append(max(_parts(free, axis), key=functools.partial(_preference, dimensions, free)))
        free = tuple(n // p for n, p in zip(free, parts[-1], strict=True))
    return parts[::-1]


def _preference(dimensions: Sequence[int], free: Sequence[int], part: tuple[int, ...]) -> tuple:
    """Return a sort key: whole dimensions before parts, then more of them, then partly used ones
    (jax/_src/mesh_utils.py, `_prefer_first_logical_axis_assignment`)."""
    whole = [p for p, n in zip(part, dimensions, strict=True) if p == n]
    begun = [p for p, n, f in zip(part, dimensions, free, strict=True) if f < n]
    return math.prod(whole), sum(p > 1 for p in whole), math.prod(begun), part


def _parts(free: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a size as a product of divisors of the free sizes, one per dimension."""
    if not free:
        if size == 1:
            yield ()
        return
    for p in range(1, math.gcd(free[0], size) + 1):
        if free[0] % p == 0 and size % p == 0:
            yield from ((p, *rest) for rest in _parts(free[1:], size // p))
