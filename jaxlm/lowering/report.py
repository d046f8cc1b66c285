"""Compile a step for chips that need not be present, and report the compiled figures alongside the counted ones."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxlm.config import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.extras import install
from jaxlm.costs.counted import operations
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.network import KINDS, Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count_jaxpr
from jaxlm.costs.layer_loops import with_choice
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.workload import Workload
from jaxlm.lowering import buffers, collectives, hlo, launched_kernels, matmul_flops
from jaxlm.lowering.collectives import CompiledCollective
from jaxlm.lowering.launched_kernels import Chain, LaunchedKernel
from jaxlm.lowering.programs import StepPrograms, step_programs
from jaxlm.models.feed_forward.passes import FURTHER
from jaxlm.parallel.layout import Layout, over_slices
from jaxlm.parallel.program import MeshProgram, bytes_on_device
from jaxlm.parallel.rules import Kind
from kernels_pallas.paged_attention.costs import loop_name


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


class DrawReport(NamedTuple):
    """The draw of tokens after a step of the engine, a program of its own. `draws`: tokens on each shard. `roofline_s`:
    seconds of its kernels on the roofline."""

    draws: int
    compile_s: float
    roofline_s: float
    memory: CompiledMemory
    collectives: tuple[CompiledCollective, ...]


@dataclass(frozen=True)
class Report:
    """A step compiled for a target, and its counted plan.

    Attributes:
      quick: compiled at XLA's level O1, with a shorter search for a fast program.
      memory: in inference that of the step and of the draw together: the temporaries of the one that has more.
      draw: None in training.
      flops: FLOPs of XLA's matrix products on one device.
      kernel_flops: FLOPs that Pallas kernels declare, all operations included, on one device.
    """

    plan: Plan
    quick: bool
    compile_s: float
    memory: CompiledMemory
    held_buffers: tuple[HeldBuffers, ...]
    flops: int
    kernel_flops: float
    collectives: tuple[CompiledCollective, ...]
    calls: tuple[tuple[str, int], ...]
    kernels: tuple[LaunchedKernel, ...]
    chains: tuple[Chain, ...]
    draw: DrawReport | None = None

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.memory.capacity

    @property
    def work(self) -> Workload:
        """The workload of the program: in inference that of the engine's largest step."""
        return _compiled(self.plan.work)

    @property
    def counted_flops(self) -> int:
        """Counted matrix-product FLOPs on one device, Pallas kernels excluded."""
        return _product_flops(self.work)

    @property
    def counted_kernel_flops(self) -> int:
        """Counted FLOPs of Pallas kernels on one device."""
        return _kernel_flops(self.work)

    def seconds(self, collective: CompiledCollective) -> float | None:
        """Return the counted seconds of all its runs; None if a group spans part of an axis or the kind is unknown."""
        if collective.kind not in KINDS:
            return None
        if collective.crosses_slices:
            network = Network(self.plan.target, self.plan.work.layout)
            return collective.count * network.seconds_between_domains(collective.kind, collective.bytes)
        if not collective.spans_axes:
            return None
        network = Network(self.plan.target, self.plan.work.layout)
        return collective.count * network.seconds(collective.kind, collective.bytes, collective.axes)

    @property
    def roofline_s(self) -> float:
        """The roofline seconds of all kernels on one device, without those of the draw."""
        return sum(map(self.kernel_seconds, self.kernels))

    def longest_kernels(self, *, merged: bool = False) -> list[LaunchedKernel]:
        """Return the kernels that take longest first; `merged` with one in place of those that are alike."""
        kernels = launched_kernels.alike(self.kernels) if merged else self.kernels
        return sorted(kernels, key=self.kernel_seconds, reverse=True)

    def kernel_seconds(self, kernel: LaunchedKernel) -> float:
        """Return the roofline seconds of all its runs on one device."""
        return _roofline(kernel, self.plan)

    def row(self) -> dict[str, Any]:
        """Return the report as JSON: `kernels` are Pallas and library calls, `fusions` all kernels, longest first."""
        return {
            **_step_and_chips(self.plan),
            "compile_s": self.compile_s,
            "quick": self.quick,
            "memory_bytes_per_device": self.memory._asdict(),
            "fits": self.fits,
            "held_at_peak": [held._asdict() for held in self.held_buffers],
            "flops_per_device": self.flops,
            "kernel_flops_per_device": self.kernel_flops,
            "collectives": self._collective_rows(self.collectives),
            **self._draw_row(),
            "kernels": [{"name": name, "count": count} for name, count in self.calls],
            "fusions": [
                {
                    **{key: getattr(k, key) for key in ("name", "kind", "source", "count", "flops", "bytes")},
                    "intensity": k.intensity if k.bytes else None,
                    "time_s": self.kernel_seconds(k),
                }
                for k in self.longest_kernels()
            ],
            "unfused": [
                {"bytes": chain.bytes, "names": [kernel.name for kernel in chain.kernels]} for chain in self.chains
            ],
            "counted": _counted(self.plan),
        }

    def _draw_row(self) -> dict[str, Any]:
        if self.draw is None:
            return {}
        row = {**self.draw._asdict(), "collectives": self._collective_rows(self.draw.collectives)}
        return {"draw": {**row, "memory": self.draw.memory._asdict()}}

    def _collective_rows(self, collectives: Sequence[CompiledCollective]) -> list[dict[str, Any]]:
        return [
            {
                "kind": c.kind,
                "axes": list(c.axes),
                "crosses_slices": c.crosses_slices,
                "count": c.count,
                "bytes": c.bytes,
                "dtype": c.dtype,
                "time_s": self.seconds(c),
                "scope": c.scope,
            }
            for c in collectives
        ]


def _roofline(kernel: LaunchedKernel, plan: Plan) -> float:
    chip = plan.target.chip
    share = 1 / chip.devices_per_chip
    return kernel.seconds(share * chip.peak(plan.work.dtype), share * chip.memory_bytes_per_s)


class FitTrial(NamedTuple):
    """A compiled variant, and the bytes that it needs on one device."""

    work: Workload
    needed: int


class DoesNotFit(Exception):
    """The compiler rejects a program that does not fit in memory.

    Attributes:
      compile_s: seconds until the rejection.
      arguments: bytes of the arguments on one device.
      temporaries: bytes of the temporaries on one device, at least one byte more than fits.
      texts: the programs as JAX lowered them, by the names of files, up to the one that the compiler rejects.
      tried: the variants of a search in which none fits.
    """

    def __init__(
        self,
        plan: Plan,
        quick: bool,
        compile_s: float,
        arguments: int,
        temporaries: int,
        texts: dict[str, str],
        message: str,
    ):
        super().__init__(message)
        self.plan, self.quick, self.compile_s = plan, quick, compile_s
        self.arguments, self.texts = arguments, texts
        self.temporaries = max(temporaries, plan.capacity + 1 - arguments)
        self.tried: tuple[FitTrial, ...] | None = None

    @property
    def needed(self) -> int:
        return self.arguments + self.temporaries

    def row(self) -> dict[str, Any]:
        """Return JSON with a report's keys; figures that need a compiled program are null or empty."""
        sizes = {"arguments": self.arguments, "temporaries": self.temporaries, "peak": self.needed}
        return {
            **_step_and_chips(self.plan),
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
            **({} if self.plan.work.kind == "train" else {"draw": None}),
            "counted": _counted(self.plan),
        }


def _step_and_chips(plan: Plan) -> dict[str, Any]:
    """Return the keys of the JSON that name the step and the chips."""
    counted = plan.row()
    return {
        **{key: counted[key] for key in ("chips", "devices", "target", "workload", "mesh", "batch", "sequence")},
        **{key: counted[key] for key in ("microbatches", "remat", "replicated_kv_heads")},
        **({"layers": counted["layers"]} if plan.work.kind == "train" else {}),
        **_engine_step(plan.work),
    }


def _engine_step(work: Workload) -> dict[str, Any]:
    """Return the step of the engine that is compiled, on each shard of its sequences, as JSON; nothing in training."""
    if (steps := _compiled(work).engine_steps) is None:
        return {}
    shape = steps.shape
    return {"engine_step": {"rows": shape.rows, "draws": shape.decode, "page": work.page}}


def _counted(plan: Plan) -> dict[str, Any]:
    """Return the counted figures as JSON."""
    counted = plan.row()
    return {
        "flops_per_device": _product_flops(_compiled(plan.work)),
        "kernel_flops_per_device": _kernel_flops(_compiled(plan.work)),
        **{key: counted[key] for key in ("memory_bytes_per_device", "time_s")},
    }


def _compiled(work: Workload) -> Workload:
    """Return the workload of the compiled program: in inference that of the engine's largest step."""
    return work if work.kind == "train" else work.without_drafts().largest_step()


def _trips(work: Workload) -> dict[str, Fraction]:
    """Return the trips of the loops over pages in the program of a workload, by their scopes: the mean of the blocks of
    sequences, of which each has its loop. Rows of experts take one pass, and no further one."""
    sections = () if work.engine_steps is None else work.engine_steps.sections
    return {FURTHER: Fraction(0)} | {
        loop_name(each.queries, window): Fraction(each.loop_trips(window), each.blocks)
        for each in sections
        for window, _ in each.pages
    }


def _product_flops(work: Workload) -> int:
    return sum(op.times * op.flops for op in operations.step(work) if not op.kernel)


def _kernel_flops(work: Workload) -> int:
    return sum(op.times * (op.flops + op.elementwise) for op in operations.step(work) if op.kernel)


@dataclass(frozen=True)
class CompiledStep:
    """A report and the texts of its programs by the names of files: StableHLO as JAX lowered them, and HLO as XLA
    optimised them. `tried` are the variants of the search that chose this one."""

    report: Report
    texts: dict[str, str]
    tried: tuple[FitTrial, ...] | None = None


def compile(experiment: Experiment, kind: Kind, target: Target, mesh: Mesh, quick: bool = False) -> CompiledStep:
    """Compile a step for the devices of a mesh and report on the program.

    `quick` selects XLA's level O1, at which the TPU compiler searches less for a fast program.

    Raises DoesNotFit if the compiler itself runs out of device memory (TPUs), InputError if it fails otherwise.
    """
    counted = plan(Workload.of(experiment, Layout(mesh.shape), kind), target)
    programs = step_programs(with_choice(experiment, counted.work), kind, mesh)
    arguments = sum(each.operand_bytes for each in programs if each is not None)
    texts: dict[str, str] = {}
    step, draw = (
        each and _compiled_program(each, prefix, texts, arguments, counted, quick)
        for each, prefix in zip(programs, ("", "draw."), strict=True)
    )
    work, chip, layout = counted.work, target.chip, dict(counted.work.layout)
    outer = over_slices(counted.work.layout, target.slices)
    program, declared = hlo.parse(step.optimised, _trips(_compiled(work))), _declared(step.traced, counted)
    memory, held_buffers, draw_report = memory_of(step.compiled, chip), _held_buffers(program, program), None
    if draw is not None:
        drawing = hlo.parse(draw.optimised)
        exchanged = tuple(collectives.table(collectives.collectives(drawing, layout, outer)))
        seconds = sum(_roofline(kernel, counted) for kernel in launched_kernels.kernels(drawing))
        needed = memory_of(draw.compiled, chip)
        draw_report = DrawReport(_compiled(work).draws(), draw.seconds, seconds, needed, exchanged)
        larger = drawing if draw_report.memory.temporaries > memory.temporaries else program
        held_buffers = _held_buffers(program, larger, drawing)
        memory = memory_with_draw(memory, draw_report.memory, programs)
    kernels = launched_kernels.kernels(program, declared)
    return CompiledStep(
        Report(
            plan=counted,
            quick=quick,
            compile_s=step.seconds,
            memory=memory,
            held_buffers=held_buffers,
            flops=matmul_flops.program_flops(program),
            kernel_flops=sum(kernel.count * kernel.declared_flops for kernel in kernels),
            collectives=tuple(collectives.table(collectives.collectives(program, layout, outer))),
            calls=tuple(launched_kernels.calls(program)),
            kernels=tuple(kernels),
            chains=tuple(launched_kernels.chains(program, chip.intensity(work.dtype), declared)),
            draw=draw_report,
        ),
        texts,
    )


_NO_TILES = "Couldn't find output tile sizes"


class _CompiledProgram(NamedTuple):
    """A compiled program, and its text after XLA's passes."""

    traced: jax.stages.Traced
    compiled: jax.stages.Compiled
    seconds: float
    optimised: str


def _compiled_program(
    program: MeshProgram, prefix: str, texts: dict[str, str], arguments: int, counted: Plan, quick: bool
) -> _CompiledProgram:
    """Compile a program of a counted step, and add its texts to `texts`, under names with the prefix. `arguments`: the
    bytes on one device of the arguments of all programs of the step. Raises what `compile` raises."""
    began = time.perf_counter()
    traced = program.trace()
    lowered = traced.lower()
    texts[f"{prefix}stablehlo.mlir"] = lowered.as_text()
    try:
        with _level("O1") if quick else contextlib.nullcontext():
            compiled = _executable(lowered)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
            raise InputError(f"the compiler for {counted.target} fails: {message.splitlines()[0]}") from error
        seconds = time.perf_counter() - began
        raise DoesNotFit(counted, quick, seconds, arguments, _needed(message), texts, message) from None
    seconds = time.perf_counter() - began
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # the compiler is newer than jaxlib, which prints programs
        why = f"this JAX cannot read the program of the compiler for {counted.target}; {install('compile')}"
        raise InputError(why) from error
    texts[f"{prefix}optimised.hlo"] = text
    return _CompiledProgram(traced, compiled, seconds, text)


def _executable(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program. Where a GPU is absent XLA cannot try tiles of its Triton products, and fails if its first ones
    do not fit: heads of a layer in a stack that are no multiple of 16. Then cuBLAS computes the products."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


@contextlib.contextmanager
def _level(level: str) -> Iterator[None]:
    """Set XLA's optimization level within the context."""
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)


_PREFIX = {"forward": "", "backward": "backward ", "rematerialised": "again "}


def _declared(traced: jax.stages.Traced, plan: Plan) -> dict[str, float]:
    """Return the FLOPs that Pallas kernels declare on one device, by their names in the program."""
    flops: Counter[str] = Counter()
    trips = {FURTHER: 0} if plan.work.kind == "train" else 1  # no kernel is in a loop over pages
    for row in count_jaxpr(traced.jaxpr.jaxpr, trips).of(kind="kernel").rows:
        flops[_PREFIX[row.phase] + "/".join(row.scope)] += row.flops / plan.target.devices
    return flops


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


def memory_with_draw(step: CompiledMemory, draw: CompiledMemory, programs: StepPrograms) -> CompiledMemory:
    """Return the memory of an engine's step and draw, one of which runs while the arguments and outputs of both stay.
    The logits are an output of the step and an argument of the draw."""
    _, logits, *_ = programs.draw.operands
    arguments = step.arguments + draw.arguments - bytes_on_device(logits)
    outputs = step.outputs + draw.outputs
    larger = max(step, draw, key=lambda memory: memory.temporaries)
    peak = arguments + outputs + larger.temporaries
    return CompiledMemory(arguments, outputs, larger.temporaries, peak, larger.gaps, step.capacity)


def _held_buffers(
    program: hlo.HloProgram, larger: hlo.HloProgram, drawing: hlo.HloProgram | None = None
) -> tuple[HeldBuffers, ...]:
    """Return arguments grouped by the first part of their path, those of the draw's state among them, and the identical
    temporaries of the program that has more; the largest first."""
    arguments, temporaries = Counter(), Counter()
    for each in (program, drawing):
        for parameter in each.entry.parameters if each is not None else ():
            name = re.split(r"[\[/.]" if each is drawing else r"[\[/]", parameter.op_name)[0] or parameter.name
            if each is program or name == "state":
                arguments[name] += sum(array.bytes for array in parameter.arrays)
    sizes = {}
    for buffer in buffers.peak(larger).buffers:
        maker = buffer.maker
        key = str(buffer.array), hlo.scope(maker.op_name) or maker.name, larger.source(maker)
        temporaries[key] += 1
        sizes[key] = buffer.bytes
    held = [HeldBuffers(size, 1, "", name, "") for name, size in arguments.items()]
    held += [HeldBuffers(count * sizes[key], count, *key) for key, count in temporaries.items()]
    return tuple(sorted(held, key=lambda each: -each.bytes))


def _needed(message: str) -> int:
    """Return the bytes of temporaries in an E1000 message, "(20.48G) exceeds available HBM (15.75G)"; 0 if absent."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\)", message) or re.search(r"Used ([\d.]+)([KMGT]?)", message)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0
