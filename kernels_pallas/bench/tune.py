"""Find the fastest sizes of blocks for the chip that is here, and put them into blocks.json.

python -m kernels_pallas.bench.tune                    all operations
python -m kernels_pallas.bench.tune rms_norm --dry-run

Each kernel starts from what it runs with now. One number after the other is halved and doubled, and what is faster by
more than two per cent is kept, until nothing is; sizes that do not compile, or whose results are others, are passed
over.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.bench.run import cases, program
from kernels_pallas.bench.timing import measure
from kernels_pallas.core import tuning
from kernels_pallas.core.cases import KernelCase, KernelOperation
from kernels_pallas.core.registry import OPERATIONS, check

_ENOUGH = 0.98
# What float32 sums differ by in another order, of their largest: products of 4096 numbers by some 10⁻⁵.
_SUMS = 1e-4


class DeviceLost(Exception):
    """The device runs nothing any more."""


def tune(operation: KernelOperation, case: KernelCase, implementation: str) -> dict[tuning.KernelKey, Any]:
    """The fastest sizes of all kernels that forward and backward of a case run; empty where it does not serve here, or
    runs with no sizes.

    Raises DeviceLost.
    """
    try:
        with tuning.trying({}) as asked:
            run = program(operation, case, implementation, training=True)
        wanted = run()
        fastest = measure(run, rounds=3).median
    except NotImplementedError:
        return {}
    except Exception as error:  # a case that is too large for this chip leaves the others to be tuned
        reason = str(error).partition("\n")[0][:200]
        print(f"{operation.name}, {case.name}, {implementation}: left out: {reason}", flush=True)
        return {}
    best = {kernel: got.blocks for kernel, got in asked.items()}

    def seconds(blocks: dict[tuning.KernelKey, Any]) -> float | None:
        """Of a training call with these sizes; None where they do not compile or run, or give other results."""
        try:
            with tuning.trying(blocks):
                other = program(operation, case, implementation, training=True)
            same = _same(other(), wanted)
            taken = measure(other, rounds=3).median if same else None
        except Exception:  # compilers refuse in many ways; every one of them means: not these sizes
            _check_device(run)
            return None
        if not same:
            print(f"{operation.name}, {case.name}, {implementation}: other results with {blocks}", flush=True)
        return taken

    for kernel, (_, free) in asked.items():
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
    """But for the order of sums and one rounding more or less: to two units in the last place of the largest number of
    each array."""

    def near(x: jax.Array, y: jax.Array) -> bool:
        tolerance = max(2 * float(jnp.finfo(y.dtype).eps), _SUMS)
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        finite = jnp.isfinite(y)
        largest = jnp.max(jnp.where(finite, jnp.abs(y), 0.0), initial=0.0)
        alike = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
        return bool(jnp.all(jnp.where(finite, jnp.abs(x - y) <= tolerance * largest, alike)))

    return all(map(near, jax.tree.leaves(results), jax.tree.leaves(wanted)))


def _check_device(run: Callable[[], Any]) -> None:
    """Raises DeviceLost where not even what has run before runs: of a GPU on which a kernel went astray nothing more
    can be had by this process, and all sizes would look as if they did not compile."""
    try:
        jax.block_until_ready(run())
    except Exception as error:
        raise DeviceLost(str(error).partition("\n")[0][:200]) from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench.tune", description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(OPERATIONS)}; default: all")
    parser.add_argument("--dry-run", action="store_true", help="print what is fastest, and write nothing")
    options = parser.parse_args(arguments)
    try:
        check(options.operations)
    except ValueError as error:
        parser.error(str(error))
    device, tuned = jax.devices()[0].device_kind, False
    for name in options.operations or OPERATIONS:
        operation = OPERATIONS[name]
        for case, implementation in itertools.product(cases(operation), operation.implementations):
            try:
                found = tune(operation, case, implementation)
            except DeviceLost as error:
                what = f"{name}, {case.name}, {implementation}"
                raise SystemExit(f"{device} was lost at {what}: {error}; what was found before is recorded") from None
            for kernel, blocks in found.items():
                print(f"{kernel}: {blocks}", flush=True)
            tuned = tuned or bool(found)
            if found and not options.dry_run:  # at once: the next case may take an hour
                tuning.record(device, found)
    if not tuned:
        print(f"no kernel runs on {device}: there is nothing to tune")
    elif not options.dry_run:
        print(f"wrote {tuning.TABLE}")


if __name__ == "__main__":
    main()
