"""Operands of implementations, and the tolerances to their reference."""

import contextlib
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import interpreted, target
from kernels_pallas.core.cases import KernelCase, KernelOperation
from kernels_pallas.core.choice import cannot_lower


def served(operation: KernelOperation, implementation: str) -> tuple[tuple[KernelCase, str], ...]:
    """The tested cases that an implementation serves, each with the dtypes in which it does."""
    pairs = ((case, dtype) for case in operation.used_in("test") for dtype in case.dtypes)
    return tuple(pair for pair in pairs if operation.serves(implementation, *pair))


def results_and_gradients(function, case: KernelCase):
    """A jitted function of arguments and cotangents: function's results as a list, and the gradients by name."""

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
    """Arguments and cotangents of a case in a dtype, and what the reference makes of them in float32.

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
    """The same for each implementation and each chip."""
    arguments = case.draw(dtype)
    shapes = jax.tree.leaves(jax.eval_shape(lambda a: operation.reference(**a, **case.options), arguments))
    cotangents = [drawn(y.shape, seed=i, dtype=y.dtype)[0] for i, y in enumerate(shapes, 1)]
    wanted = results_and_gradients(operation.reference, case)(jax.tree.map(_wide, arguments), cotangents)
    return Problem(arguments, cotangents, shapes, *wanted)


def check(operation: KernelOperation, case: KernelCase, dtype: str, implementation: str) -> None:
    """The kernel gives what the reference gives in float32, results and gradients, and twice the same: compiled where
    JAX's default device runs it, interpreted elsewhere."""
    wanted = problem(operation, case, dtype)
    run = results_and_gradients(functools.partial(operation.function, implementation=implementation), case)
    with interpreted() if cannot_lower(implementation, target.current()) else contextlib.nullcontext():
        results, gradients = run(wanted.arguments, wanted.cotangents)
        chex.assert_trees_all_equal((results, gradients), run(wanted.arguments, wanted.cotangents))
    chex.assert_trees_all_equal_shapes_and_dtypes(results, wanted.shapes)
    for name, got, want in (
        *((f"result {i}", *pair) for i, pair in enumerate(zip(results, wanted.results, strict=True))),
        *((f"gradient of {name}", gradients[name], wanted.gradients[name]) for name in gradients),
    ):
        assert_close(f"{operation.name}, {case.name}, {dtype}: {name}", got, want, case.roundings, dtype)


def assert_close(what: str, got: jax.Array, want: jax.Array, roundings: int, dtype: str) -> None:
    """|got − want| ≤ one unit in the last place, as a kernel rounds once, plus what float32 sums in another order.

    Terms cancel in a sum, so its error is relative to the largest number: 64 units of float32 of it. Where an
    operation rounds within as well, each rounding is one unit of its dtype of the largest number.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    single = float(jnp.finfo(jnp.float32).eps)
    unit = float(jnp.finfo(dtype).eps)
    largest = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want)))
    atol = largest * (64 * single + roundings * unit) + float(jnp.finfo(dtype).tiny)
    np.testing.assert_allclose(got, want, rtol=max(unit, 8 * single), atol=atol, err_msg=what)


def _wide(x: jax.Array) -> jax.Array:
    return jnp.asarray(np.asarray(x, np.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def drawn(*shapes, seed=0, dtype=jnp.float32):
    """Normal numbers, an array of each shape. By NumPy: nothing is compiled for them."""
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes]
