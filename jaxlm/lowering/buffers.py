"""Live buffers of a program: each lives from its definition to its last read. XLA itself reports only a total size.

The program is scheduled, so its text is in execution order. The gaps that XLA's allocator leaves are not modelled.
"""

import functools
import re
from collections.abc import Set
from dataclasses import dataclass

from jaxlm.lowering.hlo import HloComputation, HloInstruction, HloProgram
from jaxlm.lowering.shapes import HloArray, HloType


@dataclass(eq=False)
class Buffer:
    """A buffer in device memory, and the instruction that writes it first."""

    array: HloArray
    maker: HloInstruction

    @property
    def bytes(self) -> int:
        return self.array.bytes if self.array.space == 0 else 0


# The buffers of a value: one, or a tuple of them.
Value = Buffer | tuple["Value", ...]


@dataclass(frozen=True)
class Peak:
    """Live buffers at the point where their total size is largest."""

    bytes: int = 0
    buffers: tuple[Buffer, ...] = ()


def peak(program: HloProgram) -> Peak:
    """Return the program's temporaries at their peak, without arguments and outputs."""
    entry = program.entry
    given = [_new(parameter.type, parameter) for parameter in entry.parameters]
    return _PeakFinder(program).peak(entry, given)


# Operations whose output may reuse an operand's buffer.
_IN_PLACE = ("add", "multiply", "subtract", "select", "convert", "copy", "all-reduce", "all-reduce-start")

# Operations that move elements to other positions.
_MOVING = ("transpose", "reverse", "gather", "dot", "convolution", "concatenate", "pad")


class _PeakFinder:
    """The peak of each computation of a program."""

    def __init__(self, program: HloProgram):
        self.program = program

    def peak(self, computation: HloComputation, arguments: list[Value], ending: Set[Buffer] | None = None) -> Peak:
        """Return the peak within one run of a computation.

        Parameters and results belong to the caller: a loop carries its state in place, and the program's outputs are
        not temporaries. `ending`, of a branch: the parameters that nothing reads later. Each of these parameters ends
        with its last read here. The bytes of the peak are those beyond the bytes of these parameters. The result of a
        branch is among the branch's buffers.
        """
        values: dict[str, Value] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode == "parameter":
                values[instruction.name] = arguments[int(instruction.literal)]
            else:
                operands = [values[name] for name in instruction.operands]
                values[instruction.name] = self._value(instruction, operands)
        last = _last_reads(computation, values)
        result = _buffers(values[computation.root])
        known = {buffer for value in arguments for buffer in _buffers(value)}.union(
            () if ending is not None else result
        )
        live: set[Buffer] = set(ending or ()).difference(result)
        live_bytes, best = 0, Peak(0, tuple(live))
        for at, (name, instruction) in enumerate(computation.instructions.items()):
            outputs = [b for b in dict.fromkeys(_buffers(values[name])) if b.bytes and b not in known]
            known.update(outputs)
            # An output reuses a dead operand's buffer of the same size.
            ends = [b for b in self._overwritable(instruction, values) if last[b] == at and b in live]
            over = [next((b for b in ends if b.bytes == output.bytes), None) for output in outputs[:1]]
            live = (live - set(over)) | set(outputs)
            live_bytes += sum(b.bytes for b in outputs) - sum(b.bytes for b in over if b is not None)
            gone = {b for b in live if last.get(b, -1) <= at}
            # The operands that end with a conditional end within its branches, whose results begin there.
            within = gone.union(outputs) if instruction.opcode == "conditional" else set()
            nested = self._nested(
                instruction, [values[name] for name in instruction.operands], gone.difference(outputs)
            )
            outside = live_bytes - sum(b.bytes for b in within.intersection(outputs))
            if outside + nested.bytes > best.bytes:
                best = Peak(outside + nested.bytes, (*(b for b in live if b not in within), *nested.buffers))
            live -= gone
            live_bytes -= sum(b.bytes for b in gone)
        return best

    def _overwritable(self, instruction: HloInstruction, values: dict[str, Value]) -> list[Buffer]:
        """Return operands whose buffer an output may reuse: each element is read only to write the same position."""
        operands = [values[name] for name in instruction.operands]
        if instruction.opcode in _IN_PLACE:
            return [operand for operand in operands if isinstance(operand, Buffer)]
        if instruction.opcode != "fusion":
            return []
        inside = self.program.computations[instruction.called["calls"][0]]
        elements = inside.instructions[inside.root].arrays[0].elements
        return [
            operand
            for parameter, operand in zip(inside.parameters, operands, strict=True)
            if isinstance(operand, Buffer) and _read_elementwise(inside, parameter, elements)
        ]

    def _nested(self, instruction: HloInstruction, operands: list[Value], ending: Set[Buffer]) -> Peak:
        """Return the peak inside the computations that an instruction runs, without its operands and results. `ending`:
        the operands of a conditional that nothing reads later."""
        computations = self.program.computations
        if instruction.opcode == "while":
            runs = (computations[name] for key in ("body", "condition") for name in instruction.called[key])
            return max((self.peak(run, operands) for run in runs), key=lambda p: p.bytes)
        if instruction.opcode == "conditional":
            branches = [name for names in instruction.called.values() for name in names]
            each = zip(branches, operands[1:], strict=False)
            peaks = (self.peak(computations[b], [o], ending) for b, o in each)
            return max(peaks, key=lambda p: p.bytes, default=Peak(0, tuple(ending)))
        if instruction.opcode == "call":
            return self.peak(computations[instruction.called["to_apply"][0]], operands)
        return Peak()

    def _value(self, instruction: HloInstruction, operands: list[Value]) -> Value:
        """Return the buffers of an instruction's result: its operands' for views and in-place writes, otherwise new."""
        match instruction.opcode:
            case "tuple":
                return tuple(operands)
            case "get-tuple-element":
                return operands[0][int(instruction.attribute("index"))]
            case "bitcast" | "opt-barrier" | "optimization-barrier" | "while" | "domain" | "all-reduce-done":
                return operands[0]
            case "dynamic-update-slice" | "scatter" if isinstance(operands[0], Buffer):
                return operands[0]
            case "copy-start":  # (destination, source, context)
                return (_new(instruction.type[0], instruction), operands[0], ())
            case "copy-done" | "send-done":
                return operands[0][0]
            case "all-gather-start" | "reduce-scatter-start" | "all-to-all-start" | "collective-permute-start":
                return _started(instruction, operands)
            case "async-start" | "slice-start" | "dynamic-slice-start":
                return _started(instruction, operands)
            case "async-update":
                return operands[0]
            case (
                "all-gather-done"
                | "reduce-scatter-done"
                | "all-to-all-done"
                | "collective-permute-done"
                | "async-done"
                | "slice-done"
                | "dynamic-slice-done"
            ):
                return operands[0][1]
            case "fusion" | "custom-call":
                return self._written_in_place(instruction, operands)
        return _new(instruction.type, instruction)

    def _written_in_place(self, instruction: HloInstruction, operands: list[Value]) -> Value:
        """Return new buffers, except for outputs that alias an operand.

        Such an output is a partial update at the end of a fusion, or a declared alias.
        """
        outputs = _new(instruction.type, instruction)
        into = self._updated(instruction.called["calls"][0]) if instruction.opcode == "fusion" else {}
        into = {**into, **_declared(instruction)}
        if isinstance(outputs, Buffer):
            into_first = into.get(0)
            operand = operands[into_first] if into_first is not None else None
            return operand if isinstance(operand, Buffer) else outputs
        parts = list(outputs)
        for output, operand in into.items():
            if isinstance(operands[operand], Buffer):
                parts[output] = operands[operand]
        return tuple(parts)

    @functools.cache  # noqa: B019
    def _updated(self, name: str) -> dict[int, int]:
        """Return {output: parameter} for outputs of a fusion that partially overwrite a parameter."""
        computation = self.program.computations[name]
        root = computation.instructions[computation.root]
        outputs = computation.operands(root) if root.opcode == "tuple" else [root]
        parameters = {}
        for number, output in enumerate(outputs):
            output = _through(computation, output)
            if output.opcode in ("dynamic-update-slice", "scatter"):
                source = _through(computation, computation.instructions[output.operands[0]])
                if source.opcode == "parameter":
                    parameters[number] = int(source.literal)
        return parameters


def _read_elementwise(computation: HloComputation, parameter: HloInstruction, elements: int) -> bool:
    """Return whether everything derived from a parameter keeps its number and order of elements."""
    reached, waiting = set(), [parameter]
    while waiting:
        instruction = waiting.pop()
        if instruction.name in reached or instruction.opcode == "tuple":
            continue
        if instruction.opcode in _MOVING or instruction.arrays[0].elements != elements:
            return False
        reached.add(instruction.name)
        waiting += computation.users[instruction.name]
    return True


def _last_reads(computation: HloComputation, values: dict[str, Value]) -> dict[Buffer, int]:
    """Return the position in execution order of each buffer's last read or write."""
    last = {}
    for at, instruction in enumerate(computation.instructions.values()):
        parts = (
            () if instruction.opcode == "get-tuple-element" else instruction.operands
        )  # the other elements are not read
        for name in (instruction.name, *parts):
            last.update((buffer, at) for buffer in _buffers(values[name]))
    return last


def _through(computation: HloComputation, instruction: HloInstruction) -> HloInstruction:
    """Return the instruction that a chain of views starts from."""
    while instruction.opcode in ("bitcast", "copy", "reshape"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _declared(instruction: HloInstruction) -> dict[int, int]:
    """Parse `output_to_operand_aliasing={{1}: (0, {})}` into {output: operand}."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?\)\s*)\}", instruction.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", found[1]) if found else ()
    return {int(output or 0): int(operand) for output, operand in pairs}


def _started(instruction: HloInstruction, operands: list[Value]) -> Value:
    """Return (operands, outputs, …) of an asynchronous operation."""
    _, output, *context = instruction.type
    sources = operands[0] if len(operands) == 1 else tuple(operands)
    return (sources, _new(output, instruction), *(() for _ in context))


def _new(type: HloType, maker: HloInstruction) -> Value:
    return Buffer(type, maker) if isinstance(type, HloArray) else tuple(_new(part, maker) for part in type)


def _buffers(value: Value) -> list[Buffer]:
    return [value] if isinstance(value, Buffer) else [buffer for part in value for buffer in _buffers(part)]
