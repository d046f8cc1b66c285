"""The cost of a program as a tree by named scope: the result of `jaxlm.costs.jaxpr.count`."""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxlm.costs.jaxpr import primitives
from jaxlm.costs.jaxpr.primitives import Kind

Phase = Literal["forward", "backward", "rematerialised"]


class Row(NamedTuple):
    """All equations of one primitive in one scope and phase. Figures are sums over iterations and shards."""

    scope: tuple[str, ...]
    primitive: str
    kind: Kind
    phase: Phase
    axes: tuple[str, ...]  # mesh axes of a collective
    assumed: bool  # the primitive is unknown: one FLOP per number of its results
    runs: int  # executions on each shard, over all iterations
    flops: int
    bytes_in: int
    bytes_out: int


class CollectiveTotal(NamedTuple):
    """Collectives of one kind over the same axes: executions on each shard, and bytes of operands on all shards."""

    kind: str
    axes: tuple[str, ...]
    runs: int
    bytes: int


@dataclass(frozen=True, repr=False)
class JaxprCost:
    """The cost of a function as a tree by named scope; every figure is a sum over `rows`.

    `of(scope=())` is the cost of the scope itself without its `children`; a figure is the sum of both.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows)

    @property
    def matmul_flops(self) -> int:
        """FLOPs of matrix products and convolutions; those inside Pallas kernels are in `kernel_flops`."""
        return self.of(kind="matmul").flops

    @property
    def elementwise_flops(self) -> int:
        return self.of(kind="elementwise").flops

    @property
    def reduction_flops(self) -> int:
        return self.of(kind="reduction").flops

    @property
    def kernel_flops(self) -> int:
        return self.of(kind="kernel").flops

    @property
    def bytes_in(self) -> int:
        """Bytes that equations read, as if nothing were fused: an upper bound of what a compiled program reads."""
        return sum(row.bytes_in for row in self.rows)

    @property
    def bytes_out(self) -> int:
        """Bytes that equations write, as if nothing were fused."""
        return sum(row.bytes_out for row in self.rows)

    @property
    def intensity(self) -> float:
        """FLOPs per byte read or written; 0 where no byte moves."""
        moved = self.bytes_in + self.bytes_out
        return self.flops / moved if moved else 0.0

    @property
    def forward(self) -> "JaxprCost":
        return self.of(phase="forward")

    @property
    def backward(self) -> "JaxprCost":
        return self.of(phase="backward")

    @property
    def rematerialised(self) -> "JaxprCost":
        return self.of(phase="rematerialised")

    def of(self, **fields: Any) -> "JaxprCost":
        """Return the part whose rows have these values: `of(kind="matmul", phase="backward")`."""
        return JaxprCost(self.name, tuple(r for r in self.rows if all(getattr(r, k) == v for k, v in fields.items())))

    @functools.cached_property
    def children(self) -> dict[str, "JaxprCost"]:
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.scope:
                rows.setdefault(row.scope[0], []).append(row._replace(scope=row.scope[1:]))
        return {name: JaxprCost(name, tuple(mine)) for name, mine in rows.items()}

    def __getitem__(self, path: str) -> "JaxprCost":
        """Return the scope at a path, such as "layers/attention/query". Raises KeyError, which lists the scopes."""
        cost = self
        for name in path.split("/"):
            if name not in cost.children:
                raise KeyError(f"{path}: {cost.name} has the scopes {', '.join(cost.children) or '(none)'}")
            cost = cost.children[name]
        return cost

    @property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """Collectives inside `shard_map`s. Their bytes are in `bytes_in` too: they are read from memory."""
        sums: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for row in self.of(kind="collective").rows:
            total = sums.setdefault((primitives.COLLECTIVES[row.primitive], row.axes), [0, 0])
            total[0] += row.runs
            total[1] += row.bytes_in
        return tuple(CollectiveTotal(*key, *total) for key, total in sorted(sums.items()))

    @property
    def assumed(self) -> tuple[str, ...]:
        """Unknown primitives, counted as one FLOP per floating point number of their results."""
        return tuple(sorted({row.primitive for row in self.rows if row.assumed}))

    def table(self, depth: int = 3) -> str:
        """Format the tree down to a depth, one line per scope."""
        lines = [("scope", "FLOP", "matmul", "elementwise", "reduction", "read", "written", "FLOP/B")]
        self._lines(lines, depth, "")
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = "\n".join(
            "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))])
            for first, *rest in lines
        )
        return text + (f"\none FLOP per number was assumed of {', '.join(self.assumed)}" if self.assumed else "")

    def _lines(self, lines: list, depth: int, indent: str) -> None:
        flops = self.flops, self.matmul_flops + self.kernel_flops, self.elementwise_flops, self.reduction_flops
        moved = (f"{_short(n)}B" for n in (self.bytes_in, self.bytes_out))
        lines.append((indent + self.name, *map(_short, flops), *moved, f"{self.intensity:.1f}"))
        if depth:
            for child in self.children.values():
                child._lines(lines, depth - 1, indent + "  ")

    __str__ = table

    def __repr__(self) -> str:
        return f"JaxprCost({self.name}: {_short(self.flops)}FLOP, {_short(self.bytes_in + self.bytes_out)}B)"


def _short(n: float) -> str:
    """Format 1234567 as "1.23 M"."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if n < 999.5:
            return f"{n:.3g} {prefix}"
        n /= 1000
    return f"{n:.3g} Y"
