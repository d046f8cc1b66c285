"""What XLA makes of a step on chips that need not be here: the compiled rung, beside the counted one."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxlm.config import Experiment, workload
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.network import KINDS, Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count_jaxpr
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.step import operations
from jaxlm.costs.workload import Workload
from jaxlm.lowering import buffers, collectives, hlo, kernels, products, programs, targets
from jaxlm.lowering.collectives import CompiledCollective
from jaxlm.lowering.kernels import Chain, Kernel
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Kind


class CompiledMemory(NamedTuple):
    """Bytes on one device. `outputs` are those that do not take the place of a donated argument; `temporaries` what
    lives in between and must have room; `peak` is all three together. `gaps` are what a TPU's allocator leaves free
    between temporaries while there is room for it, and closes where there is not."""

    arguments: int
    outputs: int
    temporaries: int
    peak: int
    gaps: int
    capacity: int


class Held(NamedTuple):
    """Alike buffers that are held where the temporaries are largest, or arguments of one kind."""

    bytes: int
    count: int
    array: str
    name: str
    source: str


@dataclass(frozen=True)
class Report:
    """A step compiled for a target, with less search for a fast program where `quick`, and the plan that was counted of
    it. `flops` are those of XLA's matrix products on one device, `kernel_flops` what Pallas kernels declare of all that
    they compute."""

    plan: Plan
    quick: bool
    compile_s: float
    memory: CompiledMemory
    held: tuple[Held, ...]
    flops: int
    kernel_flops: float
    collectives: tuple[CompiledCollective, ...]
    calls: tuple[tuple[str, int], ...]
    kernels: tuple[Kernel, ...]
    chains: tuple[Chain, ...]

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.memory.capacity

    @property
    def counted_flops(self) -> int:
        """Those of products on one device, but for those in kernels."""
        return _product_flops(self.plan.work)

    @property
    def counted_kernel_flops(self) -> int:
        """Those of kernels on one device."""
        return _kernel_flops(self.plan.work)

    def seconds(self, collective: CompiledCollective) -> float | None:
        """Counted, of all its runs; None where its groups are parts of an axis or its kind is not known."""
        if collective.kind not in KINDS or not collective.whole:
            return None
        network = Network(self.plan.target, self.plan.work.layout)
        return collective.count * network.seconds(collective.kind, collective.bytes, collective.axes)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Of all its runs on the device's roofline."""
        chip = self.plan.target.chip
        share = 1 / chip.devices_per_chip
        return kernel.seconds(share * chip.peak(self.plan.work.dtype), share * chip.memory_bytes_per_s)

    def row(self) -> dict[str, Any]:
        """As JSON. Kernels are those of Pallas and of libraries; fusions, what XLA made, the longest first."""
        longest = sorted(self.kernels, key=self.kernel_seconds, reverse=True)
        return {
            **_asked(self.plan),
            "compile_s": self.compile_s,
            "quick": self.quick,
            "memory_bytes_per_device": self.memory._asdict(),
            "fits": self.fits,
            "held_at_peak": [held._asdict() for held in self.held],
            "flops_per_device": self.flops,
            "kernel_flops_per_device": self.kernel_flops,
            "collectives": [
                {
                    "kind": c.kind,
                    "axes": list(c.axes),
                    "count": c.count,
                    "bytes": c.bytes,
                    "dtype": c.dtype,
                    "time_s": self.seconds(c),
                    "of": c.of,
                }
                for c in self.collectives
            ],
            "kernels": [{"name": name, "count": count} for name, count in self.calls],
            "fusions": [
                {
                    **{key: getattr(k, key) for key in ("name", "kind", "source", "count", "flops", "bytes")},
                    "intensity": k.intensity if k.bytes else None,
                    "time_s": self.kernel_seconds(k),
                }
                for k in longest
            ],
            "unfused": [
                {"bytes": chain.bytes, "names": [kernel.name for kernel in chain.kernels]} for chain in self.chains
            ],
            "counted": _counted(self.plan),
        }


class DoesNotFit(Exception):
    """The compiler refuses a program for want of memory, after `compile_s`. `temporaries` are the bytes it needed for
    them, at least what is more than there is, and `arguments` those that are given; both on one device. `stablehlo` is
    the program."""

    def __init__(
        self, plan: Plan, quick: bool, compile_s: float, arguments: int, temporaries: int, stablehlo: str, said: str
    ):
        super().__init__(said)
        self.plan, self.quick, self.compile_s = plan, quick, compile_s
        self.arguments, self.stablehlo = arguments, stablehlo
        self.temporaries = max(temporaries, plan.capacity + 1 - arguments)

    @property
    def needed(self) -> int:
        return self.arguments + self.temporaries

    def row(self) -> dict[str, Any]:
        """As JSON, with the keys of a report: null or empty is what only a compiled program says."""
        sizes = {"arguments": self.arguments, "temporaries": self.temporaries, "peak": self.needed}
        return {
            **_asked(self.plan),
            "compile_s": self.compile_s,
            "quick": self.quick,
            "memory_bytes_per_device": {
                **dict.fromkeys(CompiledMemory._fields),
                **sizes,
                "capacity": self.plan.capacity,
            },
            "fits": False,
            "held_at_peak": [],
            "flops_per_device": None,
            "kernel_flops_per_device": None,
            **{key: [] for key in ("collectives", "kernels", "fusions", "unfused")},
            "counted": _counted(self.plan),
        }


def _asked(plan: Plan) -> dict[str, Any]:
    """The step and its chips, as JSON."""
    counted = plan.row()
    return {
        **{key: counted[key] for key in ("chips", "devices", "target", "workload", "mesh", "batch", "sequence")},
        **{key: counted[key] for key in ("microbatches", "remat", "replicated_kv_heads")},
    }


def _counted(plan: Plan) -> dict[str, Any]:
    """What was counted of it, as JSON."""
    counted = plan.row()
    return {
        "flops_per_device": _product_flops(plan.work),
        "kernel_flops_per_device": _kernel_flops(plan.work),
        **{key: counted[key] for key in ("memory_bytes_per_device", "time_s")},
    }


def _product_flops(work: Workload) -> int:
    return sum(op.times * op.flops for op in operations.step(work) if not op.kernel)


def _kernel_flops(work: Workload) -> int:
    return sum(op.times * (op.flops + op.elementwise) for op in operations.step(work) if op.kernel)


@dataclass(frozen=True)
class CompiledStep:
    """A report, and the texts that it was read from: as JAX wrote the program, and as XLA optimised it."""

    report: Report
    stablehlo: str
    optimised: str


def compile(experiment: Experiment, kind: Kind, target: Target, mesh: Mesh, quick: bool = False) -> CompiledStep:
    """Compile a step for the devices of a mesh, and read what became of it. `quick` is XLA's level O1, at which a TPU's
    compiler searches less for a fast program.

    Raises DoesNotFit where the compiler itself refuses for want of memory (TPUs), InputError where it cannot compile.
    """
    counted = plan(workload(experiment, Layout(mesh.shape), kind), target)
    began = time.perf_counter()
    step = programs.step(experiment, kind, mesh)
    traced = step.trace()
    lowered = traced.lower()
    try:
        with _level("O1") if quick else contextlib.nullcontext():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        if "RESOURCE_EXHAUSTED" not in said and "Ran out of memory" not in said:
            raise InputError(f"the compiler for {target} fails: {said.splitlines()[0]}") from error
        seconds = time.perf_counter() - began
        raise DoesNotFit(counted, quick, seconds, step.argument_bytes, _needed(said), lowered.as_text(), said) from None
    seconds = time.perf_counter() - began
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # a compiler that is newer than the library which prints programs
        raise InputError(f"this JAX cannot read what the compiler for {target} wrote; {targets.INSTALL}") from error
    program, declared, chip = hlo.parse(text), _declared(traced, target), target.chip
    found = kernels.kernels(program, declared)
    return CompiledStep(
        Report(
            plan=counted,
            quick=quick,
            compile_s=seconds,
            memory=memory_of(compiled, chip),
            held=_held(program),
            flops=products.program_flops(program),
            kernel_flops=sum(kernel.count * kernel.declared for kernel in found),
            collectives=tuple(collectives.table(collectives.collectives(program, dict(counted.work.layout)))),
            calls=tuple(kernels.calls(program)),
            kernels=tuple(found),
            chains=tuple(kernels.chains(program, chip.intensity(counted.work.dtype), declared)),
        ),
        lowered.as_text(),
        text,
    )


@contextlib.contextmanager
def _level(level: str) -> Iterator[None]:
    """Compile at this optimization level of XLA's."""
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)


_SAID = {"forward": "", "backward": "backward ", "rematerialised": "again "}


def _declared(traced: jax.stages.Traced, target: Target) -> dict[str, float]:
    """What Pallas kernels declare that they compute on one device, by their names in the program."""
    found: Counter[str] = Counter()
    for row in count_jaxpr(traced.jaxpr.jaxpr).of(kind="kernel").rows:
        found[_SAID[row.phase] + "/".join(row.scope)] += row.flops / target.devices
    return found


def memory_of(compiled: jax.stages.Compiled, chip: Chip) -> CompiledMemory:
    """What a compiled program takes of a device. A GPU's runtime asks for temporaries as one block, gaps and all."""
    said = compiled.memory_analysis()
    outputs = said.output_size_in_bytes - said.alias_size_in_bytes
    taken = said.argument_size_in_bytes + outputs + said.temp_size_in_bytes
    peak = min(taken, said.peak_memory_in_bytes) if chip.kind == "tpu" else taken
    temporaries = peak - said.argument_size_in_bytes - outputs
    return CompiledMemory(said.argument_size_in_bytes, outputs, temporaries, peak, taken - peak, chip.device_capacity())


def _held(program: hlo.Program) -> tuple[Held, ...]:
    """Arguments by the first part of their path, then temporaries that are alike; the largest first."""
    arguments, temporaries = Counter(), Counter()
    for parameter in program.entry.parameters:
        size = sum(array.bytes for array in parameter.arrays)
        arguments[re.split(r"[\[/]", parameter.op_name)[0] or parameter.name] += size
    sizes = {}
    for buffer in buffers.peak(program).buffers:
        maker = buffer.maker
        key = str(buffer.array), hlo.scope(maker.op_name) or maker.name, program.source(maker)
        temporaries[key] += 1
        sizes[key] = buffer.bytes
    found = [Held(size, 1, "", name, "") for name, size in arguments.items()]
    found += [Held(count * sizes[key], count, *key) for key, count in temporaries.items()]
    return tuple(sorted(found, key=lambda held: -held.bytes))


def _needed(said: str) -> int:
    """The bytes of temporaries in E1000's words, "(20.48G) exceeds available HBM (15.75G)"; 0 where it has others."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\)", said) or re.search(r"Used ([\d.]+)([KMGT]?)", said)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0
