"""Pallas kernels compiled for an NVIDIA GPU that is absent, and emulated."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from machine_code.program import compile_call

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.kernel_matrix import CHIPS
from kernels_pallas.core import launch, target


def on(chip, monkeypatch):
    """Compile kernels of Triton and Mosaic GPU for a chip of CHIPS and emulate them, until the test ends.

    Copies of a program arrive as late as they may in its first run, at once in its second, and so on alternately.
    """
    device = targets.devices(Target.parse(CHIPS[chip]))[0]
    mesh = Mesh(np.array([device]), ("one",))
    known = target.of_device(device)
    monkeypatch.setattr(target, "current", lambda: known)
    for name in ("pallas_call", "kernel"):
        monkeypatch.setattr(launch.pl, name, _emulated(getattr(launch.pl, name), mesh))
    jax.clear_caches()


def _emulated(make, mesh):
    """Return a replacement for a function of Pallas that makes calls."""

    def make_emulated(*arguments, **options):
        call = make(*arguments, **options)

        def run(*operands):
            sums = [x for x in operands if isinstance(jax.typeof(x), jax.ref.AbstractRef)]  # the last
            operands = [*operands[: len(operands) - len(sums)], *(x[...] for x in sums)]
            structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
            precision = jax.config.jax_default_matmul_precision
            # In a thread of its own, because there nothing is being traced.
            with ThreadPoolExecutor(1) as thread:
                compiled = thread.submit(_compiled, mesh, precision, _pure(call, len(sums)), structs).result()
            late = itertools.cycle([True, False])

            def emulate(*operands):
                return compiled.run(*operands, late=next(late))

            results = jax.pure_callback(emulate, list(compiled.results), *operands, vmap_method="sequential")
            for ref, total in zip(sums, results[len(results) - len(sums) :], strict=True):
                ref[...] = total
            return results[: len(results) - len(sums)]

        return run

    return make_emulated


def _pure(call, sums):
    """Return a call as a function of arrays whose last `sums` operands, references, become its last results."""
    if not sums:
        return call

    def run(*operands):
        refs = [jax.new_ref(x) for x in operands[len(operands) - sums :]]
        return [*call(*operands[: len(operands) - sums], *refs), *map(jax.freeze, refs)]

    return run


def _compiled(mesh, precision, call, structs):
    whole = NamedSharding(mesh, PartitionSpec())
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in structs]
    with jax.set_mesh(mesh), jax.enable_x64(False), jax.default_matmul_precision(precision):
        return compile_call(jax.jit(call).lower(*structs))
