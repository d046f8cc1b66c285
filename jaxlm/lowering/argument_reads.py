"""The bytes of each argument of a program that its kernels read and copy."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxlm.lowering import launched_kernels, loops
from jaxlm.lowering.hlo import HloComputation, HloInstruction, HloProgram
from jaxlm.lowering.loops import Element
from jaxlm.lowering.matmul_flops import instruction_flops


class ArgumentRead(NamedTuple):
    """An argument of a program on one device.

    Attributes:
      name: JAX's, such as "parameters['embedding']".
      bytes: of the argument.
      read: of it, by all kernels and all copies to faster memory.
      copied: written to device memory by what reads it and has no matrix product: copies, conversions, gathers.
    """

    name: str
    bytes: int
    read: int
    copied: int


def argument_reads(program: HloProgram) -> list[ArgumentRead]:
    """Return the arguments in order.

    An array that is updated in place stays the argument. What lies in faster memory is read there for nothing.
    """
    reads = []
    runs = loops.times(program)
    for parameter in program.entry.parameters:
        reader = _ArgumentReader(program, runs)
        reader.follow(program.entry, parameter.name, ())
        reads.append(
            ArgumentRead(
                parameter.op_name or parameter.name,
                sum(array.bytes for array in parameter.arrays),
                # What the run before has fetched is not read again, unless each run ends with a copy for the next.
                sum(read for read, _ in reader.found.values()) or reader.prefetched,
                sum(copied for _, copied in reader.found.values()),
            )
        )
    return reads


@dataclass
class _ArgumentReader:
    """The readers of one array, as it passes from instruction to instruction: (bytes read, bytes copied) of each."""

    program: HloProgram
    runs: dict[str, int]
    found: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    seen: set[tuple[str, str, Element]] = field(default_factory=set)
    prefetched: int = 0

    def follow(self, computation: HloComputation, name: str, element: Element) -> None:
        """Find the readers of an element of a value."""
        if (key := (computation.name, name, element)) in self.seen:
            return
        self.seen.add(key)
        for user in computation.users[name]:
            for place, operand in enumerate(user.operands):
                if operand == name:
                    self._use(computation, user, place, element)

    def _use(self, computation: HloComputation, user: HloInstruction, place: int, element: Element) -> None:
        inside = self.program.computations
        match user.opcode:
            case "bitcast" | "opt-barrier" | "optimization-barrier":
                self.follow(computation, user.name, element)
            case "get-tuple-element":
                if element[0] == int(user.attribute("index")):
                    self.follow(computation, user.name, element[1:])
            case "tuple":
                self.follow(computation, user.name, (place, *element))
            case "while":
                for name in (*user.called["body"], *user.called["condition"]):
                    self.follow(inside[name], inside[name].parameters[0].name, element)
                self.follow(computation, user.name, element)
            case "call":
                called = inside[user.called["to_apply"][0]]
                self.follow(called, called.parameters[place].name, element)
            case "dynamic-update-slice" | "scatter" if place == 0:
                self.follow(computation, user.name, element)
            case "fusion":
                self._use_in_fusion(computation, user, place)
            case "copy-start" if user.attribute("cross_program_prefetch_index"):
                self.prefetched = user.arrays[0].bytes
            case "copy-start" | "slice-start":
                target = user.arrays[0] if user.opcode == "copy-start" else user.arrays[-2]
                self._add(computation, user, target.bytes, target.bytes if target.space == 0 else 0)
            case _:
                read = self._operand_bytes(computation, user, place)
                self._add(computation, user, read, self._copied(computation, user, place))

    def _operand_bytes(self, computation: HloComputation, user: HloInstruction, place: int) -> int:
        """Return the bytes that an instruction reads of an operand: of slices only their part."""
        if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
            return sum(array.bytes for array in user.arrays)
        return sum(array.bytes for array in computation.operands(user)[place].arrays if array.space == 0)

    def _use_in_fusion(self, computation: HloComputation, fusion: HloInstruction, place: int) -> None:
        inner = self.program.computations[fusion.called["calls"][0]]
        parameter = inner.parameters[place]
        outputs = list(_updated_outputs(inner, parameter))
        for element in outputs:
            self.follow(computation, fusion.name, element)
        if outputs:
            return
        whole = self._operand_bytes(computation, fusion, place)
        self._add(
            computation,
            fusion,
            min(whole, launched_kernels.bytes_read(self.program, inner, parameter)),
            self._copied(computation, fusion, place),
        )

    def _copied(self, computation: HloComputation, user: HloInstruction, place: int) -> int:
        """Return the bytes that an instruction computes of an operand and writes to device memory: none of a matrix
        product or a kernel."""
        parts = launched_kernels.fused(self.program, computation, user)
        if any(part.kernel or instruction_flops(where, part) for where, part in parts):
            return 0
        arrays = user.arrays
        if user.opcode == "fusion":
            inner = self.program.computations[user.called["calls"][0]]
            root, parameter = inner.instructions[inner.root], inner.parameters[place]
            outputs = inner.operands(root) if root.opcode == "tuple" else [root]
            arrays = [
                array for output, array in zip(outputs, arrays, strict=True) if _depends(inner, output, parameter)
            ]
        return sum(array.bytes for array in arrays if array.space == 0)

    def _add(self, computation: HloComputation, user: HloInstruction, read: int, copied: int) -> None:
        runs, key = self.runs[computation.name], (computation.name, user.name)
        before = self.found.get(key, (0, 0))
        self.found[key] = before[0] + runs * read, runs * copied


def _updated_outputs(inner: HloComputation, parameter: HloInstruction) -> Iterator[Element]:
    """Yield which outputs of a fusion are a parameter that it updates in place."""
    root = inner.instructions[inner.root]
    outputs = inner.operands(root) if root.opcode == "tuple" else [root]
    for place, output in enumerate(outputs):
        updated = False
        while output.opcode in ("bitcast", "dynamic-update-slice", "scatter"):
            updated |= output.opcode != "bitcast"
            output = inner.instructions[output.operands[0]]
        if updated and output is parameter:
            yield (place,) if root.opcode == "tuple" else ()


def _depends(inner: HloComputation, output: HloInstruction, parameter: HloInstruction) -> bool:
    """Return whether an instruction of a fusion is computed of a parameter."""
    waiting, seen = [output], set()
    while waiting:
        made = waiting.pop()
        if made is parameter:
            return True
        if made.name not in seen:
            seen.add(made.name)
            waiting += inner.operands(made)
    return False
