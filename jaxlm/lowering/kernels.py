"""What a device is told to run, kernel by kernel: XLA's fusions, Pallas's kernels and calls into libraries, with their
FLOPs and the bytes that they read and write in the device's memory."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxlm.lowering.hlo import Computation, Instruction, Program, controlled, scope
from jaxlm.lowering.products import product_flops

# These move no bytes: names of what is there, and the ends of what has begun before.
_NOTHING = set(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all opt-barrier domain iota "
    "optimization-barrier partition-id replica-id".split()
)
_NO_ARITHMETIC = _NOTHING | set(
    "broadcast reshape transpose copy convert slice dynamic-slice dynamic-update-slice concatenate pad gather reverse "
    "fusion dot convolution custom-call select rng-bit-generator".split()
)
# Which operand of these is written over a part of the first.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SLICES = ("dynamic-slice", "slice", "gather")
_PALLAS = re.compile(r"tpu_custom_call|triton|mosaic")
# Notes of XLA to itself.
_OWN = re.compile(r"Sharding|SPMD|AllocateBuffer|Bitcast|AsyncCollective|Bitpacked|AssumeGather|AnnotateDevice|MoveTo")
_ENDS = re.compile(r"-(start|done|update)$|^(all-|reduce-scatter|collective-)")


# FLOPs that Pallas kernels declare, of all runs on one device, by their names in a program (`hlo.scope`).
Declared = Mapping[str, float]
_NONE: Declared = MappingProxyType({})


class Kernel(NamedTuple):
    """One that runs `count` times in a step. `flops` are of one run: `products` of matrix products, `elementwise` of
    the rest, or `declared` by a Pallas kernel; `bytes` those of one run that it reads and writes in the device's
    memory."""

    name: str
    kind: str
    source: str
    count: int
    products: int
    elementwise: int
    bytes: int
    declared: float = 0.0

    @property
    def flops(self) -> float:
        return self.products + self.elementwise + self.declared

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Of all its runs, on a roofline."""
        return self.count * max(self.flops / flops_per_s, self.bytes / bytes_per_s)


class Chain(NamedTuple):
    """Kernels bound by memory that hand arrays to one another through it, and the bytes per step that this writes and
    reads again: what one kernel for all of them would spare."""

    kernels: tuple[Kernel, ...]
    bytes: int


def kernels(program: Program, declared: Declared = _NONE) -> list[Kernel]:
    """All but collectives, in the order in which they run."""
    return [kernel for _, _, kernel in _all(program, declared)]


def calls(program: Program) -> list[tuple[str, int]]:
    """Pallas kernels and library calls by name, and how often each runs."""
    found: dict[str, int] = {}
    for _, instruction, times in program.executed():
        target = instruction.attribute("custom_call_target") or ""
        if instruction.opcode == "custom-call" and not _OWN.search(target):
            name = scope(instruction.op_name) if _PALLAS.search(target) else target
            found[name] = found.get(name, 0) + times
    return sorted(found.items())


def chains(program: Program, intensity: float, declared: Declared = _NONE) -> list[Chain]:
    """Chains of kernels that do fewer FLOPs per byte than this and no matrix products; the most bytes first."""
    bound = {
        (computation.name, instruction.name): kernel
        for computation, instruction, kernel in _all(program, declared)
        if not kernel.products and kernel.intensity < intensity
    }
    leader = {key: key for key in bound}

    def find(key: tuple) -> tuple:
        while leader[key] != key:
            key = leader[key]
        return key

    handed: dict[tuple, int] = {}
    for (place, name), kernel in bound.items():
        computation = program.computations[place]
        readers = {(place, user) for user in _readers(computation, computation.instructions[name])} & bound.keys()
        for reader in readers:
            leader[find(reader)] = find((place, name))
        if readers:
            written = sum(a.bytes for a in computation.instructions[name].arrays if a.space == 0)
            handed[place, name] = kernel.count * written * (1 + len(readers))
    groups: dict[tuple, list[tuple]] = {}
    for key in bound:
        groups.setdefault(find(key), []).append(key)
    found = [
        Chain(tuple(bound[key] for key in keys), sum(handed.get(key, 0) for key in keys))
        for keys in groups.values()
        if len(keys) > 1
    ]
    return sorted(found, key=lambda chain: -chain.bytes)


def _all(program: Program, declared: Declared) -> list[tuple[Computation, Instruction, Kernel]]:
    """With what Pallas kernels declare; those of one name share it by the sizes of their arrays."""
    found = list(_compiled(program))
    sizes = [sum(array.bytes for part in (i, *c.operands(i)) for array in part.arrays) for c, i, _ in found]
    whole: Counter[str] = Counter()
    for (_, _, kernel), size in zip(found, sizes, strict=True):
        whole[kernel.name] += kernel.count * size

    def share(kernel: Kernel, size: int) -> float:
        return declared[kernel.name] * size / whole[kernel.name] if kernel.name in declared else 0.0

    return [(c, i, k._replace(declared=share(k, size))) for (c, i, k), size in zip(found, sizes, strict=True)]


def _compiled(program: Program) -> Iterator[tuple[Computation, Instruction, Kernel]]:
    for computation, instruction, times in program.executed():
        opcode = instruction.opcode
        if opcode in _NOTHING or controlled(instruction) or _ENDS.search(opcode):
            continue
        target = instruction.attribute("custom_call_target") if opcode == "custom-call" else None
        if target and _OWN.search(target):
            continue
        inside = _beneath(program, computation, instruction)
        yield (
            computation,
            instruction,
            Kernel(
                name=scope(instruction.op_name) or instruction.name,
                kind=target or (f"fusion {instruction.attribute('kind')}" if opcode == "fusion" else opcode),
                source=program.source(instruction),
                count=times,
                products=sum(product_flops(c, i) for c, i in inside),
                elementwise=sum(_elementwise(c, i) for c, i in inside),
                bytes=_bytes(program, computation, instruction),
            ),
        )


def _beneath(
    program: Program, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """An instruction, or those of the fusion that it is, fusions in it included."""
    if instruction.opcode != "fusion":
        return [(computation, instruction)]
    inner = program.computations[instruction.called["calls"][0]]
    return [pair for i in inner.instructions.values() for pair in _beneath(program, inner, i)]


def _elementwise(computation: Computation, instruction: Instruction) -> int:
    """One FLOP for each number that an arithmetic operation makes; of a reduction, for each that it reads."""
    if instruction.opcode in _NO_ARITHMETIC:
        return 0
    if instruction.opcode in ("reduce", "reduce-window"):
        return computation.operands(instruction)[0].arrays[0].numbers
    return max((array.numbers for array in instruction.arrays), default=0)


def _bytes(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Read and written in the device's memory, each operand once; of what is cut out or overwritten, that part."""
    if instruction.opcode in _SLICES:
        return 2 * _in_memory(instruction)
    if instruction.opcode in _UPDATES:
        return 2 * _in_memory(computation.operands(instruction)[_UPDATES[instruction.opcode]])
    operands = computation.operands(instruction)
    if instruction.opcode != "fusion":
        return _in_memory(instruction) + sum(_in_memory(operand) for operand in operands)
    inner = program.computations[instruction.called["calls"][0]]
    read = sum(
        min(_in_memory(operand), _read(program, inner, parameter))
        for parameter, operand in zip(inner.parameters, operands, strict=True)
    )
    return read + _written(inner, instruction)


def _read(program: Program, inner: Computation, value: Instruction) -> int:
    """Bytes of a fusion's parameter that are read: its parts where only these are cut out, none where a part of it is
    only overwritten, and else all."""
    read = 0
    for user in inner.users[value.name]:
        first = user.operands[0] == value.name
        if user.opcode in _SLICES and first:
            read += sum(array.bytes for array in user.arrays)
        elif user.opcode == "bitcast":
            read += _read(program, inner, user)
        elif user.opcode == "fusion":
            nested = program.computations[user.called["calls"][0]]
            read += sum(
                _read(program, nested, parameter)
                for parameter, name in zip(nested.parameters, user.operands, strict=True)
                if name == value.name
            )
        elif not (user.opcode in _UPDATES and first):
            read += sum(array.bytes for array in value.arrays)
    return read


def _written(inner: Computation, fusion: Instruction) -> int:
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


def _in_memory(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.arrays if array.space == 0)


def _readers(computation: Computation, instruction: Instruction) -> Iterator[str]:
    """Who reads what an instruction writes, through views and tuples' parts."""
    for user in computation.users[instruction.name]:
        if user.opcode in ("bitcast", "get-tuple-element"):
            yield from _readers(computation, user)
        else:
            yield user.name
