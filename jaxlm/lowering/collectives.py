"""Collectives of a compiled program, and the mesh axes that they cross."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxlm.lowering import loops
from jaxlm.lowering.hlo import HloComputation, HloInstruction, HloProgram, scope
from jaxlm.lowering.shapes import bits

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
# A collective between slices of a TPU: the host sends an array, and receives the result.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_KINDS_BETWEEN_SLICES = {"ONE_TO_ONE": "collective-permute"}
# The start of a collective that a TPU's program splits into parts.
_START = 'custom_call_target="AsyncCollectiveStart"'
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


class CompiledCollective(NamedTuple):
    """A collective that runs `count` times per step.

    Attributes:
      axes: mesh axes along which the members of a group differ; between slices all axes over which slices differ.
      bytes: of one run on one device: an all-gather's output, a reduce-scatter's or all-reduce's input.
      scope: JAX's name of the operation that it belongs to.
      spans_axes: each group has all devices along `axes`; a permutation goes by one place along them.
      in_loop: runs inside a loop.
      crosses_slices: it is the part between slices of a collective whose other parts are collectives within a slice.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    dtype: str
    scope: str
    spans_axes: bool = True
    in_loop: bool = False
    crosses_slices: bool = False


def collectives(
    program: HloProgram, mesh: Mapping[str, int], over_slices: Mapping[str, int] | None = None
) -> list[CompiledCollective]:
    """Return a program's collectives on a mesh with these axis sizes, outermost first, without those of one device.

    `over_slices`: how several slices of a TPU are shared among the axes (`jaxlm.parallel.layout.over_slices`). XLA
    compiles the program of one slice, in which groups are of its devices, and what crosses slices is sent by the host.

    On a TPU, an all-gather that overlaps matrix products is printed once for each product, perhaps in loops that it
    runs behind (it is counted where it starts), and a reduce-scatter as an all-reduce in a fusion of that name.
    """
    outer = {axis: size for axis, size in (over_slices or {}).items() if size > 1}
    mesh = {axis: size // outer.get(axis, 1) for axis, size in mesh.items()}  # of one slice
    counts: Counter[CompiledCollective] = Counter()
    runs = loops.times(program)
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            kind = kind_of(instruction)
            times = runs[computation.name]
            if (between := kind_between_slices(instruction)) and times:
                sent, dtype = _payload(computation, instruction, between)
                sent *= math.prod(outer.values()) if between == "all-gather" else 1
                name = scope(instruction.op_name)
                counts[CompiledCollective(between, tuple(outer), 0, sent, dtype, name, True, times > 1, True)] += times
            if kind is None or not times or _continues(computation, instruction):
                continue
            members = groups(instruction, math.prod(mesh.values()))
            axes, spans_axes = axes_of(members, mesh)
            if not axes:
                continue
            if kind == "collective-permute":
                spans_axes = goes_one_place(members, axes, mesh)
            spans_axes = spans_axes and outer.keys().isdisjoint(axes)
            if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            sent, dtype = _payload(computation, instruction, kind)
            key = CompiledCollective(kind, axes, 0, sent, dtype, scope(instruction.op_name), spans_axes, times > 1)
            counts[key] += times
    return [key._replace(count=times) for key, times in counts.items()]


def kind_of(instruction: HloInstruction) -> str | None:
    """Return the kind of a collective; None for the end of an asynchronous one and for any other instruction."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in _KINDS else None


def kind_between_slices(instruction: HloInstruction) -> str | None:
    """Return the kind of a collective between slices, at the host's send; None for any other instruction."""
    found = _BETWEEN_SLICES.search(instruction.attributes) if instruction.opcode == "send" else None
    return _KINDS_BETWEEN_SLICES.get(found[1], found[1].lower().replace("_", "-")) if found else None


def groups(instruction: HloInstruction, devices: int) -> np.ndarray:
    """Return a collective's device groups by position in the mesh: int [groups, members]; a permutation's pairs.

    XLA prints explicit lists, a reshaped and transposed range, or axes of a mesh of its own.

    Raises ValueError for any other syntax.
    """
    text = instruction.attributes
    if match := _NAMED.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        order = _laid_out(match[2] or str(devices), match[3]).reshape(*sizes.values())
        return _along(order, list(sizes), sizes, match[4])
    if match := _COUNTED.search(text):
        return _laid_out(match[3], match[4]).reshape(int(match[1]), int(match[2]))
    if match := _LISTED.search(text):
        return np.array([[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])])
    if "replica_groups={}" in text or "replica_groups" not in text:
        return np.arange(devices)[None]
    raise ValueError(f"groups in an unknown syntax: {text[:200]}")


def _laid_out(shape: str, transposed: str | None) -> np.ndarray:
    sizes = [int(n) for n in shape.split(",")]
    order = [int(n) for n in transposed.split(",")] if transposed else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order)


def _along(order: np.ndarray, names: list[str], sizes: dict[str, int], chosen: str) -> np.ndarray:
    """Return the groups along mesh axes or along factors of axes: `'b':(2)4` is the 4 in b = 2 · 4 · rest."""
    shape, grouped = [], []
    wanted = {name: (int(before or 1), int(size)) if size else None for name, before, size in _AXIS.findall(chosen)}
    for name in names:
        size = sizes[name]
        before, part = (wanted[name] or (1, size)) if name in wanted else (1, 1)
        grouped += [len(shape) + 1] if name in wanted else []
        shape += [before, part, size // (before * part)]
    rest = [axis for axis in range(len(shape)) if axis not in grouped]
    members = math.prod(shape[axis] for axis in grouped)
    return order.reshape(shape).transpose(rest + grouped).reshape(-1, members)


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], bool]:
    """Return the mesh axes along which members of a group differ, and whether groups span these axes."""
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())), axis=-1)
    differing = np.any(places != places[:, :1], axis=(0, 1))
    axes = tuple(axis for axis, differs in zip(mesh, differing, strict=True) if differs)
    return axes, groups.shape[1] == math.prod(mesh[axis] for axis in axes)


def goes_one_place(pairs: np.ndarray, axes: Iterable[str], mesh: Mapping[str, int]) -> bool:
    """Return whether a permutation, int [n, 2] of sources and targets, goes by one place along mesh axes, all pairs the
    same way; the last is followed by the first."""
    places = dict(zip(mesh, np.unravel_index(pairs, tuple(mesh.values())), strict=True))
    along, size = np.zeros_like(pairs), 1
    for axis in reversed([axis for axis in mesh if axis in axes]):
        along, size = along + size * places[axis], size * mesh[axis]
    steps = set(((along[:, 1] - along[:, 0]) % size).tolist())
    return steps in ({1}, {size - 1})


def _continues(computation: HloComputation, instruction: HloInstruction) -> bool:
    """Return whether an instruction is part of a collective that started before it, beside a matrix product (TPU)."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return False
    others = computation.instructions.values()
    return not any(instruction.name in each.operands and _START in each.attributes for each in others)


def _payload(computation: HloComputation, instruction: HloInstruction, kind: str) -> tuple[int, str]:
    """Return the unpadded bytes of a collective on one device, and the dtype of most of them."""
    operands = [array for operand in computation.operands(instruction) for array in operand.arrays]
    results = instruction.arrays
    if kind == "all-gather" and instruction.opcode != "send":
        # An asynchronous start also returns its operands.
        arrays = results[len(operands) :] if instruction.opcode.endswith("-start") else results
    else:
        arrays = operands
    sizes = Counter()
    for array in arrays:
        sizes[array.dtype] += array.elements * bits(array.dtype) // 8
    return sum(sizes.values()), sizes.most_common(1)[0][0]


def table(operations: list[CompiledCollective]) -> list[CompiledCollective]:
    """Return collectives summed by kind, axes, dtype and size, across scopes; the most bytes first."""

    def key(c: CompiledCollective) -> tuple:
        return c.kind, c.axes, c.bytes, c.dtype, c.spans_axes, c.crosses_slices

    rows = []
    for _, alike in itertools.groupby(sorted(operations, key=key), key):
        alike = list(alike)
        rows.append(alike[0]._replace(count=sum(c.count for c in alike), scope=_common(c.scope for c in alike)))
    return sorted(rows, key=lambda c: -c.count * c.bytes)


def _common(names: Iterable[str]) -> str:
    first, *others = dict.fromkeys(name for name in names if name) or [""]
    return f"{first} and {len(others)} more" if others else first
