"""Compile a step for chips that need not be present, and report the compiled figures alongside the counted ones."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.core.extras import install
from jaxlm.costs.counted import operations
from jaxlm.costs.draft_steps import draft_drawing, draft_reading
from jaxlm.costs.hardware.network import KINDS, Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count_jaxpr
from jaxlm.costs.layer_loops import with_choice
from jaxlm.costs.plan import Plan, plan
from jaxlm.costs.workload import Workload
from jaxlm.lowering import collectives, hlo, launched_kernels, loops
from jaxlm.lowering.collectives import CompiledCollective
from jaxlm.lowering.held_memory import CompiledMemory, HeldBuffers, held_buffers, memory_of, memory_together
from jaxlm.lowering.launched_kernels import Chain, LaunchedKernel
from jaxlm.lowering.programs import StepPrograms, step_programs
from jaxlm.models.feed_forward.passes import FURTHER
from jaxlm.parallel.layout import Layout, over_slices
from jaxlm.parallel.program import MeshProgram
from jaxlm.parallel.rules import Kind
from kernels_pallas.paged_attention.costs import loop_name


class ProgramReport(NamedTuple):
    """A program beside a step of the engine. `roofline_s`: seconds of its kernels on the roofline."""

    compile_s: float
    roofline_s: float
    memory: CompiledMemory
    collectives: tuple[CompiledCollective, ...]


class DraftReport(NamedTuple):
    """The programs of the model that draws drafts: it reads the rows of the engine's step, and then proposes `drafts`
    of each sequence, one after another."""

    drafts: int
    read: ProgramReport
    propose: ProgramReport


@dataclass(frozen=True)
class Report:
    """A step compiled for a target, and its counted plan.

    Attributes:
      quick: compiled at XLA's level O1, with a shorter search for a fast program.
      memory: in inference that of all programs together: the temporaries of the one that has most.
      draw: of the tokens after the engine's step; None in training.
      draft: None without a model that draws drafts.
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
    draw: ProgramReport | None = None
    draft: DraftReport | None = None

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
            **self._beside_rows(),
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

    def _beside_rows(self) -> dict[str, Any]:
        """Return the programs beside the step as JSON; nothing in training."""
        if self.draw is None:
            return {}
        rows = {"draw": {"draws": self.work.draws(), **self._program_row(self.draw)}, "draft": None}
        if (draft := self.draft) is not None:
            programs = {name: self._program_row(getattr(draft, name)) for name in ("read", "propose")}
            rows["draft"] = {"drafts": draft.drafts, **programs}
        return rows

    def _program_row(self, program: ProgramReport) -> dict[str, Any]:
        collectives, memory = self._collective_rows(program.collectives), program.memory._asdict()
        return {**program._asdict(), "collectives": collectives, "memory": memory}

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
            **({} if self.plan.work.kind == "train" else {"draw": None, "draft": None}),
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


def _compiled_works(work: Workload) -> dict[str, Workload]:
    """Return the workload of each program of `StepPrograms`; that of the draw has no loops over pages."""
    works = {"step": _compiled(work), "draw": replace(work, engine_steps=None)}
    if work.draft_model is not None:
        works |= {"read": draft_reading(work).largest_step(), "propose": draft_drawing(work)}
    return works


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
    compiled = StepPrograms(
        *(
            each and _compiled_program(each, prefix, texts, arguments, counted, quick)
            for each, prefix in zip(programs, ("", "draw.", "draft.read.", "draft.propose."), strict=True)
        )
    )
    work, chip, layout, step = counted.work, target.chip, dict(counted.work.layout), compiled.step
    outer = over_slices(counted.work.layout, target.slices)
    of = _compiled_works(work)
    parsed = {name: hlo.parse(each.optimised, _trips(of[name])) for name, each in compiled._asdict().items() if each}
    memories = StepPrograms(*(each and memory_of(each.compiled, chip) for each in compiled))
    program, declared = parsed["step"], _declared(step.traced, counted)

    def beside(name: str) -> ProgramReport:
        exchanged = tuple(collectives.table(collectives.collectives(parsed[name], layout, outer)))
        seconds = sum(_roofline(kernel, counted) for kernel in launched_kernels.kernels(parsed[name]))
        return ProgramReport(getattr(compiled, name).seconds, seconds, getattr(memories, name), exchanged)

    most = max(parsed, key=lambda name: getattr(memories, name).temporaries)
    kernels = launched_kernels.kernels(program, declared)
    return CompiledStep(
        Report(
            plan=counted,
            quick=quick,
            compile_s=step.seconds,
            memory=memory_together(programs, memories),
            held_buffers=held_buffers(parsed[most], **parsed),
            flops=loops.program_flops(program),
            kernel_flops=sum(kernel.count * kernel.declared_flops for kernel in kernels),
            collectives=tuple(collectives.table(collectives.collectives(program, layout, outer))),
            calls=tuple(launched_kernels.calls(program)),
            kernels=tuple(kernels),
            chains=tuple(launched_kernels.chains(program, chip.intensity(work.dtype), declared)),
            draw=beside("draw") if "draw" in parsed else None,
            draft=DraftReport(work.drafts, beside("read"), beside("propose")) if "read" in parsed else None,
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
    trips = {FURTHER: 0, "": 1}  # no kernel is in a loop over pages, or over tiles of experts' rows
    for row in count_jaxpr(traced.jaxpr.jaxpr, trips).of(kind="kernel").rows:
        flops[_PREFIX[row.phase] + "/".join(row.scope)] += row.flops / plan.target.devices
    return flops


def _needed(message: str) -> int:
    """Return the bytes of temporaries in an E1000 message, "(20.48G) exceeds available HBM (15.75G)"; 0 if absent."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\)", message) or re.search(r"Used ([\d.]+)([KMGT]?)", message)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0
