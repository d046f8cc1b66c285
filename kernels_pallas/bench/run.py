"""Benchmarks of all operations on this machine's device: each kernel, XLA's version, libraries and PyTorch."""

import contextlib
import fnmatch
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from kernels_pallas.bench import peers
from kernels_pallas.bench.ceilings import Ceilings, ceilings
from kernels_pallas.bench.record import Record
from kernels_pallas.bench.timing import KernelTime, measure
from kernels_pallas.core import target
from kernels_pallas.core.cases import KernelCase, KernelOperation
from kernels_pallas.core.choice import KERNELS, cannot_lower
from kernels_pallas.core.registry import OPERATIONS, check

SMALL = "small"
_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "torch", "triton", "numpy")


def cases(operation: KernelOperation, patterns: Sequence[str] = ()) -> tuple[KernelCase, ...]:
    """Return the cases that are timed here: on a CPU those that are called small, elsewhere all others; of these the
    ones whose names match a pattern of the shell, where there are any patterns.
    """
    on_cpu = jax.devices()[0].platform == "cpu"
    here = (case for case in operation.used_in("bench") if on_cpu == case.name.startswith(SMALL))
    wanted = patterns or ("*",)
    return tuple(case for case in here if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in wanted))


def check_cases(operations: Sequence[str], patterns: Sequence[str]) -> None:
    """Raise ValueError for an unknown operation, and for a pattern that matches no case of these operations, or of all
    where none is named.
    """
    check(operations)
    among = [OPERATIONS[name] for name in operations or OPERATIONS]
    for pattern in patterns:
        if not any(cases(operation, (pattern,)) for operation in among):
            names = ", ".join(dict.fromkeys(case.name for operation in among for case in cases(operation)))
            raise ValueError(f"--case {pattern}: no case has such a name; there are {names}")


def peers_of(operation: str) -> tuple[peers.Peer, ...]:
    """Return an operation's peers that run here: none without PyTorch and a GPU that it finds."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    from kernels_pallas.bench import pytorch

    return pytorch.PEERS.get(operation, ())


def program(operation: KernelOperation, case: KernelCase, implementation: str, training: bool) -> Callable[[], Any]:
    """Return a compiled call on random arguments: forward, or forward and backward from random cotangents.

    Raises NotImplementedError if the implementation does not support the case here.
    """
    arguments = case.draw(case.dtypes[0])
    inputs = {name: arguments.pop(name) for name in case.differentiable()}

    def forward(inputs: dict, others: dict) -> Any:
        options = case.options | operation.timed_with.get(implementation, {})
        return operation.function(**inputs, **others, **options, implementation=implementation)

    def both(inputs: dict, others: dict, cotangents: Any) -> Any:
        results, pull_back = jax.vjp(lambda inputs: forward(inputs, others), inputs)
        return results, pull_back(cotangents)

    if not training:
        run = jax.jit(forward).lower(inputs, arguments).compile()
        return _TimedProgram(run, (inputs, arguments))
    shapes = jax.eval_shape(forward, inputs, arguments)
    cotangents = jax.tree.map(lambda y: jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype), shapes)
    return _TimedProgram(jax.jit(both).lower(inputs, arguments, cotangents).compile(), (inputs, arguments, cotangents))


class _TimedProgram:
    """A compiled program and its arguments."""

    def __init__(self, compiled: jax.stages.Compiled, arguments: tuple):
        self.compiled, self.arguments = compiled, arguments

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)

    @property
    def temporary_bytes(self) -> int | None:
        """Memory beyond arguments and results, as XLA planned it; None where XLA does not report it."""
        planned = self.compiled.memory_analysis()
        return None if planned is None else int(planned.temp_size_in_bytes)


class Comparison(NamedTuple):
    """A set of rows measured together: all implementations of a case, forward or in training."""

    operation: KernelOperation
    case: KernelCase
    training: bool

    @property
    def named(self) -> dict[str, str]:
        """Return the fields that identify its rows."""
        direction = "training" if self.training else "forward"
        return {
            "operation": self.operation.name,
            "case": self.case.name,
            "dtype": self.case.dtypes[0],
            "direction": direction,
        }


def comparisons(operations: Sequence[str], patterns: Sequence[str] = ()) -> Iterator[Comparison]:
    """Yield every comparison of these operations, and of the cases of these patterns, that can be measured here."""
    for name in operations:
        for case in cases(OPERATIONS[name], patterns):
            for training in (False, True) if case.differentiable() else (False,):
                yield Comparison(OPERATIONS[name], case, training)


def compare(
    comparison: Comparison,
    limits: Ceilings,
    rounds: int = 7,
    begin: Callable[[dict[str, str]], str] = lambda row: "",
    implementations: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield one row per implementation, the reference first and peers last; of these `implementations` alone, where any
    are named.

    An implementation that does not support the case has a `reason` and no figures.

    Args:
      begin: called with each row before it is measured; returns why the row is skipped, or "" to measure it.
    """
    operation, case, training = comparison
    forward, backward = operation.costs(**case.structs(case.dtypes[0]), **case.options)
    flops = forward.flops + training * backward.flops
    moved = forward.bytes + training * backward.bytes
    reference = None

    def named(implementation: str) -> dict[str, Any]:
        return comparison.named | {"implementation": implementation}

    def row(implementation: str, taken: KernelTime, temporary: int | None) -> dict[str, Any]:
        # Lower bounds of an operation's time: its bytes at the speed of a copy, its FLOPs at that of a product.
        bound = max(moved / limits.copy_bytes_per_s, flops / limits.matmul_flops_per_s)
        return named(implementation) | {
            "seconds": taken.median,
            "quartiles": [taken.lower, taken.upper],
            "clock": taken.clock,
            "temporary_bytes": temporary,
            "flops": flops,
            "bytes": moved,
            "flops_per_s": flops / taken.median,
            "bytes_per_s": moved / taken.median,
            "of_copy": moved / taken.median / limits.copy_bytes_per_s,
            "of_matmul": flops / taken.median / limits.matmul_flops_per_s,
            "of_bound": bound / taken.median,
            "speedup": None if reference is None else reference / taken.median,
        }

    def left_out(implementation: str, error: Exception | str) -> dict[str, Any]:
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return named(implementation) | {"reason": reason[:300]}

    chip = target.of_device(jax.devices()[0])
    for implementation in ("reference", *operation.implementations, *operation.others):
        if not _is_for(implementation, chip) or (implementations and implementation not in implementations):
            continue
        if reason := begin(named(implementation)):
            yield left_out(implementation, reason)
            continue
        try:
            taken, temporary = _timed(operation, case, implementation, training, rounds)
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:  # unsupported, or memory is too small
            yield left_out(implementation, error)
            continue
        reference = taken.median if implementation == "reference" else reference
        yield row(implementation, taken, temporary)
    for peer in peers_of(operation.name):
        if implementations and peer.name not in implementations:
            continue
        if reason := begin(named(peer.name)):
            yield left_out(peer.name, reason)
            continue
        try:
            found = row(peer.name, *peers.measure(peer, case, training, rounds))
        except Exception as error:  # PyTorch and Triton refuse with exceptions of any type
            found = left_out(peer.name, error)
        peers.give_back()
        yield found


def _is_for(implementation: str, chip: target.TargetChip) -> bool:
    """Return whether an implementation is for this kind of chip; it may still refuse a case."""
    if implementation in KERNELS:
        return cannot_lower(implementation, chip) is None
    return implementation != "cudnn" or chip.platform == "gpu"


def _timed(
    operation: KernelOperation, case: KernelCase, implementation: str, training: bool, rounds: int
) -> tuple[KernelTime, int | None]:
    run = program(operation, case, implementation, training)
    return measure(run, rounds), run.temporary_bytes


def benchmark(
    operations: list[str],
    rounds: int = 7,
    say: Callable[[dict], None] = lambda row: None,
    file: Path | None = None,
    patterns: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure the ceilings and these operations, or all where none is named; `say` is called with each row.

    Where there are patterns, only the cases whose names match one are measured.

    Results are written to `file` where one is given. If the process ends early, the next one with the same request on
    that day resumes after them, and skips the row that was running.
    Raises ValueError for an unknown operation, a pattern without a case, fewer than one round, and a file that cannot
    be written, before anything is measured.
    """
    check_cases(operations, patterns)
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: it must be at least 1")
    record = Record(file)
    operations = operations or list(OPERATIONS)
    asked = {"benchmark": "kernels", "day": time.strftime("%Y-%m-%d"), "device": device(), "versions": _versions()}
    asked |= {"operations": operations, "cases": list(patterns), "rounds": rounds}
    results = record.begun(asked) or asked | {
        "ceilings": ceilings()._asdict(),
        "rows": [],
        "left_out": [],
    }
    with _stoppable():
        try:
            for comparison in comparisons(operations, patterns):
                if not any(comparison.named.items() <= row.items() for row in results["rows"] + results["left_out"]):
                    _measure(comparison, results, say, record)
        except KeyboardInterrupt:  # not the fault of the row that was running
            record.running(results, None)
            raise
    record.finish(results)
    return results


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C. A kernel that hangs blocks both, and the process has to be killed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(comparison: Comparison, results: dict[str, Any], say: Callable[[dict], None], record: Record) -> None:
    """Append a comparison's rows to the results."""

    def begin(row: dict[str, str]) -> str:
        record.running(results, row)
        return "the process ended while it was measured" if record.ended_in(row) else ""

    found = []
    for row in compare(comparison, Ceilings(**results["ceilings"]), results["rounds"], begin):
        say(row)
        found.append(row)
    results["rows"] += [row for row in found if "reason" not in row]
    results["left_out"] += [row for row in found if "reason" in row]
    record.running(results, None)


def device() -> str:
    """Return JAX's name for the device.

    This first use of the device makes JAX allocate GPU memory on demand, which leaves the rest to peers.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return target.of_device(jax.devices()[0]).kind


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
