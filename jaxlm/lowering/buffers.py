"""What lies in a device's memory while a program runs, found by following each buffer from where it is made to where
it is last read. XLA's own report says how much; this says what.

The program is scheduled, so the order is that of its text. Not modelled: the gaps that XLA's allocator leaves.
"""

import functools
import re
from dataclasses import dataclass

from jaxlm.lowering.hlo import Computation, Instruction, Program
from jaxlm.lowering.shapes import Array, Type


@dataclass(eq=False)
class Buffer:
    """A stretch of the device's memory, and the instruction that writes it first."""

    array: Array
    maker: Instruction

    @property
    def bytes(self) -> int:
        return self.array.bytes if self.array.space == 0 else 0


# The buffers of a value: one, or those of a tuple's parts.
Value = Buffer | tuple["Value", ...]


@dataclass(frozen=True)
class Peak:
    """The buffers that are held where they are largest together."""

    bytes: int = 0
    buffers: tuple[Buffer, ...] = ()


def peak(program: Program) -> Peak:
    """The program's temporaries where they are largest: arguments and outputs are not among them."""
    entry = program.entry
    given = [_fresh(parameter.type, parameter) for parameter in entry.parameters]
    return _Run(program).peak(entry, given)


# Operations that XLA lets write over an operand.
_IN_PLACE = ("add", "multiply", "subtract", "select", "convert", "copy", "all-reduce", "all-reduce-start")

# Operations that read a number in one place to write it in another.
_MIXING = ("transpose", "reverse", "gather", "dot", "convolution", "concatenate", "pad")


class _Run:
    def __init__(self, program: Program):
        self.program = program

    def peak(self, computation: Computation, given: list[Value]) -> Peak:
        """Of one run of a computation, whose parameters and results lie in the caller's memory: a loop hands on what it
        has where it was given, and the program's outputs are none of its temporaries."""
        values: dict[str, Value] = {}
        inner: dict[str, Peak] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode == "parameter":
                values[instruction.name] = given[int(instruction.literal)]
            else:
                operands = [values[name] for name in instruction.operands]
                values[instruction.name] = self._value(instruction, operands)
                inner[instruction.name] = self._beneath(instruction, operands)
        last = _last_reads(computation, values)
        theirs = {buffer for value in (*given, values[computation.root]) for buffer in _buffers(value)}
        known = set(theirs)
        live: set[Buffer] = set()
        held, best = 0, Peak()
        for at, (name, instruction) in enumerate(computation.instructions.items()):
            made = [b for b in dict.fromkeys(_buffers(values[name])) if b.bytes and b not in known]
            known.update(made)
            # An output takes the place of an operand of its size that nobody reads any more.
            ends = [b for b in self._overwritable(instruction, values) if last[b] == at and b in live]
            over = [next((b for b in ends if b.bytes == output.bytes), None) for output in made[:1]]
            live = (live - set(over)) | set(made)
            held += sum(b.bytes for b in made) - sum(b.bytes for b in over if b is not None)
            beneath = inner.get(name, Peak())
            if held + beneath.bytes > best.bytes:
                best = Peak(held + beneath.bytes, (*live, *beneath.buffers))
            gone = {b for b in live if last[b] <= at}
            live -= gone
            held -= sum(b.bytes for b in gone)
        return best

    def _overwritable(self, instruction: Instruction, values: dict[str, Value]) -> list[Buffer]:
        """Operands that an output may be written over: those read at each place only to write that place."""
        operands = [values[name] for name in instruction.operands]
        if instruction.opcode in _IN_PLACE:
            return [operand for operand in operands if isinstance(operand, Buffer)]
        if instruction.opcode != "fusion":
            return []
        inside = self.program.computations[instruction.called["calls"][0]]
        numbers = inside.instructions[inside.root].arrays[0].numbers
        return [
            operand
            for parameter, operand in zip(inside.parameters, operands, strict=True)
            if isinstance(operand, Buffer) and _read_place_by_place(inside, parameter, numbers)
        ]

    def _beneath(self, instruction: Instruction, operands: list[Value]) -> Peak:
        """What the computations that an instruction runs hold beyond what it is given and gives."""
        computations = self.program.computations
        if instruction.opcode == "while":
            runs = (computations[name] for key in ("body", "condition") for name in instruction.called[key])
            return max((self.peak(run, operands) for run in runs), key=lambda p: p.bytes)
        if instruction.opcode == "conditional":
            branches = [name for names in instruction.called.values() for name in names]
            each = zip(branches, operands[1:], strict=False)
            return max((self.peak(computations[b], [o]) for b, o in each), key=lambda p: p.bytes, default=Peak())
        if instruction.opcode == "call":
            return self.peak(computations[instruction.called["to_apply"][0]], operands)
        return Peak()

    def _value(self, instruction: Instruction, operands: list[Value]) -> Value:
        """The buffers of what an instruction gives: those of its operands where it writes into them or only looks at
        them anew, and new ones otherwise."""
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
                return (_fresh(instruction.type[0], instruction), operands[0], ())
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
        return _fresh(instruction.type, instruction)

    def _written_in_place(self, instruction: Instruction, operands: list[Value]) -> Value:
        """New buffers, but for outputs that are written into an operand's: a fusion that ends with an update of a part,
        or whatever says so itself."""
        outputs = _fresh(instruction.type, instruction)
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
        """Of a fusion's computation: which outputs are parameters with a part of them overwritten."""
        computation = self.program.computations[name]
        root = computation.instructions[computation.root]
        outputs = computation.operands(root) if root.opcode == "tuple" else [root]
        found = {}
        for number, output in enumerate(outputs):
            output = _through(computation, output)
            if output.opcode in ("dynamic-update-slice", "scatter"):
                source = _through(computation, computation.instructions[output.operands[0]])
                if source.opcode == "parameter":
                    found[number] = int(source.literal)
        return found


def _read_place_by_place(computation: Computation, parameter: Instruction, numbers: int) -> bool:
    """Whether everything that is made of a parameter has as many numbers, in the same order."""
    reached, waiting = set(), [parameter]
    while waiting:
        instruction = waiting.pop()
        if instruction.name in reached or instruction.opcode == "tuple":
            continue
        if instruction.opcode in _MIXING or instruction.arrays[0].numbers != numbers:
            return False
        reached.add(instruction.name)
        waiting += computation.users[instruction.name]
    return True


def _last_reads(computation: Computation, values: dict[str, Value]) -> dict[Buffer, int]:
    """Where in the computation's order each buffer is read or written last."""
    last = {}
    for at, instruction in enumerate(computation.instructions.values()):
        parts = () if instruction.opcode == "get-tuple-element" else instruction.operands  # others are not looked at
        for name in (instruction.name, *parts):
            last.update((buffer, at) for buffer in _buffers(values[name]))
    return last


def _through(computation: Computation, instruction: Instruction) -> Instruction:
    """What a view is a view of."""
    while instruction.opcode in ("bitcast", "copy", "reshape"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _declared(instruction: Instruction) -> dict[int, int]:
    """`output_to_operand_aliasing={{1}: (0, {})}`."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?\)\s*)\}", instruction.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", found[1]) if found else ()
    return {int(output or 0): int(operand) for output, operand in pairs}


def _started(instruction: Instruction, operands: list[Value]) -> Value:
    """(operands, outputs, …) of an operation that goes on beside the next ones."""
    _, output, *context = instruction.type
    sources = operands[0] if len(operands) == 1 else tuple(operands)
    return (sources, _fresh(output, instruction), *(() for _ in context))


def _fresh(type: Type, maker: Instruction) -> Value:
    return Buffer(type, maker) if isinstance(type, Array) else tuple(_fresh(part, maker) for part in type)


def _buffers(value: Value) -> list[Buffer]:
    return [value] if isinstance(value, Buffer) else [buffer for part in value for buffer in _buffers(part)]
