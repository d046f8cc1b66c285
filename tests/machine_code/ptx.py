"""PTX as data: the kernels of a text, each as basic blocks of instructions.

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
# A brace that is no vector's, maybe behind a label.
_SCOPE = re.compile(r"^([$\w]+:)?\s*([{}])\s*(?=[$@.\w{}]|$)")

# Behind these some threads go on elsewhere, or later.
_PARTINGS = ("bra", "ret", "exit", "bar", "barrier")


class Address(NamedTuple):
    """[base + offset]; of what has a base and coordinates, such as a tensor map, also those."""

    base: str
    offset: int
    coordinates: tuple[str, ...] = ()


Operand = str | Address | tuple


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      predicate: register without which it does nothing, None where there is none; unless `negated`, then with.
      opcode: before the first dot, `modifiers` behind it.
      operands: registers, numbers and labels as text; addresses; vectors of them as tuples.
    """

    predicate: str | None
    negated: bool
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str


class Kernel(NamedTuple):
    """One kernel.

    Attributes:
      parameters: names, in their order.
      threads: of a block, along x, y and z.
      shared: by name of an array in shared memory its offset.
      shared_size: bytes of those whose size is declared; `shared_grows` where another has its size from the launch.
      widths: by name of a register, without its number, its width in bits; 1 of predicates.
      blocks: basic blocks; where one does not end by a jump, the next follows.
      labels: by name the index of the block that it stands before.
    """

    name: str
    parameters: tuple[str, ...]
    threads: tuple[int, int, int]
    shared: Mapping[str, int]
    shared_size: int
    shared_grows: bool
    widths: Mapping[str, int]
    blocks: tuple[tuple[Instruction, ...], ...]
    labels: Mapping[str, int]


def kernels(text: str) -> Iterator[Kernel]:
    """The kernels of a text."""
    text = _DIRECTIVE.sub("", re.sub(r"//[^\n]*", "", text))
    shared, size = {}, 0
    declared = _SHARED.findall(text)
    for alignment, name, length in sorted(declared, key=lambda found: not found[2]):  # those that grow are last
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
        yield Kernel(
            name, names, tuple(int(n or 1) for n in threads.groups()), shared, size, grows, widths, blocks, labels
        )


def _within_braces(text: str, start: int) -> str:
    """From behind an opening brace up to that which closes it."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    raise ValueError("a kernel has no end")


def _blocks(body: str) -> tuple[dict[str, int], tuple, dict[str, int]]:
    widths: dict[str, int] = {}
    labels: dict[str, int] = {}
    blocks: list[list[Instruction]] = [[]]
    jumps: list[tuple[list[Instruction], tuple[int, ...]]] = []
    for statement, scope in _statements(body):
        while label := _LABEL.match(statement):
            if blocks[-1]:
                blocks.append([])
            labels[_scoped(label[1], scope)] = len(blocks) - 1
            statement = statement[label.end() :]
        if declared := _REGISTERS.match(statement):
            bits = 1 if declared[1] == "pred" else int(declared[1][1:])
            widths |= {re.sub(r"<\d+>$", "", name.strip()): bits for name in declared[2].split(",")}
        elif statement and not statement.startswith("."):
            instruction = _instruction(statement)
            blocks[-1].append(instruction)
            if instruction.opcode == "bra":
                jumps.append((blocks[-1], scope))
            if instruction.opcode in _PARTINGS:
                blocks.append([])
    for block, scope in jumps:  # to the label of the innermost scope that has it
        name = block[-1].operands[0]
        known = (_scoped(name, scope[:depth]) for depth in range(len(scope), -1, -1))
        block[-1] = block[-1]._replace(operands=(next(label for label in known if label in labels),))
    return widths, tuple(map(tuple, blocks)), labels


def _scoped(label: str, scope: tuple[int, ...]) -> str:
    return ".".join((label, *map(str, scope)))


def _statements(body: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Between semicolons, each with the scopes that it is in; of registers the names differ anyway, or the values do
    not live on."""
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


def _instruction(text: str) -> Instruction:
    negated, predicate, opcode, modifiers, rest = _INSTRUCTION.fullmatch(text).groups()
    operands = tuple(_operand(found) for found in _OPERAND.findall(rest.replace("|", ", ")))
    return Instruction(predicate, bool(negated), opcode, tuple(modifiers.split(".")[1:]), operands, text)


def _operand(text: str) -> Operand:
    inner = text[1:-1].strip()
    if text.startswith("{"):
        return tuple(part.strip() for part in inner.split(","))
    if text.startswith("["):
        place, _, coordinates = inner.partition(",")
        base, _, offset = place.partition("+")
        return Address(base.strip(), int(offset or "0", 0), tuple(re.findall(r"[-%\w]+", coordinates)))
    return text
