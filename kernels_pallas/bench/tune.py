"""Find the fastest block sizes for this machine's chip, and write them to blocks.json.

python -m kernels_pallas.bench.tune                    all operations
python -m kernels_pallas.bench.tune rms_norm --dry-run

Each kernel starts from its current sizes. One number after another is halved and doubled; a change that is faster by
more than two per cent is kept, until none is. Sizes that do not compile, or that change the results, are skipped.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.bench.run import cases, check_cases, program
from kernels_pallas.bench.timing import measure
from kernels_pallas.core import tuning
from kernels_pallas.core.cases import KernelCase, KernelOperation
from kernels_pallas.core.registry import OPERATIONS

_ENOUGH = 0.98
# Difference of float32 sums in another order, relative to the largest: about 10⁻⁵ for products of 4096 numbers.
_SUMS = 1e-4


class DeviceLost(Exception):
    """The device no longer runs anything."""


def tune(operation: KernelOperation, case: KernelCase, implementation: str) -> dict[tuning.KernelKey, Any]:
    """Return the fastest sizes of all kernels that run forward and backward in a case.

    Empty where the implementation does not support the case here, or has no block sizes. Raises DeviceLost.
    """
    try:
        with tuning.trying({}) as lookups:
            run = program(operation, case, implementation, training=True)
        wanted = run()
        fastest = measure(run, rounds=3).median
    except NotImplementedError:
        return {}
    except Exception as error:  # a case that is too large for this chip must not stop the tuning of others
        reason = str(error).partition("\n")[0][:200]
        print(f"{operation.name}, {case.name}, {implementation}: left out: {reason}", flush=True)
        return {}
    best = {kernel: got.blocks for kernel, got in lookups.items()}

    def seconds(blocks: dict[tuning.KernelKey, Any]) -> float | None:
        """Time a training call with these sizes; None if they do not compile or run, or change the results."""
        try:
            with tuning.trying(blocks):
                other = program(operation, case, implementation, training=True)
            same = _same(other(), wanted)
            taken = measure(other, rounds=3).median if same else None
        except Exception:  # compilers refuse in many ways; each means that these sizes do not work
            _check_device(run)
            return None
        if not same:
            print(f"{operation.name}, {case.name}, {implementation}: other results with {blocks}", flush=True)
        return taken

    for kernel, (_, free) in lookups.items():
        improved = True
        while improved:
            improved = False
            for field in free:
                for factor in (0.5, 2):
                    size = int(getattr(best[kernel], field) * factor)
                    other = {**best, kernel: best[kernel]._replace(**{field: size})}
                    taken = seconds(other) if size else None
                    if taken is not None and taken < fastest * _ENOUGH:
                        best, fastest, improved = other, taken, True
    return best


def _same(results: Any, wanted: Any) -> bool:
    """Return whether results agree up to the order of sums and one rounding.

    The tolerance is two units in the last place of the largest number of each array.
    """

    def near(x: jax.Array, y: jax.Array) -> bool:
        tolerance = max(2 * float(jnp.finfo(y.dtype).eps), _SUMS)
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        finite = jnp.isfinite(y)
        largest = jnp.max(jnp.where(finite, jnp.abs(y), 0.0), initial=0.0)
        alike = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
        return bool(jnp.all(jnp.where(finite, jnp.abs(x - y) <= tolerance * largest, alike)))

    return all(map(near, jax.tree.leaves(results), jax.tree.leaves(wanted)))


def _check_device(run: Callable[[], Any]) -> None:
    """Raise DeviceLost if a program that has run before no longer runs.

    After an illegal access in a kernel a GPU serves this process no more, and all sizes would seem not to compile.
    """
    try:
        jax.block_until_ready(run())
    except Exception as error:
        raise DeviceLost(str(error).partition("\n")[0][:200]) from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench.tune", description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(OPERATIONS)}; default: all")
    parser.add_argument("--case", action="append", default=[], metavar="PATTERN", help="such as '* 8192 × 128'")
    parser.add_argument("--dry-run", action="store_true", help="print what is fastest, and write nothing")
    options = parser.parse_args(arguments)
    try:
        check_cases(options.operations, options.case)
    except ValueError as error:
        parser.error(str(error))
    device, tuned = jax.devices()[0].device_kind, False
    for name in options.operations or OPERATIONS:
        operation = OPERATIONS[name]
        for case, implementation in itertools.product(cases(operation, options.case), operation.implementations):
            try:
                fastest = tune(operation, case, implementation)
            except DeviceLost as error:
                what = f"{name}, {case.name}, {implementation}"
                raise SystemExit(f"{device} was lost at {what}: {error}; what was found before is recorded") from None
            for kernel, blocks in fastest.items():
                print(f"{kernel}: {blocks}", flush=True)
            tuned = tuned or bool(fastest)
            if fastest and not options.dry_run:  # at once: the next case may take an hour
                tuning.record(device, fastest)
    if not tuned:
        print(f"no kernel runs on {device}: there is nothing to tune")
    elif not options.dry_run:
        print(f"wrote {tuning.TABLE}")


if __name__ == "__main__":
    main()
