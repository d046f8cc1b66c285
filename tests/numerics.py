"""Random arguments for implementations, and their tolerances against the reference."""

import contextlib
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import interpreted, target
from kernels_pallas.core.cases import KernelCase, KernelOperation
from kernels_pallas.core.choice import KERNELS, cannot_lower


def served(operation: KernelOperation, implementation: str) -> tuple[tuple[KernelCase, str], ...]:
    """Return the tested cases that an implementation supports, each with every dtype in which it does."""
    pairs = ((case, dtype) for case in operation.used_in("test") for dtype in case.dtypes)
    return tuple(pair for pair in pairs if operation.serves(implementation, *pair))


def results_and_gradients(function, case: KernelCase):
    """Return a jitted function of arguments and cotangents: results as a list, and the gradients by name."""

    @jax.jit
    def run(arguments: dict, cotangents: list) -> tuple[list, dict]:
        inputs = {name: arguments[name] for name in case.differentiable()}
        others = {name: x for name, x in arguments.items() if name not in inputs}

        def results(inputs: dict) -> list:
            return jax.tree.leaves(function(**inputs, **others, **case.options))

        made, pull_back = jax.vjp(results, inputs)
        return made, pull_back([c.astype(y.dtype) for c, y in zip(cotangents, made, strict=True)])[0]

    return run


class Problem(NamedTuple):
    """Arguments and cotangents of a case in a dtype, and the reference's results in float32.

    Attributes:
      shapes: of the results, with their dtypes.
      results, gradients: of the reference.
    """

    arguments: dict[str, jax.Array]
    cotangents: list[jax.Array]
    shapes: list[jax.ShapeDtypeStruct]
    results: list[jax.Array]
    gradients: dict[str, jax.Array]


@functools.cache
def problem(operation: KernelOperation, case: KernelCase, dtype: str) -> Problem:
    """Return the problem of a case, the same for each implementation and each chip."""
    arguments = case.draw(dtype)
    shapes = jax.tree.leaves(jax.eval_shape(lambda a: operation.reference(**a, **case.options), arguments))
    cotangents = [drawn(y.shape, seed=i, dtype=y.dtype)[0] for i, y in enumerate(shapes, 1)]
    wanted = results_and_gradients(operation.reference, case)(jax.tree.map(_wide, arguments), cotangents)
    return Problem(arguments, cotangents, shapes, *wanted)


def check(operation: KernelOperation, case: KernelCase, dtype: str, implementation: str) -> None:
    """Check an implementation's results and gradients against the reference in float32, and the equality of two runs.

    A kernel is compiled where JAX's default device runs it, and interpreted elsewhere.
    """
    wanted = problem(operation, case, dtype)
    run = results_and_gradients(functools.partial(operation.function, implementation=implementation), case)
    elsewhere = implementation in KERNELS and cannot_lower(implementation, target.current())
    with interpreted() if elsewhere else contextlib.nullcontext():
        results, gradients = run(wanted.arguments, wanted.cotangents)
        chex.assert_trees_all_equal((results, gradients), run(wanted.arguments, wanted.cotangents))
    chex.assert_trees_all_equal_shapes_and_dtypes(results, wanted.shapes)
    for name, got, want in (
        *((f"result {i}", *pair) for i, pair in enumerate(zip(results, wanted.results, strict=True))),
        *((f"gradient of {name}", gradients[name], wanted.gradients[name]) for name in gradients),
    ):
        assert_close(f"{operation.name}, {case.name}, {dtype}: {name}", got, want, case.roundings, dtype)


def assert_close(what: str, got: jax.Array, want: jax.Array, roundings: int, dtype: str) -> None:
    """Assert that |got − want| ≤ one unit in the last place, since a kernel rounds once, plus the error of float32
    sums.

    Terms cancel in a sum, so its error is relative to the largest number: 64 units of float32. Where an operation also
    rounds intermediate values, each rounding adds one unit of its dtype of the largest number.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    single = float(jnp.finfo(jnp.float32).eps)
    unit = float(jnp.finfo(dtype).eps)
    largest = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want)))
    atol = largest * (64 * single + roundings * unit) + float(jnp.finfo(dtype).tiny)
    np.testing.assert_allclose(got, want, rtol=max(unit, 8 * single), atol=atol, err_msg=what)


def _wide(x: jax.Array) -> jax.Array:
    is_number = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1  # bytes are the operation's own storage
    return jnp.asarray(np.asarray(x, np.float32)) if is_number else x


def drawn(*shapes, seed=0, dtype=jnp.float32):
    """Return an array of normal numbers for each shape, drawn by NumPy so that nothing is compiled."""
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes]
