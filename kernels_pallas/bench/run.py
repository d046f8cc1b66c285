"""Benchmarks of all operations on the device that is here: each kernel, XLA's version, libraries' and PyTorch's."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from kernels_pallas import target
from kernels_pallas.bench import peers
from kernels_pallas.bench.ceilings import Ceilings, ceilings
from kernels_pallas.bench.timing import Time, measure
from kernels_pallas.cases import Case, Operation
from kernels_pallas.registry import OPERATIONS, check

SMALL = "small"
# Where these run; all others do anywhere.
_PLATFORMS = {"triton": "gpu", "mosaic_gpu": "gpu", "cudnn": "gpu", "mosaic_tpu": "tpu"}
_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "torch", "triton", "numpy")


def cases(operation: Operation) -> tuple[Case, ...]:
    """The cases that are timed here: on a CPU those that are called small, elsewhere all others."""
    on_cpu = jax.devices()[0].platform == "cpu"
    return tuple(case for case in operation.used_in("bench") if on_cpu == case.name.startswith(SMALL))


def peers_of(operation: str) -> tuple[peers.Peer, ...]:
    """The peers of an operation that run here: none without PyTorch and a GPU that it sees."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    from kernels_pallas.bench import pytorch

    return pytorch.PEERS[operation]


def program(operation: Operation, case: Case, implementation: str, training: bool) -> Callable[[], Any]:
    """A compiled call on random arguments: forward, or forward and backward from random cotangents.

    Raises NotImplementedError where the implementation does not serve here.
    """
    arguments = case.draw(case.dtypes[0])
    inputs = {name: arguments.pop(name) for name in case.differentiable()}

    def forward(inputs: dict, others: dict) -> Any:
        return operation.function(**inputs, **others, **case.options, implementation=implementation)

    def both(inputs: dict, others: dict, cotangents: Any) -> Any:
        results, pull_back = jax.vjp(lambda inputs: forward(inputs, others), inputs)
        return results, pull_back(cotangents)

    if not training:
        run = jax.jit(forward).lower(inputs, arguments).compile()
        return _Program(run, (inputs, arguments))
    shapes = jax.eval_shape(forward, inputs, arguments)
    cotangents = jax.tree.map(lambda y: jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype), shapes)
    return _Program(jax.jit(both).lower(inputs, arguments, cotangents).compile(), (inputs, arguments, cotangents))


class _Program:
    """A compiled program and what it is called on."""

    def __init__(self, compiled: jax.stages.Compiled, arguments: tuple):
        self.compiled, self.arguments = compiled, arguments

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)

    @property
    def temporary_bytes(self) -> int | None:
        """Memory beyond arguments and results, as XLA planned it; None where it does not say."""
        planned = self.compiled.memory_analysis()
        return None if planned is None else int(planned.temp_size_in_bytes)


def rows(operations: list[str], limits: Ceilings, rounds: int = 7) -> Iterator[dict[str, Any]]:
    """One row per operation, case, direction and implementation, the reference first and peers last. One that does not
    serve has a `reason` and no figures."""
    for name in operations:
        operation = OPERATIONS[name]
        for case in cases(operation):
            for training in (False, True):
                yield from _compare(operation, case, training, limits, rounds)


def _compare(operation: Operation, case: Case, training: bool, limits: Ceilings, rounds: int) -> Iterator[dict]:
    forward, backward = operation.costs(**case.structs(case.dtypes[0]), **case.options)
    flops = forward.flops + training * backward.flops
    moved = forward.bytes + training * backward.bytes
    reference = None

    def named(implementation: str) -> dict[str, Any]:
        return {
            "operation": operation.name,
            "case": case.name,
            "dtype": case.dtypes[0],
            "direction": "training" if training else "forward",
            "implementation": implementation,
        }

    def row(implementation: str, taken: Time, temporary: int | None) -> dict[str, Any]:
        # What bounds an operation from below: its bytes at the speed of a copy, its FLOPs at that of a product.
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

    def left_out(implementation: str, error: Exception) -> dict[str, Any]:
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return named(implementation) | {"reason": reason[:300]}

    platform = jax.devices()[0].platform
    for implementation in ("reference", *operation.implementations, *operation.others):
        if _PLATFORMS.get(implementation, platform) != platform:
            continue
        try:
            taken, temporary = _timed(operation, case, implementation, training, rounds)
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:  # it does not serve, or memory is too small
            yield left_out(implementation, error)
            continue
        reference = taken.median if implementation == "reference" else reference
        yield row(implementation, taken, temporary)
    for peer in peers_of(operation.name):
        try:
            found = row(peer.name, *peers.measure(peer, case, training, rounds))
        except Exception as error:  # of PyTorch and Triton: what they refuse has no type of its own
            found = left_out(peer.name, error)
        peers.give_back()
        yield found


def _timed(
    operation: Operation, case: Case, implementation: str, training: bool, rounds: int
) -> tuple[Time, int | None]:
    run = program(operation, case, implementation, training)
    return measure(run, rounds), run.temporary_bytes


def benchmark(
    operations: list[str],
    rounds: int = 7,
    say: Callable[[dict], None] = lambda row: None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measure the ceilings and these operations, or all where none is named; `say` hears each row.

    Nothing is written here. A folder is one the results will go to: it is made, and one that would not take them
    is refused before anything is measured.
    Raises ValueError for a name that there is not, for no round, and for such a folder.
    """
    check(operations)
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: it must be at least 1")
    if folder is not None:
        _check_folder(folder)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory of the same GPU
    limits, done, left_out = ceilings(), [], []
    for row in rows(operations or list(OPERATIONS), limits, rounds):
        say(row)
        (left_out if "reason" in row else done).append(row)
    return {
        "benchmark": "kernels",
        "day": time.strftime("%Y-%m-%d"),
        "device": target.of_device(jax.devices()[0]).kind,
        "versions": _versions(),
        "ceilings": limits._asdict(),
        "rows": done,
        "left_out": left_out,
    }


def _check_folder(folder: Path) -> None:
    """Makes it. Raises ValueError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror}; it must be a folder") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder}: it must be a folder that can be written")


def write(results: dict[str, Any], folder: Path, chip: str | None = None) -> Path:
    """Write results to FOLDER/<chip>/kernels.json; the chip's name is the device's where none is given."""
    name = re.sub(r"[^a-z0-9]+", "-", (chip or results["device"]).lower()).strip("-")
    path = folder / name / "kernels.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return path


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
