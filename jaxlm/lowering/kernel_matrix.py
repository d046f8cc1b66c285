"""Compile every kernel of kernels_pallas for every chip, forward and backward, without the chips.

A kernel fails if it needs more shared memory, VMEM or registers than a chip has, or if the compiler rejects it.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import bundles, targets
from jaxlm.lowering.assemblers import assemblers
from jaxlm.lowering.assembly import AssembledKernel, assemble, compile_to_ptx
from jaxlm.lowering.bundles import ScheduledKernel
from jaxlm.lowering.sass import HotLoop
from jaxlm.lowering.tile_products import TileWork, tile_work
from kernels_pallas.core import target
from kernels_pallas.core.cases import KernelCase, KernelOperation
from kernels_pallas.core.choice import KERNELS, cannot_lower
from kernels_pallas.core.registry import OPERATIONS

# One chip of each generation, as the smallest slice that its compiler allows; programs are for one device.
GPUS = {"A100": "a100-sxm4-80g:1", "H100": "h100-sxm5:1", "H200": "h200-sxm:1", "B200": "b200-hgx:1"}
TPUS = {"v4": "tpu-v4:4", "v5e": "tpu-v5e:4", "v5p": "tpu-v5p:4", "v6e": "tpu-v6e:4", "v7x": "tpu-v7x:4"}
CHIPS = GPUS | TPUS
ASSEMBLED = ("A100", "H100", "B200")  # one of each compute capability: an H200 runs the machine code of an H100


def _lowered_for(implementation: str) -> tuple[str, ...]:
    """Return the chips of CHIPS that an implementation of KERNELS supports."""
    chips = {name: Target.parse(text).chip for name, text in CHIPS.items()}
    known = {name: target.of_kind(chip.kind, chip.device_kinds[0]) for name, chip in chips.items()}
    return tuple(name for name, chip in known.items() if cannot_lower(implementation, chip) is None)


LOWERED_FOR = {implementation: _lowered_for(implementation) for implementation in KERNELS}


class MatrixRow(NamedTuple):
    """One case of one implementation of an operation."""

    operation: KernelOperation
    implementation: str
    case: KernelCase

    def __str__(self) -> str:
        return f"{self.operation.name} | {self.implementation} | {self.case.name}, {self.case.dtypes[0]}"


def rows() -> Iterator[MatrixRow]:
    """Yield all rows; each is compiled for every chip that its implementation is lowered for."""
    for operation in OPERATIONS.values():
        for implementation in operation.implementations:
            for case in operation.used_in("compile"):
                if operation.serves(implementation, case, case.dtypes[0]):
                    yield MatrixRow(operation, implementation, case)


class Outcome(NamedTuple):
    """The result of compiling a row for a chip.

    Attributes:
      problem: the error, "" if it compiled.
      kernels: figures of its kernels, for TPUs and ASSEMBLED chips if it was compiled; by each assembler at hand.
      program: digest of the lowered program, independent of source paths and line numbers.
    """

    problem: str
    kernels: tuple[AssembledKernel, ...] | tuple[ScheduledKernel, ...] = ()
    program: str = ""


def compile_rows(chip: str, known: Collection[str] = (), schedules: bool = True) -> dict[MatrixRow, Outcome]:
    """Compile each row that is lowered for a chip of CHIPS, forward and backward.

    Programs with a `known` digest are lowered only. A TPU's schedules take two to five times as long as compiling, and
    a process of their own, since libtpu reads their destination once at start-up.
    """
    lowered = _lower_rows(chip)
    outcomes = {row: made for row, made in lowered.items() if isinstance(made, Outcome)}
    outcomes |= {row: Outcome("", (), made.digest) for row, made in lowered.items() if row not in outcomes}
    missing = [row for row, outcome in outcomes.items() if not outcome.problem and outcome.program not in known]
    if chip in TPUS and schedules and missing:
        return outcomes | _compile_with_schedules(chip, missing)
    compiled = _assembled if chip in ASSEMBLED else _compiled
    return outcomes | {row: _compile(row, lowered[row], compiled) for row in missing}


def _compile_with_schedules(chip: str, wanted: Sequence[MatrixRow]) -> dict[MatrixRow, Outcome]:
    with tempfile.TemporaryDirectory(prefix="jaxlm-schedules-") as folder:
        numbers = [str(i) for i, row in enumerate(_rows_of(chip)) if row in wanted]
        command = [sys.executable, "-m", "jaxlm.lowering.kernel_matrix", chip, folder, *numbers]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"} | bundles.environment(Path(folder))
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {chip} failed: {done.stderr.strip()[-2000:]}")
    outcomes = (
        Outcome(problem, tuple(ScheduledKernel(*kernel) for kernel in kernels), program)
        for problem, kernels, program in json.loads(done.stdout.splitlines()[-1])
    )
    return dict(zip(wanted, outcomes, strict=True))


def _rows_of(chip: str) -> list[MatrixRow]:
    return [row for row in rows() if chip in LOWERED_FOR[row.implementation]]


# Compiles a program, and returns the figures of its kernels that it can tell.
_Compiler = Callable[["_LoweredRow"], list[AssembledKernel] | list[ScheduledKernel]]


def _assembled(program: "_LoweredRow") -> list[AssembledKernel]:
    """Return the kernels as each assembler at hand makes them."""
    kernels = [
        _with_tile_work(kernel, program.work)
        for text in compile_to_ptx(program.lowered)
        for assembler in assemblers()
        for kernel in assemble(text, assembler)
    ]
    return sorted(kernels, key=lambda kernel: (kernel.name, kernel.assembler))


def _with_tile_work(kernel: AssembledKernel, known: dict[str, TileWork]) -> AssembledKernel:
    """Return a kernel with what its machine code does not say: the products needed, and the copy engine's bytes."""
    work = next((work for name, work in known.items() if _is(name, kernel.name)), TileWork())
    hot = kernel.hot._replace(bytes=kernel.hot.bytes + work.copied)
    return kernel._replace(needed=work.multiply_adds, hot=hot)


def _is(launched: str, assembled: str) -> bool:
    """Return whether an assembled kernel is the one launched under a name: Mosaic GPU adds to it."""
    return assembled in (launched, f"{launched}_mosaic_gpu_kernel")


def _compiled(program: "_LoweredRow") -> list[AssembledKernel]:
    program.lowered.compile()
    return []


def _scheduled(folder: Path) -> _Compiler:
    def compiled(program: "_LoweredRow") -> list[ScheduledKernel]:
        program.lowered.compile()
        kernels = sorted(bundles.read(folder), key=lambda kernel: kernel.name)
        for path in folder.iterdir():
            path.unlink()
        return kernels

    return compiled


class _LoweredRow(NamedTuple):
    """A row's lowered program, its digest, and the work on tiles of its kernels by name (tile_products.py)."""

    lowered: jax.stages.Lowered
    digest: str
    work: dict[str, TileWork]


def _lower_rows(chip: str) -> dict[MatrixRow, _LoweredRow | Outcome]:
    """Lower each row; a row that fails has an outcome with the problem."""
    device = targets.devices(Target.parse(CHIPS[chip]))[0]
    mesh = Mesh(np.array([device]), ("one",))
    # The default precision: programs do not depend on this process's setting.
    with without_locations(), jax.default_matmul_precision(None):
        return {row: _lower(row, mesh) for row in _rows_of(chip)}


@contextlib.contextmanager
def without_locations() -> Iterator[None]:
    """Leave source locations out of programs."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _lower(row: MatrixRow, mesh: Mesh) -> _LoweredRow | Outcome:
    operation, implementation, case = row
    whole = NamedSharding(mesh, PartitionSpec())
    structs = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for name, x in case.structs(case.dtypes[0]).items()
    }
    inputs = {name: structs.pop(name) for name in case.differentiable()}

    def program(inputs: dict, others: dict):
        results, pull_back = jax.vjp(
            lambda inputs: operation.function(**inputs, **others, **case.options, implementation=implementation), inputs
        )
        return results, pull_back(results)  # any cotangent of the results' shapes will do

    try:
        with jax.set_mesh(mesh):
            traced = jax.jit(program).trace(inputs, structs)
            lowered = traced.lower()
    except Exception as error:  # compilers raise no common type
        return _failed(error)
    text = lowered.as_text()
    # The lowered text: jaxlib compiles some programs for TPU v7x that it cannot print.
    kernels = re.findall(rf'name = "\w*{operation.name}\w*"|@mosaic_gpu_v2', text)
    least = 2 if inputs and not operation.gradients_by_xla else 1
    if len(kernels) < least:
        return Outcome(f"the program has {len(kernels)} kernels; it needs {least}, one for each direction")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _LoweredRow(lowered, digest, tile_work(traced.jaxpr))


def _compile(row: MatrixRow, program: _LoweredRow, compiled: _Compiler) -> Outcome:
    try:
        known = compiled(program)
    except Exception as error:
        return _failed(error, program.digest)
    return Outcome("", tuple(kernel for kernel in known if row.operation.name in kernel.name), program.digest)


def _failed(error: Exception, program: str = "") -> Outcome:
    return Outcome(str(error).splitlines()[0][:300], (), program)


def records(
    results: dict[str, dict[MatrixRow, Outcome]], kind: type[AssembledKernel] | type[ScheduledKernel]
) -> list[dict]:
    """Return one record for each kernel with figures of this kind."""
    return [
        {"chip": chip, "row": str(row), **_asdict(kernel)}
        for chip, by in results.items()
        for row, outcome in by.items()
        for kernel in outcome.kernels
        if isinstance(kernel, kind)
    ]


def _asdict(kernel: AssembledKernel | ScheduledKernel) -> dict:
    return {name: x._asdict() if isinstance(x, HotLoop) else x for name, x in kernel._asdict().items()}


def recorded(programs: Iterable[dict], *kernels: Iterable[dict]) -> dict[tuple[str, str], Outcome]:
    """Return outcomes by chip and row from records of compiled programs and of their kernels."""
    compiled_kernels: dict[tuple[str, str], list] = {}
    for record in (record for some in kernels for record in some):
        known = dict(record)
        chip, row = known.pop("chip"), known.pop("row")
        if "hot" in known:
            known["hot"] = HotLoop(**known["hot"])
        compiled_kernels.setdefault((chip, row), []).append(
            (ScheduledKernel if "bundles" in known else AssembledKernel)(**known)
        )
    return {
        at: Outcome("", tuple(compiled_kernels.get(at, ())), record["program"])
        for record in programs
        for at in [(record["chip"], record["row"])]
    }


if __name__ == "__main__":
    chip, folder, *numbers = sys.argv[1:]
    programs = list(_lower_rows(chip).items())
    chosen = (programs[int(number)] for number in numbers)
    print(json.dumps([_compile(row, program, _scheduled(Path(folder))) for row, program in chosen]))
