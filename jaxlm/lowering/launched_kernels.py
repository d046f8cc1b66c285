"""Kernels that a compiled program launches: XLA's fusions, Pallas kernels and library calls.

Each has its FLOPs and the bytes that it reads and writes in device memory.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxlm.lowering.hlo import HloComputation, HloInstruction, HloProgram, controlled, scope
from jaxlm.lowering.loops import executed
from jaxlm.lowering.matmul_flops import instruction_flops

# Opcodes that move no bytes: aliases of existing buffers, control flow, and the ends of asynchronous operations.
_NO_WORK = set(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all opt-barrier domain iota "
    "optimization-barrier partition-id replica-id".split()
)
_NO_ARITHMETIC = _NO_WORK | set(
    "broadcast reshape transpose copy convert slice dynamic-slice dynamic-update-slice concatenate pad gather reverse "
    "fusion dot convolution custom-call select rng-bit-generator".split()
)
# Copies that run behind kernels, between device memory and faster memory.
_COPIES = ("copy-start", "slice-start")
# Opcodes whose result is their operand.
_VIEWS = ("bitcast", "get-tuple-element", "copy-done", "slice-done")
# Opcodes that overwrite part of their first operand, and the number of the operand that they write.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SLICES = ("dynamic-slice", "slice", "gather")
_PALLAS = re.compile(r"tpu_custom_call|triton|mosaic")
_COLLECTIVE_OR_ASYNC = re.compile(r"-(start|done|update)$|^(all-|reduce-scatter|collective-)")


# FLOPs that Pallas kernels declare for all runs on one device, by their names in a program (`hlo.scope`).
Declared = Mapping[str, float]
_NONE: Declared = MappingProxyType({})


class LaunchedKernel(NamedTuple):
    """A kernel that runs `count` times in a step.

    Attributes:
      matmul_flops: FLOPs of matrix products in one run.
      elementwise_flops: FLOPs of other arithmetic in one run.
      declared_flops: FLOPs of one run that a Pallas kernel declares.
      bytes: read and written in device memory in one run, also by copies that bring what it reads to faster memory, and
        take there what it writes.
    """

    name: str
    kind: str
    source: str
    count: int
    matmul_flops: int
    elementwise_flops: int
    bytes: int
    declared_flops: float = 0.0

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.elementwise_flops + self.declared_flops

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the time of all its runs on a roofline with these rates."""
        return self.count * max(self.flops / flops_per_s, self.bytes / bytes_per_s)


def alike(kernels: Iterable[LaunchedKernel]) -> list[LaunchedKernel]:
    """Return kernels with one in place of those that do the same work in other places: of one name but for the scopes
    around it, kind, source, FLOPs and bytes. It runs as often as all of them, and its name says how many there are."""
    groups: dict[tuple, list[LaunchedKernel]] = {}
    for kernel in kernels:
        key = (kernel.name.rpartition("/")[2], kernel.kind, kernel.source, round(kernel.flops), kernel.bytes)
        groups.setdefault(key, []).append(kernel)
    return [
        group[0]._replace(name=_named(group), count=sum(kernel.count for kernel in group)) for group in groups.values()
    ]


def _named(group: list[LaunchedKernel]) -> str:
    names = dict.fromkeys(kernel.name for kernel in group)
    more = f" and {len(names) - 1} alike" if len(names) > 1 else ""
    return f"{group[0].name}{more}"


class Chain(NamedTuple):
    """Memory-bound kernels that pass arrays to one another through device memory.

    `bytes` are written and read again per step; a single fused kernel would save them.
    """

    kernels: tuple[LaunchedKernel, ...]
    bytes: int


def kernels(program: HloProgram, declared: Declared = _NONE) -> list[LaunchedKernel]:
    """Return all kernels but collectives, in execution order."""
    return [kernel for _, _, kernel in _all(program, declared)]


def calls(program: HloProgram) -> list[tuple[str, int]]:
    """Return the names of Pallas kernels and library calls, and the number of runs of each."""
    found: dict[str, int] = {}
    for _, instruction, times in executed(program):
        if target := instruction.kernel:
            name = scope(instruction.op_name) if _PALLAS.search(target) else target
            found[name] = found.get(name, 0) + times
    return sorted(found.items())


def chains(program: HloProgram, intensity: float, declared: Declared = _NONE) -> list[Chain]:
    """Return chains of kernels below this intensity (FLOPs per byte) without matrix products; the most bytes first."""
    bound = {
        (computation.name, instruction.name): kernel
        for computation, instruction, kernel in _all(program, declared)
        if not kernel.matmul_flops and kernel.intensity < intensity
    }
    leader = {key: key for key in bound}

    def find(key: tuple) -> tuple:
        while leader[key] != key:
            key = leader[key]
        return key

    handed: dict[tuple, int] = {}
    for (where, name), kernel in bound.items():
        computation = program.computations[where]
        readers = {(where, user) for user in _readers(computation, computation.instructions[name])} & bound.keys()
        for reader in readers:
            leader[find(reader)] = find((where, name))
        if readers:
            written = sum(a.bytes for a in computation.instructions[name].arrays if a.space == 0)
            handed[where, name] = kernel.count * written * (1 + len(readers))
    groups: dict[tuple, list[tuple]] = {}
    for key in bound:
        groups.setdefault(find(key), []).append(key)
    found = [
        Chain(tuple(bound[key] for key in keys), sum(handed.get(key, 0) for key in keys))
        for keys in groups.values()
        if len(keys) > 1
    ]
    return sorted(found, key=lambda chain: -chain.bytes)


def _all(program: HloProgram, declared: Declared) -> list[tuple[HloComputation, HloInstruction, LaunchedKernel]]:
    """Return kernels with declared FLOPs; kernels of one name share them in proportion to their arrays' sizes."""
    launches = list(_compiled(program))
    sizes = [sum(array.bytes for part in (i, *c.operands(i)) for array in part.arrays) for c, i, _ in launches]
    whole: Counter[str] = Counter()
    for (_, _, kernel), size in zip(launches, sizes, strict=True):
        whole[kernel.name] += kernel.count * size

    def share(kernel: LaunchedKernel, size: int) -> float:
        return declared[kernel.name] * size / whole[kernel.name] if kernel.name in declared else 0.0

    return [(c, i, k._replace(declared_flops=share(k, size))) for (c, i, k), size in zip(launches, sizes, strict=True)]


def _compiled(program: HloProgram) -> Iterator[tuple[HloComputation, HloInstruction, LaunchedKernel]]:
    copied = _copied(program)
    for computation, instruction, times in executed(program):
        opcode, key = instruction.opcode, (computation.name, instruction.name)
        if opcode in _COPIES:
            if key in copied:  # no kernel beside it reads or makes what is copied
                name = scope(instruction.op_name) or computation.operands(instruction)[0].op_name or instruction.name
                source = program.source(instruction)
                yield computation, instruction, LaunchedKernel(name, opcode, source, times, 0, 0, copied[key])
            continue
        if not _is_kernel(instruction):
            continue
        inside = fused(program, computation, instruction)
        yield (
            computation,
            instruction,
            LaunchedKernel(
                name=scope(instruction.op_name) or instruction.name,
                kind=instruction.kernel
                or (f"fusion {instruction.attribute('kind')}" if opcode == "fusion" else opcode),
                source=program.source(instruction),
                count=times,
                matmul_flops=sum(instruction_flops(c, i) for c, i in inside),
                elementwise_flops=sum(_elementwise_flops(c, i) for c, i in inside),
                bytes=_bytes(program, computation, instruction) + copied[key],
            ),
        )


def _is_kernel(instruction: HloInstruction) -> bool:
    opcode = instruction.opcode
    if opcode in _NO_WORK or controlled(instruction) or _COLLECTIVE_OR_ASYNC.search(opcode):
        return False
    return opcode != "custom-call" or instruction.kernel is not None


def _copied(program: HloProgram) -> Counter[tuple[str, str]]:
    """Return the bytes that copies behind kernels read and write in device memory, by computation and instruction: of
    what is copied to faster memory the first kernel that reads it, of what is copied out of it the kernel that makes
    it; otherwise the copy itself.

    A program may begin with what the run before has copied for it at its end: such a copy counts once.
    """
    copies: Counter[tuple[str, str]] = Counter()
    for computation, instruction, _ in executed(program):
        if instruction.opcode not in _COPIES:
            continue
        is_slice, arrays = instruction.opcode == "slice-start", instruction.arrays
        source, target = (arrays[0], arrays[-2]) if is_slice else (arrays[1], arrays[0])
        (operand,) = computation.operands(instruction)
        if target.space:
            kernel = _first_reader(computation, instruction)
            if kernel is None and any(user.attribute(_BEFORE) for user in computation.users[operand.name]):
                continue
        else:
            while operand.opcode in _VIEWS:
                (operand,) = computation.operands(operand)
            kernel = operand if source.space and _is_kernel(operand) else None
        moved = target.bytes * ((source.space == 0) + (target.space == 0))
        if moved:
            copies[computation.name, (kernel or instruction).name] += moved
    return copies


# The attribute of a copy that the run before makes.
_BEFORE = "cross_program_prefetch_index"


def _first_reader(computation: HloComputation, instruction: HloInstruction) -> HloInstruction | None:
    """Return the first reader of an instruction's result, if it is a kernel."""
    readers = set(_readers(computation, instruction))
    first = next((each for each in computation.instructions.values() if each.name in readers), None)
    return first if first is not None and _is_kernel(first) else None


def fused(
    program: HloProgram, computation: HloComputation, instruction: HloInstruction
) -> list[tuple[HloComputation, HloInstruction]]:
    """Return the instruction itself, or all instructions of a fusion, nested fusions included."""
    if instruction.opcode != "fusion":
        return [(computation, instruction)]
    inner = program.computations[instruction.called["calls"][0]]
    return [pair for i in inner.instructions.values() for pair in fused(program, inner, i)]


def _elementwise_flops(computation: HloComputation, instruction: HloInstruction) -> int:
    """Return one FLOP per output element of an arithmetic operation; a reduction counts its input elements."""
    if instruction.opcode in _NO_ARITHMETIC:
        return 0
    if instruction.opcode in ("reduce", "reduce-window"):
        return computation.operands(instruction)[0].arrays[0].elements
    return max((array.elements for array in instruction.arrays), default=0)


def _bytes(program: HloProgram, computation: HloComputation, instruction: HloInstruction) -> int:
    """Return bytes read and written in device memory, each operand once; slices and updates count only their part."""
    if instruction.opcode in _SLICES:
        return 2 * _in_memory(instruction)
    if instruction.opcode in _UPDATES:
        return 2 * _in_memory(computation.operands(instruction)[_UPDATES[instruction.opcode]])
    operands = computation.operands(instruction)
    if instruction.opcode != "fusion":
        return _in_memory(instruction) + sum(_in_memory(operand) for operand in operands)
    inner = program.computations[instruction.called["calls"][0]]
    read = sum(
        min(_in_memory(operand), bytes_read(program, inner, parameter))
        for parameter, operand in zip(inner.parameters, operands, strict=True)
    )
    return read + _written(inner, instruction)


def bytes_read(program: HloProgram, inner: HloComputation, value: HloInstruction) -> int:
    """Return the bytes of a fusion's parameter that are read.

    If the parameter is only sliced, the slices count; if it is only updated in place, nothing; otherwise all of it.
    """
    total = 0
    for user in inner.users[value.name]:
        first = user.operands[0] == value.name
        if user.opcode in _SLICES and first:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode == "bitcast":
            total += bytes_read(program, inner, user)
        elif user.opcode == "fusion":
            nested = program.computations[user.called["calls"][0]]
            for parameter, name in zip(nested.parameters, user.operands, strict=True):
                if name == value.name:
                    where, what = (inner, user) if _is_view(nested, parameter) else (nested, parameter)
                    total += bytes_read(program, where, what)
        elif not (user.opcode in _UPDATES and first):
            total += sum(array.bytes for array in value.arrays)
    return total


def _is_view(nested: HloComputation, parameter: HloInstruction) -> bool:
    """Return whether a nested fusion is its parameter in another layout: its reader reads the parameter."""
    root = nested.instructions[nested.root]
    while root.opcode == "bitcast":
        root = nested.instructions[root.operands[0]]
    return root is parameter


def _written(inner: HloComputation, fusion: HloInstruction) -> int:
    root = inner.instructions[inner.root]
    outputs = inner.operands(root) if root.opcode == "tuple" else [root]
    written = 0
    for output, array in zip(outputs, fusion.arrays, strict=False):
        while output.opcode == "bitcast":
            output = inner.instructions[output.operands[0]]
        if array.space == 0:
            updated = _UPDATES.get(output.opcode)
            part = array if updated is None else inner.operands(output)[updated].arrays[0]
            written += part.bytes
    return written


def _in_memory(instruction: HloInstruction) -> int:
    return sum(array.bytes for array in instruction.arrays if array.space == 0)


def _readers(computation: HloComputation, instruction: HloInstruction) -> Iterator[str]:
    """Yield the names of an instruction's readers; views and tuple elements are followed."""
    for user in computation.users[instruction.name]:
        if user.opcode in _VIEWS:
            yield from _readers(computation, user)
        else:
            yield user.name
