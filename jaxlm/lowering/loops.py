"""Numbers of runs of a program's computations.

XLA states the trip counts of loops on some platforms only. Elsewhere they are read from a loop's own arithmetic: where
its counter starts, how far it steps, and the comparison that ends the loop.
"""

import functools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.lowering.hlo import HloComputation, HloInstruction, HloProgram, controlled, scope
from jaxlm.lowering.matmul_flops import instruction_flops

# Opcodes whose result has the value of their first operand.
_VIEWS = set("bitcast reshape convert copy copy-start copy-done opt-barrier optimization-barrier domain".split())
# XLA's own loops over the rows of experts, whose number is that of the tokens that chose each.
_TILES = re.compile(r"tiles_of_\d+_rows")
_OF_EXPERTS = ': take execution.kernels = "auto" on a GPU or a TPU, whose kernels for experts can be'
_COUNTED = re.compile(r"dot$|convolution$|all-|reduce-scatter|collective-")

_HOLDS = {
    **{"LT": operator.lt, "LE": operator.le, "EQ": operator.eq},
    **{"GT": operator.gt, "GE": operator.ge, "NE": operator.ne},
}

# An element of a value: its indices in nested tuples.
Element = tuple[int, ...]


@functools.lru_cache(maxsize=1)  # all that a report reads of a program asks for it
def times(program: HloProgram) -> dict[str, int]:
    """Return the number of runs of each computation by name, those inside fusions and reductions included.

    Of a conditional that decides between products by data, the branch with the most FLOPs runs each time. A loop whose
    trip count cannot be read, perhaps because it depends on data, runs as often as `program.trips` says;
    without that, once.

    Raises InputError, which names the loop, if such a loop has matrix products, kernels or collectives and no trips are
    stated: they are not counted by a guess.
    """
    counts = dict.fromkeys(program.computations, 0)
    for name, runs in _runs(_CallSite(program, program.entry), 1):
        counts[name] += runs
    return counts


def program_flops(program: HloProgram) -> int:
    """Return the FLOPs of all matrix products on one device, each multiplied by its number of runs."""
    counts = times(program)
    return sum(
        counts[computation.name] * instruction_flops(computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
    )


def executed(program: HloProgram) -> Iterator[tuple[HloComputation, HloInstruction, int]]:
    """Yield the instructions that the device executes, and their number of runs.

    These are the instructions of the entry computation and of its loops and branches, but not of loops without a trip,
    and not of fusions and reductions.
    """
    runs = times(program)
    reached, waiting = {}, [program.entry.name]
    while waiting:
        name = waiting.pop()
        if name not in reached and runs[name]:
            reached[name] = None
            for instruction in program.computations[name].instructions.values():
                waiting += controlled(instruction)
    for name in reached:
        for instruction in program.computations[name].instructions.values():
            yield program.computations[name], instruction, runs[name]


class _Integer(NamedTuple):
    """A number, plus an element of the state of the loop around unless `element` is None."""

    number: int
    element: Element | None = None


@dataclass(frozen=True)
class _CallSite:
    """A computation, and the instruction that calls it, in the computation of `caller`."""

    program: HloProgram
    computation: HloComputation
    caller: "_CallSite | None" = None
    call: HloInstruction | None = None

    def inside(self, call: HloInstruction, name: str) -> "_CallSite":
        return _CallSite(self.program, self.program.computations[name], self, call)

    def source(self, name: str, element: Element = ()) -> tuple["_CallSite", HloInstruction, Element]:
        """Return the instruction that computes an element of a value, and which element of its result that is.

        Views, tuples and calls are followed, but neither into loops nor out of them.
        """
        instruction = self.computation.instructions[name]
        caller = self.call.opcode if self.call else ""
        match instruction.opcode:
            case "get-tuple-element":
                return self.source(instruction.operands[0], (int(instruction.attribute("index")), *element))
            case "tuple" if element:
                return self.source(instruction.operands[element[0]], element[1:])
            case "fusion" | "call":
                inner = self.inside(
                    instruction, instruction.called["calls" if instruction.opcode == "fusion" else "to_apply"][0]
                )
                return inner.source(inner.computation.root, element)
            case "parameter" if caller in ("fusion", "call", "async-start"):
                return self.caller.source(self.call.operands[int(instruction.literal)], element)
            case "parameter" if caller == "conditional":
                branch = controlled(self.call).index(self.computation.name)
                return self.caller.source(self.call.operands[1 + branch], element)
            case opcode if opcode in _VIEWS:
                return self.source(instruction.operands[0], element)
        return self, instruction, element

    def integer(self, name: str, element: Element = ()) -> _Integer | None:
        """Return an element of a value if it is an integer that can be read."""
        site, instruction, element = self.source(name, element)
        match instruction.opcode:
            case "constant" if re.fullmatch(r"-?\d+", instruction.literal):
                return _Integer(int(instruction.literal))
            case "parameter" if site.call and site.call.opcode == "while":
                loop = _Loop(site.caller, site.call)
                return loop.start(element) if loop.keeps(element) else _Integer(0, element)
            case "while":
                return _Loop(site, instruction).end(element)
            case "add" | "subtract":
                left, right = (site.integer(operand) for operand in instruction.operands)
                if left and right and instruction.opcode == "add" and left.element is None:
                    left, right = right, left
                if left and right and right.element is None:
                    sign = 1 if instruction.opcode == "add" else -1
                    return _Integer(left.number + sign * right.number, left.element)
        return None


@dataclass(frozen=True)
class _Loop:
    """A loop, `while` in the computation of `site`."""

    site: _CallSite
    instruction: HloInstruction

    @property
    def body(self) -> _CallSite:
        return self.site.inside(self.instruction, self.instruction.called["body"][0])

    def keeps(self, element: Element) -> bool:
        """Return whether no trip changes an element of the state."""
        _, made, before = self.body.source(self.body.computation.root, element)
        return made.opcode == "parameter" and before == element

    def start(self, element: Element) -> _Integer | None:
        """Return an element of the initial state if it is the same each time that the loop runs."""
        found = self.site.integer(self.instruction.operands[0], element)
        return found if found and found.element is None else None

    def step(self, element: Element) -> int | None:
        """Return by how much each trip increases an element of the state."""
        found = self.body.integer(self.body.computation.root, element)
        return found.number if found and found.element == element else None

    def end(self, element: Element) -> _Integer | None:
        """Return an element of the final state."""
        if self.keeps(element):
            return self.site.integer(self.instruction.operands[0], element)
        start, step, trips = self.start(element), self.step(element), self.trips()
        return None if None in (start, step, trips) else _Integer(start.number + trips * step)

    def trips(self) -> int | None:
        """Return the trip count: XLA's own, or else read from the loop; None if it cannot be read."""
        if known := self.instruction.backend_config.get("known_trip_count"):
            return int(known["n"])
        condition = self.site.inside(self.instruction, self.instruction.called["condition"][0])
        compared = self.compared(condition, condition.computation.root)
        return compared and _trips(*compared)

    def compared(self, site: _CallSite, name: str) -> tuple[str, int, int] | None:
        """Return the direction of a comparison of integers, their distance (left less right) in the first trip, and by
        how much each trip increases it; None if `name` is anything else."""
        site, compare, _ = site.source(name)
        if compare.opcode != "compare":
            return None
        left, right = (self._course(site.integer(side)) for side in compare.operands)
        if left is None or right is None:
            return None
        return compare.attribute("direction"), left[0] - right[0], left[1] - right[1]

    def _course(self, side: _Integer | None) -> tuple[int, int] | None:
        """Return an integer before the first trip, and by how much each trip increases it."""
        if side is None:
            return None
        start, step = _Integer(0), 0
        if side.element is not None:
            start, step = self.start(side.element), self.step(side.element)
        return None if start is None or step is None else (start.number + side.number, step)


def _trips(direction: str, distance: int, step: int) -> int | None:
    """Return for how many trips a distance that grows by `step` compares so with 0; None if forever."""
    if direction in ("GT", "GE") or direction == "NE" and distance > 0:
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance -= 1
    if direction == "EQ" or direction == "NE" and step and distance % step:
        return None
    if distance >= 0:
        return 0
    return -(distance // step) if step > 0 else None


def _runs(site: _CallSite, runs: int | Fraction) -> Iterator[tuple[str, int | Fraction]]:
    """Yield the names of a computation that runs so often and of all that it calls, with their numbers of runs."""
    runs = int(runs) if runs.denominator == 1 else runs
    yield site.computation.name, runs
    for instruction in site.computation.instructions.values():
        dearest = None  # is looked for once, and only where no counter decides
        for name in (name for names in instruction.called.values() for name in names):
            inside, each = site.inside(instruction, name), runs
            if instruction.opcode == "while":
                each = runs * _trips_of(site, instruction)
            elif instruction.opcode == "conditional":
                each = _branch_runs(inside, runs)
                if each is None:
                    dearest = dearest or _dearest(site, instruction)
                    each = runs * (name in dearest)
            yield from _runs(inside, each)


def _trips_of(site: _CallSite, instruction: HloInstruction) -> int | Fraction:
    """Return a loop's trip count; where it cannot be read the one that is stated, or 1 if nothing in the loop is
    counted."""
    trips = _Loop(site, instruction).trips()
    trips = site.program.stated_trips(instruction) if trips is None else trips
    if trips is not None:
        return trips
    inside = (run for name in controlled(instruction) for run in _runs(site.inside(instruction, name), 1))
    if any(_counted(site.program.computations[name]) for name, _ in inside):
        of = scope(instruction.op_name) or site.program.source(instruction) or "of unknown scope"
        raise InputError(
            f"the compiled program does not show how often its loop {instruction.name} ({of}) runs, so the products, "
            f"kernels and collectives in it cannot be counted{_OF_EXPERTS if _TILES.search(of) else ''}"
        )
    return 1


def _branch_runs(branch: _CallSite, runs: int) -> int | None:
    """Return how often a branch runs where a loop's body, which runs so often, compares the loop's counter. None where
    it does not.

    XLA's windowed products send no part in the last trip.
    """
    body, conditional = branch.caller, branch.call
    if not (body.call and body.call.opcode == "while" and "true_computation" in conditional.called):
        return None
    loop = _Loop(body.caller, body.call)
    trips, compared = loop.trips(), loop.compared(body, conditional.operands[0])
    if not trips or compared is None:
        return None
    direction, distance, step = compared
    taken = sum(_HOLDS[direction](distance + step * trip, 0) for trip in range(trips))
    if branch.computation.name not in conditional.called["true_computation"]:
        taken = trips - taken
    return runs // trips * taken


def _dearest(site: _CallSite, conditional: HloInstruction) -> Sequence[str]:
    """Return the branch with the most FLOPs of products; all where none has any."""
    flops = {}
    for name in controlled(conditional):
        inside = _runs(site.inside(conditional, name), 1)
        parts = ((site.program.computations[each], times) for each, times in inside)
        flops[name] = sum(
            times * instruction_flops(part, instruction)
            for part, times in parts
            for instruction in part.instructions.values()
        )
    return [max(flops, key=flops.__getitem__)] if any(flops.values()) else [*flops]


def _counted(computation: HloComputation) -> bool:
    """Return whether a computation has matrix products, kernels, library calls or collectives."""
    return any(i.kernel or _COUNTED.match(i.opcode) for i in computation.instructions.values())
