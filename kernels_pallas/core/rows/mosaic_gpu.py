"""Rows on Hopper, compiled by Mosaic GPU: one warpgroup holds a row in its registers.

A block of the grid is one warpgroup, which loops over its share of the rows. It loads the next row before it computes
one, so that memory is busy meanwhile. Accesses go from global memory to registers, 16 bytes for each thread where the
width allows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from kernels_pallas.core import target
from kernels_pallas.core.hopper.launch import run_kernel
from kernels_pallas.core.hopper.memory import THREADS
from kernels_pallas.core.hopper.warpgroup import Warpgroup
from kernels_pallas.core.launch import KernelCost, widened

# Of a block, 32 for each thread: with a gradient's operands, scale and sums in float32 and the next row, that is 230 of
# 255 registers. Where columns are independent half as many let more blocks run.
MAX_WIDTH = 4096
_MAX_PART = 2048

# Of a thread's access: with fewer, XLA's kernels are no slower.
_LEAST_BYTES = 8

# Programs for each SM: two always fit its registers. With sums each writes a partial sum; without, more of them end
# more evenly.
_PROGRAMS, _PROGRAMS_WITH_SUMS = 16, 2


def unsupported_reason(x: Any, elementwise: bool) -> str | None:
    """Return why this kernel cannot serve rows like x [..., W], or None."""
    width, whole = x.shape[-1], THREADS * _LEAST_BYTES // x.dtype.itemsize
    if width % whole:
        return f"rows of {width} numbers are no multiple of {whole}"
    if not elementwise and width > MAX_WIDTH:
        return f"rows of {width} numbers are wider than {MAX_WIDTH}"
    return None


def _lanes(columns: int, bytes_each: int) -> int:
    """Return how many neighbouring numbers a thread accesses at a time: 16 bytes, or fewer where columns are few."""
    return math.gcd(columns // THREADS, 16 // bytes_each)


def _columns(width: int, elementwise: bool, bytes_each: int) -> int:
    """Return of how many columns a block is: of all, or where they are independent of as many as one may have."""
    if not elementwise:
        return width
    parts = (n for n in range(THREADS, _MAX_PART + 1, THREADS) if width % n == 0)
    return max(parts, key=lambda n: (_lanes(n, bytes_each), n))


def run(
    step: Callable[..., tuple[tuple, tuple]],
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    sums: int,
    elementwise: bool,
    cost: KernelCost,
    name: str,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Run step(inside, rows, vectors) → (results, sums over rows) on rows: results [R, W], float32 sums [W]."""
    R, W = rows[0].shape
    widest = max(x.dtype.itemsize for x in rows)
    C = _columns(W, elementwise, widest)
    lanes, parts = _lanes(C, widest), W // C
    programs = min(target.current().cores * (_PROGRAMS_WITH_SUMS if sums else _PROGRAMS), R)
    inputs = {f"rows_{i}": _bytes_for_bools(x).reshape(R, parts, C) for i, x in enumerate(rows)}
    inputs |= {f"vector_{i}": v.reshape(parts, C) for i, v in enumerate(vectors)}
    results = {f"result_{i}": jax.ShapeDtypeStruct((R, parts, C), y.dtype) for i, y in enumerate(outputs)}
    results |= {f"sum_{i}": jax.ShapeDtypeStruct((programs, parts, C), jnp.float32) for i in range(sums)}

    def kernel(warpgroup: Warpgroup, ref: Any) -> None:
        program, part = warpgroup.index("program"), warpgroup.index("part")

        def loaded(row: jax.Array) -> tuple:
            return tuple(warpgroup.load_strided(ref[key].at[row, part], lanes) for key in inputs if "rows" in key)

        scales = [warpgroup.load_strided(ref[key].at[part], lanes) for key in inputs if "vector" in key]

        def one_row(i: jax.Array, carry: tuple) -> tuple:
            values, totals = carry
            row = program + i * programs
            following = loaded(jnp.minimum(row + programs, R - 1))  # in flight while this one is computed
            made, added = _on_one_row(step, C, tuple(map(widened, values)), tuple(map(widened, scales)))
            for key, y in zip(results, made, strict=False):
                ref[key].at[row, part][...] = y.astype(results[key].dtype)
            return following, tuple(total + more for total, more in zip(totals, added, strict=True))

        totals = tuple(warpgroup.strided(jnp.zeros((C,), jnp.float32), lanes) for _ in range(sums))
        count = jax.lax.div(R - program + programs - 1, programs)
        _, totals = jax.lax.fori_loop(0, count, one_row, (loaded(program), totals))
        for i, total in enumerate(totals):
            ref[f"sum_{i}"].at[program, part][...] = total

    arrays = run_kernel(
        kernel,
        inputs,
        results,
        grid={"program": programs, "part": parts},
        warpgroups=1,
        shared={},
        cost=cost,
        name=name,
        exact=True,
    )
    y, partials = arrays[: len(outputs)], arrays[len(outputs) :]
    return (
        tuple(a.reshape(x.shape) for a, x in zip(y, outputs, strict=True)),
        tuple(jnp.sum(p, axis=0).reshape(-1) for p in partials),
    )


def _bytes_for_bools(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int8) if x.dtype == jnp.bool else x


def _on_one_row(step: Callable, width: int, rows: tuple, vectors: tuple) -> tuple[tuple, tuple]:
    """Return step(None, rows, vectors), written for blocks [r, W], of the values [W] of one row.

    In the registers of a warpgroup a value is [W] or a scalar: the step is traced with blocks [1, W], and each of its
    operations applied to values without the first dimension, and without the second where that is 1.
    """
    blocks = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, width), x.dtype), (rows, vectors))
    traced, shapes = jax.make_jaxpr(functools.partial(step, None), return_shape=True)(*blocks)
    results = _evaluated(traced.jaxpr, width, [*traced.consts, *rows, *vectors])
    return jax.tree.unflatten(jax.tree.structure(shapes), [_spread(x, (width,)) for x in results])


def _evaluated(jaxpr: Any, width: int, arguments: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), arguments, strict=True))

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        primitive, inputs = equation.primitive, [value(x) for x in equation.invars]
        reduces = primitive.name.startswith("reduce_")
        if inner := list(jaxprs_in_params(equation.params)):
            results = _evaluated(inner[0], width, inputs)
        elif reduces and equation.invars[0].aval.size == width:
            results = [primitive.bind(_spread(inputs[0], (width,)), **equation.params | {"axes": (0,)})]
        elif reduces or primitive.name in ("broadcast_in_dim", "reshape", "squeeze", "stop_gradient"):
            results = inputs
        else:
            shape = (width,) if equation.outvars[0].aval.size == width else ()
            apply = _LOWERED.get(primitive.name, primitive.bind)
            results = [apply(*(_spread(x, shape) for x in inputs), **equation.params)]
        values |= zip(equation.outvars, results, strict=True)
    return [value(x) for x in jaxpr.outvars]


def _power(x: jax.Array, y: int) -> jax.Array:
    product = functools.reduce(jax.lax.mul, [x] * abs(y))
    return product if y > 0 else 1.0 / product


# In place of primitives that Mosaic GPU does not lower.
_LOWERED = {"add_any": jax.lax.add, "integer_pow": _power}


def _spread(x: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return a value [W] as it is, and a scalar as `shape`."""
    return x if jnp.shape(x) == shape else jnp.broadcast_to(x, shape)
