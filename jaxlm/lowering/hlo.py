"""XLA's optimised, scheduled programs, parsed from text.

A program has computations, their instructions in execution order, and the source line of each instruction.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jaxlm.lowering import shapes
from jaxlm.lowering.shapes import HloArray, HloType

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|(?:branch|called)_computations|(?:true|false)_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
_METADATA = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
# Custom calls that are annotations for XLA's own passes.
_ANNOTATIONS = re.compile(
    r"Sharding|SPMD|AllocateBuffer|Bitcast|AsyncCollective|Bitpacked|AssumeGather|AnnotateDevice|MoveTo|SliceId|ZeroCrop"
)
# Scopes that JAX's own machinery adds to operation names.
_SCOPES = re.compile(
    r"^(?:jit\([^)]*\)|while|body|closed_call|checkpoint|cond|branch_\d+_fun|shard_map|pallas_call|mpmd_map|eval_jaxpr)$"
)
_TRANSFORMATIONS = re.compile(r"^(?:transpose\(|jvp\()+")
# Library packages: their callers' lines say more than their own.
_LIBRARIES = re.compile(r"[/\\](?:jax|jaxlib|flax|optax|einops|jax_plugins)[/\\]")


Trips = int | Fraction | Mapping[str, int | Fraction] | None


@dataclass
class HloInstruction:
    """One line of a computation: `operands` are names, `attributes` is the text after them."""

    name: str
    type: HloType
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""  # the text in the parentheses of a constant or a parameter

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of called computations, by attribute."""
        return {key: tuple(_NAME.findall(value)) for key, value in _CALLED.findall(self.attributes)}

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name of the operation, a path of scopes such as "jit(train)/jvp()/while/body/layers/query/dot"."""
        found = _METADATA.search(self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        try:
            return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
        except json.JSONDecodeError:
            return {}

    @property
    def kernel(self) -> str | None:
        """The target of a custom call that runs a kernel; None for annotations and other instructions."""
        target = self.attribute("custom_call_target") if self.opcode == "custom-call" else None
        return target if target and not _ANNOTATIONS.search(target) else None

    def attribute(self, key: str) -> str | None:
        """Return the text of an attribute, such as "{1}" of `lhs_contracting_dims`; None if absent."""
        found = re.search(rf'(?:^|[\s,]){key}=("[^"]*"|\{{[^}}]*\}}|[^,\s]+)', self.attributes)
        return found[1].strip('"') if found else None

    def dimensions(self, key: str) -> tuple[int, ...]:
        """Return the integers in an attribute; empty if absent."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attribute(key) or ""))

    @property
    def arrays(self) -> list[HloArray]:
        return shapes.arrays(self.type)


@dataclass
class HloComputation:
    """Instructions by name, in execution order."""

    name: str
    instructions: dict[str, HloInstruction] = field(default_factory=dict)
    root: str = ""

    @property
    def parameters(self) -> list[HloInstruction]:
        """Parameters, in the order of their numbers."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    @functools.cached_property
    def users(self) -> dict[str, list[HloInstruction]]:
        """Readers of each instruction, by its name."""
        users: dict[str, list[HloInstruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    def operands(self, instruction: HloInstruction) -> list[HloInstruction]:
        return [self.instructions[name] for name in instruction.operands]


@dataclass(eq=False)
class HloProgram:
    """A compiled program, the same for all devices of a mesh.

    Attributes:
      frames: file, line, and number of the frame that called it.
      trips: of loops whose trips depend on data: of all of them, or of those in a scope, by its last name. A fraction
        is the mean of a loop that runs in a loop.
    """

    computations: dict[str, HloComputation]
    entry: HloComputation
    frames: dict[int, tuple[str, int, int]]
    trips: Trips = None

    def stated_trips(self, loop: HloInstruction) -> int | Fraction | None:
        """Return the trips that `trips` gives a loop; None if it gives none."""
        if not isinstance(self.trips, Mapping):
            return self.trips
        parts = loop.op_name.split("/")
        return next((trips for name, trips in self.trips.items() if name in parts), None)

    def source(self, instruction: HloInstruction) -> str:
        """Return the innermost source line outside JAX and its libraries, such as "file.py:12"."""
        if found := _LINE.search(instruction.attributes):
            return f"{_short(found[1])}:{found[2]}"
        found = _FRAME.search(instruction.attributes)
        at, line = int(found[1]) if found else 0, ""
        while at in self.frames:
            file, number, at = self.frames[at]
            if not _LIBRARIES.search(file):
                return f"{_short(file)}:{number}"
            line = line or f"{_short(file)}:{number}"
        return line


def controlled(instruction: HloInstruction) -> tuple[str, ...]:
    """Return the computations that this instruction runs as control flow: loop bodies, conditions and branches."""
    if instruction.opcode == "while":
        return (*instruction.called["body"], *instruction.called["condition"])
    if instruction.opcode in ("conditional", "call", "async-start"):
        return tuple(name for names in instruction.called.values() for name in names)
    return ()


def scope(op_name: str) -> str:
    """Return JAX's name of an operation without the scopes that JAX's machinery adds.

    The prefix "backward" marks the backward pass, "again" recomputation for it.
    """
    parts = op_name.split("/")
    kept = [bare for part in parts if (bare := _bare(part)) and not _SCOPES.match(bare)]
    again = "rematted_computation" in kept
    kept = [part for part in kept if part != "rematted_computation"]
    before = "again " if again else "backward " if any(part.startswith("transpose(") for part in parts) else ""
    return before + "/".join(kept)


def _bare(part: str) -> str:
    """Strip transformations from one part of a name (their parentheses may close in a later part), and "<locals>"."""
    part = _TRANSFORMATIONS.sub("", part)
    closed = max(part.count(")") - part.count("("), 0)
    return part[: len(part) - closed].rpartition("<locals>.")[2]


def parse(text: str, trips: Trips = None) -> HloProgram:
    """Parse the text of `jax.stages.Compiled.as_text()`, whose loops over data have these `trips` (`HloProgram`)."""
    computations: dict[str, HloComputation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = computation = table = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = computations[match[2]] = HloComputation(match[2])
            entry = computation if match[1] else entry
        elif line.startswith("}"):
            computation = None
        elif computation is not None:
            if match := _INSTRUCTION.match(line):
                instruction = _instruction(match[2], _COMMENT.sub("", match[3]))
                computation.instructions[instruction.name] = instruction
                if match[1]:
                    computation.root = instruction.name
        elif match := _TABLE.match(line):
            table = tables.setdefault(match[1], {})
        elif table is not None and (match := re.match(r"^(\d+) (.*)$", line)):
            table[int(match[1])] = match[2]
    if entry is None:
        raise ValueError("the text holds no program")
    return HloProgram(computations, entry, _frames(tables), trips)


def _instruction(name: str, text: str) -> HloInstruction:
    """Parse `TYPE opcode(operands), attributes`."""
    type, at = shapes.parse(text, 0)
    opcode, _, rest = text[at:].strip().partition("(")
    depth, end = 1, 0
    quoted = False
    for end, character in enumerate(rest):  # noqa: B007
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "({":
            depth += 1
        elif not quoted and character in ")}":
            depth -= 1
            if not depth:
                break
    inside, attributes = rest[:end], rest[end + 1 :].lstrip(", ")
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(inside))
    # An asynchronous fusion (newer XLA) is read as a synchronous one at its start.
    if opcode == "fusion-start":
        opcode, type = "fusion", type[1]
    elif opcode == "fusion-done":
        opcode = "bitcast"
    return HloInstruction(name, type, opcode, operands, attributes, inside if not operands else "")


def _frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[str, int, int]]:
    """Return the stack frames of a program's tables; the parent of an outermost frame is 0."""
    numbers = {
        name: {id: {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", row)} for id, row in rows.items()}
        for name, rows in tables.items()
    }
    files, places, frames = (
        tables.get("FileNames", {}),
        numbers.get("FileLocations", {}),
        numbers.get("StackFrames", {}),
    )
    # Parent ids may be offset by one from frame ids; parent 1 then means none.
    shift = 1 if frames.get(1, {}).get("parent_frame_id") == 1 else 0
    locations = {}
    for id, frame in frames.items():
        place = places.get(frame.get("file_location_id", 0), {})
        file = files.get(place.get("file_name_id", 0), "").strip('"')
        locations[id] = file, place.get("line", 0), frame.get("parent_frame_id", shift) - shift
    return locations


def _short(file: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(re.split(r"[/\\]", file)[-2:])
