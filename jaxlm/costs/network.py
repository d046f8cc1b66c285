"""How long a collective takes on a target, counted. Units are SI; rates are one-way.

The model is the scaling book's (github:jax-ml/scaling-book): the slower of the way there and of the bytes,

    seconds = max(hops · latency, bytes / rate)                                                    (sharding.md, case 2)

with links at their published rates, free of other traffic; it is a lower bound. Whoever gathers V bytes over n members
lacks V (n − 1) / n of them, and cannot have them sooner than its links bring them. That is V / W on a ring of rate W
both ways, but for (n − 1) / n, which the book drops where it rounds (sharding.md, "What have we learned"); and twice as
much on a row whose ends are not joined. Not counted: reduction inside switches (SHARP; 30 % at most, gpus.md), work
on the chip, and contention on a network thinner than a fat tree.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxlm.costs.hardware import Target
from jaxlm.errors import InputError

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

# One step over the network between domains. NCCL counts this much for each level of a tree of nodes
# (github:NVIDIA/nccl:src/graph/tuning.cc, hwLat: network, tree, LL); no vendor of chips publishes it.
NETWORK_LATENCY_S = 5e-6

# The dies of a chip that is several devices are joined six times as fast as by one link of the torus
# (https://docs.cloud.google.com/tpu/docs/tpu7x, "Dual-chiplet architecture").
DIE_TO_DIE_LINKS = 6


@dataclass(frozen=True)
class Dimension:
    """A direction in which devices of a target differ: `x`, `y`, `z` of a torus, `core` of a chip, `domain` (through a
    switch, links between all pairs or the host), `network` between domains. `ring`: its two ends are joined."""

    name: str
    size: int
    ring: bool = False

    @property
    def level(self) -> int:
        """A device gathers from the inside outwards: chip, torus or domain, network."""
        return {"core": 0, "network": 2}.get(self.name, 1)


@dataclass(frozen=True)
class Span:
    """The members of a group along one dimension.

    A group may be a part of a row: then `sharing` groups lie between one another's members on the same links.
    """

    dimension: Dimension
    size: int
    sharing: int = 1

    @property
    def ring(self) -> bool:
        """Whether it goes all the way around."""
        return self.dimension.ring and self.size * self.sharing == self.dimension.size

    def __str__(self) -> str:
        name, whole = self.dimension.name, self.dimension.size
        if self.dimension.level != 1:
            return f"{self.size} {'cores of a chip' if name == 'core' else 'domains over the network'}"
        if name == "domain":
            return f"{self.size} of {whole} in the domain"
        of = "" if self.size == whole else f" of {whole}"
        shared = f", links shared by {self.sharing}" if self.sharing > 1 else ""
        return f"{self.size}{of} on {name} ({'ring' if self.ring else 'line'}{shared})"


@dataclass(frozen=True)
class _Links:
    """What carries a span: `rate` out of a device over all its links there, or into it, and `path` to a neighbour, in
    bytes/s; how many `hops` the farthest bytes take, and those to the next member; seconds for each.

    `crossing`: the bytes of an all-to-all on the busiest link, times rate, over those of one device's operand.
    """

    rate: float
    path: float
    hops: int
    next_hops: int
    latency_s: float
    crossing: float


class Network:
    """Where the axes of a mesh lie on a target, and how long collectives over them take.

    `mesh` maps axes to sizes, outermost first, as `jaxlm.sharding.MESH_AXES` has them. They are laid out as
    `jaxlm.sharding.make_mesh` does: the outer axes go over the network between domains as far as they divide, and what
    is left is laid on the dimensions of the torus by the rule of `jax.experimental.mesh_utils.create_device_mesh`. (Of
    slices of 4 or 8 chips, which it winds along a ring, the torus is taken as it is.) Through a switch, all places are
    alike.

    Raises InputError where the mesh has not as many devices as the target.
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
        # For each axis, how many of its members lie along each dimension.
        self._parts = {axis: (*part, over) for axis, part, over in zip(mesh, parts, outer, strict=True)}

    def spans(self, axes: str | Sequence[str]) -> tuple[Span, ...]:
        """How the members of a group over these axes lie, from the inside outwards; nothing for a group of one."""
        axes = {axes} if isinstance(axes, str) else set(axes)
        if unknown := axes - set(self.mesh):
            raise InputError(f"the mesh has no axis {', '.join(sorted(unknown))}; it has {', '.join(self.mesh)}")
        spans = []
        for i, dimension in enumerate(self._dimensions):
            size, block, stride = 1, 1, 1
            for axis in reversed(self.mesh):  # inner axes have neighbours for members
                part = self._parts[axis][i]
                stride *= part
                if axis in axes and part > 1:
                    size, block = size * part, stride
            if size > 1:
                spans.append(Span(dimension, size, block // size))
        return tuple(spans)

    def size(self, axes: str | Sequence[str]) -> int:
        """How many devices are in a group over these axes."""
        return math.prod(span.size for span in self.spans(axes))

    @property
    def split(self) -> tuple[str, ...]:
        """The axes that hold a part of a torus's row, and so share its links or have no ring."""
        return tuple(
            axis
            for axis in self.mesh
            if any(len(span.dimension.name) == 1 and span.size < span.dimension.size for span in self.spans(axis))
        )

    def describe(self) -> dict[str, str]:
        """For each axis, its members and where they lie: "16: 8 of 8 in the domain × 2 domains over the network"."""
        return {
            axis: f"{size}" + (f": {' × '.join(map(str, self.spans(axis)))}" if size > 1 else "")
            for axis, size in self.mesh.items()
        }

    def seconds(self, kind: str, bytes: float, axes: str | Sequence[str]) -> float:
        """How long one collective over these axes takes, where all groups of the mesh run it at once.

        `bytes` are those on one device, of its larger side: the result of an all-gather, the operand of a
        reduce-scatter, an all-reduce (which is these two after another), an all-to-all or a collective-permute (by one
        place along the axes). Zero for a group of one. A latency that is not published counts as zero; raises
        InputError where a rate is not, and for a kind that is none of `KINDS`.
        """
        if kind not in KINDS:
            raise InputError(f"there is no collective {kind!r}; the kinds are {', '.join(KINDS)}")
        links = {span: self._links(span) for span in self.spans(axes)}
        if not links:
            return 0.0
        if kind == "all-to-all":
            carried = _exchange(links, bytes)
        elif kind == "collective-permute":
            carried = max(bytes / link.path for link in links.values())
            return max(carried, sum(link.next_hops * link.latency_s for link in links.values()))
        else:
            carried = _gather(links, bytes)
        once = max(carried, sum(link.hops * link.latency_s for link in links.values()))
        return 2 * once if kind == "all-reduce" else once

    def _links(self, span: Span) -> _Links:
        chip, n, name = self.target.chip, span.size, span.dimension.name
        direct = (n - 1) / n
        if name == "network":  # a tree of domains, at the full rate of every card (gpus.md, "Beyond the node level")
            rate = chip.figure("scale_out_bytes_per_s") / chip.devices_per_chip
            return _Links(rate, rate, math.ceil(math.log2(n)), 1, NETWORK_LATENCY_S, direct)
        rate = chip.figure("link.bytes_per_s")
        latency_s = chip.link.latency_s or 0.0
        if name == "core":  # on the chip: no hop
            rate *= DIE_TO_DIE_LINKS / _ways(chip.link)
            return _Links(rate, rate, 0, 0, 0.0, direct)
        rate /= chip.devices_per_chip  # the devices of a chip share its links
        if name == "domain":
            path = rate / (chip.link.domain - 1) if chip.link.topology == "mesh" else rate
            rate = path * (n - 1) if chip.link.topology == "mesh" else rate  # the links to strangers lie idle
            return _Links(rate, path, 1, 1, latency_s, direct)
        path = rate / _ways(chip.link) / span.sharing
        # Every member of one half sends to every one of the other, over one link or, around a ring, two: on an even
        # ring an eighth of what all have, over a link's rate (sharding.md, "AllToAll").
        crossing = (n // 2) * (n - n // 2) / n
        hops, next_hops = (n // 2, 1) if span.ring else (n - 1, n - 1)
        return _Links(path * (1 + span.ring), path, hops * span.sharing, next_hops * span.sharing, latency_s, crossing)


def _gather(links: Mapping[Span, _Links], bytes: float) -> float:
    """Seconds in which `bytes` are gathered, or scattered, but for latency.

    Levels work at the same time, each on what the one inside it needs, and the slowest decides (gpus.md, "Cross-node
    collectives"). Bytes enter a chip or a domain once, shared out over the links of all its members. Within a torus
    all directions are used at once (sharding.md, case 2: "multiple axes").
    """
    slowest, inner = 0.0, 1
    for _, level in itertools.groupby(links.items(), lambda item: item[0].dimension.level):
        level = dict(level)
        members = math.prod(span.size for span in level)
        # What one member lacks comes over all its links; what a plane of the torus lacks, over those into the plane.
        bounds = [(members, sum(link.rate for link in level.values()))]
        bounds += [(span.size, link.rate * members / span.size) for span, link in level.items()]
        slowest = max(slowest, *(bytes * (n - 1) / n / (rate * inner) for n, rate in bounds))
        inner *= members
    return slowest


def _exchange(links: Mapping[Span, _Links], bytes: float) -> float:
    """Seconds in which each member sends an equal part of `bytes` to each, but for latency. Nothing is saved by
    gathering: a level carries what is for members in the same place of all levels outside it, and every direction of
    a torus all of that (gpus.md, "Cross-node collectives")."""
    slowest = 0.0
    for span, link in links.items():
        outside = math.prod(other.size for other in links if other.dimension.level > span.dimension.level)
        slowest = max(slowest, bytes * link.crossing / outside / link.rate)
    return slowest


def _ways(link) -> int:
    """Neighbours of a chip on its ring or torus."""
    return 2 * (link.axes or 1)


def _dimensions(target: Target) -> list[Dimension]:
    """Those of a target, the network last."""
    chip, link = target.chip, target.chip.link
    domains, chips = (1, target.topology) if chip.slices else (target.topology[0], target.topology[1:])
    if link and not chip.slices and link.topology in ("ring", "torus2d"):
        short = max(n for n in range(1, math.isqrt(chips[0]) + 1) if chips[0] % n == 0) if link.axes else 1
        chips = (chips[0] // short, short)
        rings = tuple(n == link.domain for n in chips) if link.topology == "ring" else link.wraps(chips)
    else:
        rings = target.wraparound
    torus = [Dimension(*row) for row in zip("xyz", chips, rings, strict=False)]
    inner = torus if rings else [Dimension("domain", chips[0])]
    cores = [Dimension("core", chip.devices_per_chip)] if chip.devices_per_chip > 1 else []
    # The order decides between equal places. JAX has cores last, but first in slices of one or two planes of 2 × 2.
    small = cores and chips[0] <= 2 and chips[1] <= 2
    return [*(cores + inner if small else inner + cores), Dimension("network", domains)]


def _lay_out(dimensions: Sequence[int], axes: Sequence[int]) -> list[tuple[int, ...]]:
    """For each axis of a mesh, how many of its members lie along each dimension.

    The inner axis chooses first: whole dimensions before parts, then many of them, then those that are begun. On one
    dimension the inner axis has neighbours for members. (jax/_src/mesh_utils.py, `_prefer_first_logical_axis_assignment`)
    """
    free = list(dimensions)
    parts = []
    for axis in reversed(axes):

        def preference(part: tuple[int, ...]) -> tuple:
            whole = [p for p, n in zip(part, dimensions, strict=True) if p == n]
            begun = [p for p, n, f in zip(part, dimensions, free, strict=True) if f < n]
            return math.prod(whole), sum(p > 1 for p in whole), math.prod(begun), part

        parts.append(max(_parts(free, axis), key=preference))
        free = [n // p for n, p in zip(free, parts[-1], strict=True)]
    return parts[::-1]


def _parts(free: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a size as a product of divisors of these."""
    if not free:
        if size == 1:
            yield ()
        return
    for p in range(1, math.gcd(free[0], size) + 1):
        if free[0] % p == 0 and size % p == 0:
            yield from ((p, *rest) for rest in _parts(free[1:], size // p))
