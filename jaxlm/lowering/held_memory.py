"""The memory of compiled programs: arguments, outputs and temporaries, and what is held at their peak."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxlm.costs.hardware.chips import Chip
from jaxlm.lowering import buffers, hlo
from jaxlm.lowering.programs import StepPrograms
from jaxlm.parallel.program import bytes_on_device


class CompiledMemory(NamedTuple):
    """Memory of a compiled program, in bytes on one device.

    Attributes:
      outputs: without outputs that reuse a donated argument's buffer.
      temporaries: live only during the program.
      peak: arguments, outputs and temporaries together.
      gaps: free space that a TPU's allocator leaves between temporaries; it closes them when memory is short.
      capacity: memory that a program may use on the chip.
    """

    arguments: int
    outputs: int
    temporaries: int
    peak: int
    gaps: int
    capacity: int


class HeldBuffers(NamedTuple):
    """Identical buffers that are live at the peak of the temporaries, or arguments of one kind."""

    bytes: int
    count: int
    array: str
    name: str
    source: str


def memory_of(compiled: jax.stages.Compiled, chip: Chip) -> CompiledMemory:
    """Return a compiled program's memory on one device.

    A GPU's runtime allocates temporaries as one block, gaps included.
    """
    analysis = compiled.memory_analysis()
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    taken = analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes
    peak = min(taken, analysis.peak_memory_in_bytes) if chip.kind == "tpu" else taken
    arguments = analysis.argument_size_in_bytes
    temporaries = peak - arguments - outputs
    return CompiledMemory(arguments, outputs, temporaries, peak, taken - peak, chip.device_capacity())


def memory_together(programs: StepPrograms, memories: Sequence[CompiledMemory | None]) -> CompiledMemory:
    """Return the memory of a step and of the programs beside it, one of which runs while the arguments and outputs of
    all stay; None stands for a program that there is not. The logits are an output of the step and an argument of the
    draw, and a draft model has parameters, pages and rows of its own."""
    each = StepPrograms(*memories)
    others = [memory for memory in each[1:] if memory is not None]
    arguments = each.step.arguments
    if programs.draw is not None:
        _, logits, *_ = programs.draw.operands
        arguments += each.draw.arguments - bytes_on_device(logits)
    if programs.read is not None:
        parameters, pages, _, batch, _ = programs.read.operands
        *_, rows, _ = programs.propose.operands
        arguments += bytes_on_device((parameters, pages, batch, rows))
    outputs = each.step.outputs + sum(memory.outputs for memory in others)
    larger = max(each.step, *others, key=lambda memory: memory.temporaries) if others else each.step
    peak = arguments + outputs + larger.temporaries
    return CompiledMemory(arguments, outputs, larger.temporaries, peak, larger.gaps, each.step.capacity)


# Arguments of a program that others do not have, by what stands before their names in a report.
_OWN = {"draw": ("", ("state",)), "read": ("draft model's ", ("parameters", "pages"))}


def held_buffers(larger: hlo.HloProgram, step: hlo.HloProgram, **beside: hlo.HloProgram) -> tuple[HeldBuffers, ...]:
    """Return arguments grouped by the first part of their path, those that programs beside the step have alone among
    them, and the identical temporaries of the program that has most (`larger`); the largest first."""
    arguments, temporaries = Counter(), Counter()
    for parameter in step.entry.parameters:
        arguments[_name(parameter, r"[\[/]")] += sum(array.bytes for array in parameter.arrays)
    for program, (before, names) in ((beside[key], own) for key, own in _OWN.items() if key in beside):
        for parameter in program.entry.parameters:
            if (name := _name(parameter, r"[\[/.]")) in names:
                arguments[before + name] += sum(array.bytes for array in parameter.arrays)
    sizes = {}
    for buffer in buffers.peak(larger).buffers:
        maker = buffer.maker
        key = str(buffer.array), hlo.scope(maker.op_name) or maker.name, larger.source(maker)
        temporaries[key] += 1
        sizes[key] = buffer.bytes
    held = [HeldBuffers(size, 1, "", name, "") for name, size in arguments.items()]
    held += [HeldBuffers(count * sizes[key], count, *key) for key, count in temporaries.items()]
    return tuple(sorted(held, key=lambda each: -each.bytes))


def _name(parameter: hlo.HloInstruction, until: str) -> str:
    """Return the first part of the path of an argument, up to one of these characters."""
    return re.split(until, parameter.op_name)[0] or parameter.name
