"""A parser of PTX: the kernels of a text, each as basic blocks of instructions.

Source: NVIDIA, Parallel Thread Execution ISA, version 9.0.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_KERNEL = re.compile(r"\.entry\s+(\w+)\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(?:align\s+\d+\s+\.)?\w+[^,]*?(\w+)(?:\[(\d+)\])?\s*(?:,|$)")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)(?:\[(\d*)\])?;")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_DIRECTIVE = re.compile(r"^\s*\.(?:loc|file|pragma|section)\b[^\n]*$", re.MULTILINE)
_LABEL = re.compile(r"^([$\w]+):(?!:)\s*")
# A brace that is no vector's, maybe after a label.
_SCOPE = re.compile(r"^([$\w]+:)?\s*([{}])\s*(?=[$@.\w{}]|$)")

# After these, some threads proceed elsewhere or later.
_DIVERGING = ("bra", "ret", "exit", "bar", "barrier")


class Address(NamedTuple):
    """An address, base + offset; of a tensor map also the coordinates in its array."""

    base: str
    offset: int
    coordinates: tuple[str, ...] = ()


Operand = str | Address | tuple


class PtxInstruction(NamedTuple):
    """One instruction.

    Attributes:
      predicate: register that must be true for the instruction to run, or false if `negated`; None without one.
      opcode: the name before the first dot; `modifiers` are the names after.
      operands: registers, numbers and labels as text; addresses; vectors as tuples.
      text: as written.
    """

    predicate: str | None
    negated: bool
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str


class PtxKernel(NamedTuple):
    """One kernel.

    Attributes:
      parameters: names, in order.
      threads: threads of a block along x, y and z.
      shared: offsets of the arrays in shared memory, by name.
      shared_size: bytes of the arrays with a declared size; `shared_grows` if one gets its size at launch.
      widths: widths of registers in bits, by name; 1 for predicates.
      blocks: basic blocks; one that does not end in a jump falls through to the next.
      labels: index of the basic block that each label precedes, by name.
    """

    name: str
    parameters: tuple[str, ...]
    threads: tuple[int, int, int]
    shared: Mapping[str, int]
    shared_size: int
    shared_grows: bool
    widths: Mapping[str, int]
    blocks: tuple[tuple[PtxInstruction, ...], ...]
    labels: Mapping[str, int]


def kernels(text: str) -> Iterator[PtxKernel]:
    """Yield the kernels of a text."""
    text = _DIRECTIVE.sub("", re.sub(r"//[^\n]*", "", text))
    shared, size = {}, 0
    declared = _SHARED.findall(text)
    for alignment, name, length in sorted(declared, key=lambda found: not found[2]):  # those sized at launch come last
        size = -(-size // int(alignment)) * int(alignment)
        shared[name] = size
        size += int(length or 0)
    grows = any(not length for *_, length in declared)
    for head in _KERNEL.finditer(text):
        name, parameters, directives = head.groups()
        body = _within_braces(text, head.end())
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", directives)
        names = tuple(found[0] for found in _PARAMETER.findall(parameters))
        widths, blocks, labels = _blocks(body)
        yield PtxKernel(
            name, names, tuple(int(n or 1) for n in threads.groups()), shared, size, grows, widths, blocks, labels
        )


def _within_braces(text: str, start: int) -> str:
    """Return the text from after an opening brace to the brace that closes it."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    raise ValueError("the closing brace of a kernel is missing")


def _blocks(body: str) -> tuple[dict[str, int], tuple, dict[str, int]]:
    widths: dict[str, int] = {}
    labels: dict[str, int] = {}
    blocks: list[list[PtxInstruction]] = [[]]
    jumps: list[tuple[list[PtxInstruction], tuple[int, ...]]] = []
    for statement, scope in _statements(body):
        while label := _LABEL.match(statement):
            if blocks[-1]:
                blocks.append([])
            labels[_scoped(label[1], scope)] = len(blocks) - 1
            statement = statement[label.end() :]
        if declared := _REGISTERS.match(statement):
            bits = 1 if declared[1] == "pred" else int(declared[1][1:])
            widths |= {name: bits for names in declared[2].split(",") for name in _numbered(names.strip())}
        elif statement and not statement.startswith("."):
            instruction = _instruction(statement)
            blocks[-1].append(instruction)
            if instruction.opcode == "bra":
                jumps.append((blocks[-1], scope))
            if instruction.opcode in _DIVERGING:
                blocks.append([])
    for block, scope in jumps:  # to the label in the innermost scope
        name = block[-1].operands[0]
        known = (_scoped(name, scope[:depth]) for depth in range(len(scope), -1, -1))
        block[-1] = block[-1]._replace(operands=(next(label for label in known if label in labels),))
    return widths, tuple(map(tuple, blocks)), labels


def _numbered(names: str) -> list[str]:
    """Return the names of registers that are declared together, such as r0 and r1 for r<2>."""
    name, _, count = names.rstrip(">").partition("<")
    return [f"{name}{i}" for i in range(int(count))] if count else [name]


def _scoped(label: str, scope: tuple[int, ...]) -> str:
    return ".".join((label, *map(str, scope)))


def _statements(body: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the statements between semicolons, each with its scopes.

    Scopes matter for labels only: registers of different scopes differ in name, or their values do not outlive one.
    """
    scope: list[int] = []
    opened = 0
    for statement in body.split(";"):
        statement = " ".join(statement.split())
        while opening := _SCOPE.match(statement):
            label, brace = opening.groups()
            if label:
                yield label, tuple(scope)
            if brace == "{":
                opened += 1
                scope.append(opened)
            else:
                scope.pop()
            statement = statement[opening.end() :]
        yield statement, tuple(scope)


def _instruction(text: str) -> PtxInstruction:
    negated, predicate, opcode, modifiers, rest = _INSTRUCTION.fullmatch(text).groups()
    operands = tuple(_operand(found) for found in _OPERAND.findall(rest.replace("|", ", ")))
    return PtxInstruction(predicate, bool(negated), opcode, tuple(modifiers.split(".")[1:]), operands, text)


def _operand(text: str) -> Operand:
    inner = text[1:-1].strip()
    if text.startswith("{"):
        return tuple(part.strip() for part in inner.split(","))
    if text.startswith("["):
        place, _, coordinates = inner.partition(",")
        base, _, offset = place.partition("+")
        return Address(base.strip(), int(offset or "0", 0), tuple(re.findall(r"[-%\w]+", coordinates)))
    return text
