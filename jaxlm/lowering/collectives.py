"""What a compiled program sends between devices, and over which axes of the mesh."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxlm.lowering.hlo import Computation, Instruction, Program, scope
from jaxlm.lowering.shapes import bits

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


class CompiledCollective(NamedTuple):
    """A collective of a program: `count` times per step over mesh axes, `bytes` each on one device: what an all-gather
    gives, what a reduce-scatter or an all-reduce takes. `axes` are those along which the members of its groups differ;
    `whole` says that a group is all devices along them. `of` is JAX's name of what it belongs to."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    dtype: str
    of: str
    whole: bool = True
    in_loop: bool = False


def collectives(program: Program, mesh: Mapping[str, int]) -> list[CompiledCollective]:
    """All of a program over a mesh whose axes have these sizes, outermost first; those of one device are left out.

    On a TPU, an all-gather that goes on beside products is written once for each of them (it is one here), and a
    reduce-scatter as an all-reduce in a fusion of that name.
    """
    found: Counter[CompiledCollective] = Counter()
    parts_seen = set()
    looping = {name for name, times in program.times.items() if times > 1}
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            kind = kind_of(instruction)
            times = program.times[computation.name]
            if kind is None or not times:
                continue
            part = _part_of(instruction)
            if part is not None and (part, times) in parts_seen:
                continue
            parts_seen.add((part, times))
            axes, whole = axes_of(groups(instruction, math.prod(mesh.values())), mesh)
            if not axes:
                continue
            if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            sent, dtype = _payload(computation, instruction, kind)
            key = CompiledCollective(
                kind, axes, 0, sent, dtype, scope(instruction.op_name), whole, computation.name in looping
            )
            found[key] += times
    return [key._replace(count=times) for key, times in found.items()]


def kind_of(instruction: Instruction) -> str | None:
    """The kind of a collective; None of anything else, and of the end of one that has begun before."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in _KINDS else None


def groups(instruction: Instruction, devices: int) -> np.ndarray:
    """Which devices, by their place in the mesh, a collective joins: int [groups, members]; pairs of a permutation.

    XLA prints them listed, as numbers laid out and transposed, or by the axes of a mesh of its own.
    """
    text = instruction.attributes
    if found := _NAMED.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        order = _laid_out(found[2] or str(devices), found[3]).reshape(*sizes.values())
        return _along(order, list(sizes), sizes, found[4])
    if found := _COUNTED.search(text):
        return _laid_out(found[3], found[4]).reshape(int(found[1]), int(found[2]))
    if found := _LISTED.search(text):
        return np.array([[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", found[1])])
    if "replica_groups={}" in text or "replica_groups" not in text:
        return np.arange(devices)[None]
    raise ValueError(f"groups in an unknown syntax: {text[:200]}")


def _laid_out(shape: str, transposed: str | None) -> np.ndarray:
    sizes = [int(n) for n in shape.split(",")]
    order = [int(n) for n in transposed.split(",")] if transposed else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order)


def _along(order: np.ndarray, names: list[str], sizes: dict[str, int], chosen: str) -> np.ndarray:
    """The groups along some axes of a mesh, or along parts of them: `'b':(2)4` is the 4 in b = 2 · 4 · rest."""
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
    """The mesh axes along which members of a group differ, and whether each group is all of the devices along them."""
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())), axis=-1)
    differing = np.any(places != places[:, :1], axis=(0, 1))
    axes = tuple(axis for axis, differs in zip(mesh, differing, strict=True) if differs)
    return axes, groups.shape[1] == math.prod(mesh[axis] for axis in axes)


def _part_of(instruction: Instruction) -> tuple | None:
    """What tells that two instructions are parts of one collective, in the text of a TPU's program."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return None
    chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return (chain[1], instruction.attribute("channel_id")) if chain else None


def _payload(computation: Computation, instruction: Instruction, kind: str) -> tuple[int, str]:
    """Bytes of the whole of it on one device, without padding, and the type of most of them."""
    given = [array for operand in computation.operands(instruction) for array in operand.arrays]
    made = instruction.arrays
    if kind == "all-gather":
        # One that is started gives what it reads, too.
        arrays = made[len(given) :] if instruction.opcode.endswith("-start") else made
    else:
        arrays = given
    sizes = Counter()
    for array in arrays:
        sizes[array.dtype] += array.numbers * bits(array.dtype) // 8
    return sum(sizes.values()), sizes.most_common(1)[0][0]


def table(found: list[CompiledCollective]) -> list[CompiledCollective]:
    """Added up by kind, axes, dtype and size, whatever they belong to; the most bytes first."""

    def key(c: CompiledCollective) -> tuple:
        return c.kind, c.axes, c.bytes, c.dtype, c.whole

    rows = []
    for _, alike in itertools.groupby(sorted(found, key=key), key):
        alike = list(alike)
        rows.append(alike[0]._replace(count=sum(c.count for c in alike), of=_common(c.of for c in alike)))
    return sorted(rows, key=lambda c: -c.count * c.bytes)


def _common(names: Iterable[str]) -> str:
    first, *others = dict.fromkeys(name for name in names if name) or [""]
    return f"{first} and {len(others)} more" if others else first
