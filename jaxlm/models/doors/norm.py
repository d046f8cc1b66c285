"""Norms over one or more of the last dimensions: operations of `kernels_pallas`, or functions of one's own."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.cost import (
    CountedFunction,
    DoorCost,
    Local,
    LocalArray,
    Loop,
    Saved,
    Statistics,
    launched,
    loop,
)
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.heads import repeat_heads
from jaxlm.models.logical_axes import Axes
from jaxlm.parallel.partition import shards_of
from kernels_pallas import layer_norm, rms_norm
from kernels_pallas.layer_norm import costs as layer_norm_costs
from kernels_pallas.rms_norm import costs as rms_norm_costs


def _signature(
    operation: Callable[..., Any],
    x: jax.Array,
    axes: Axes,
    vectors: Sequence[nnx.Param | None],
    residual: jax.Array | None = None,
    dimensions: int = 1,
    **options: Any,
) -> Signature:
    parameters = [(v[...], axes[-dimensions:]) for v in vectors if v is not None]
    results = [(x, axes)] * (1 if residual is None else 2)
    options = {"operation": operation, "dimensions": dimensions, **options}
    return Signature([(x, axes), *parameters, (residual, axes)], results, options)


class _KernelNorm(NamedTuple):
    """The costs of an operation of `kernels_pallas`: as its kernel declares them, and as XLA's loops.

    `statistics`: sums over the channels of each token.
    """

    costs: Callable[..., Any]
    loops: tuple[Loop, Loop]
    statistics: int


# FLOPs as the jaxprs of this project's configurations have them, to a fifth.
_KERNELS: dict[Callable[..., Any], _KernelNorm] = {
    rms_norm: _KernelNorm(rms_norm_costs, (Loop(5.3, 0, 3), Loop(9.5, 0, 6)), 1),
    layer_norm: _KernelNorm(layer_norm_costs, (Loop(8.1, 0, 3), Loop(13.4, 0, 6)), 2),
}
_OF_FUNCTION = Loop(0, 0, 3), Loop(0, 0, 6)  # its FLOPs are counted
_OF_PARTS = Loop(0, 0, 2), Loop(0, 0, 2)  # of each head: their FLOPs are in those of what they are fused into
_RESIDUAL = Loop(1, 0, 3), Loop(1, 0, 3)


def _declare(local: Local) -> DoorCost:
    x = local.operands[0]
    options = local.options
    operation, dimensions = options.pop("operation"), options.pop("dimensions")
    own = _KERNELS.get(operation)
    kind = "rms_norm" if operation is rms_norm else "norm"
    has_residual = len(local.results) == 2
    is_kernel = local.kernels and own is not None and not any(x.sharded[-dimensions:])
    if own is not None and is_kernel:
        flat = [_flat(each, dimensions) for each in local.operands]
        residual = flat.pop() if has_residual else None
        passes = [launched(own.costs(*flat, residual=residual), kind=kind)]
    elif own is not None and dimensions == 1 and len(x.shape) > 3:
        passes = [loop(_OF_PARTS, x, kind=kind)]
    else:
        width = math.prod(x.shape[-dimensions:])
        vectors = ((width,),) * (len(local.operands) - 1 - has_residual)
        row = CountedFunction(_of_row(operation, tuple(options.items())), ((width,), *vectors), x.numbers // width)
        counted, loops = (None, own.loops) if own else (row, _OF_FUNCTION)
        passes = [loop(loops, x, fused_once=True, counted=counted, kind=kind)]
        passes += [loop(_RESIDUAL, x, "residual", fused_once=True, kind="add")] * has_residual
    # Without a kernel XLA keeps the float32 insides of a norm instead of what it reads.
    insides = 0 if is_kernel else 4 * 3 * x.numbers
    each = Statistics(0, range(-dimensions, 0), 4 * math.prod(x.shape[:2]), "norms", own.statistics if own else 1, True)
    saved = Saved(results=(0,), instead=insides) if has_residual else Saved((0,), instead=insides)
    return DoorCost(passes=tuple(passes), saved=saved, statistics=(each,))


@functools.lru_cache(maxsize=64)
def _of_row(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return a function with these options, one object for equal ones."""
    return functools.partial(function, **dict(options))


def _flat(array: LocalArray, dimensions: int) -> jax.ShapeDtypeStruct:
    """Return an array whose last dimensions are one."""
    shape = array.shape[: len(array.shape) - dimensions]
    return jax.ShapeDtypeStruct((*shape, math.prod(array.shape[-dimensions:])), array.dtype)


@door(_signature, _declare)
def norm(
    operation: Callable[..., Any],
    x: jax.Array,
    axes: Axes,
    vectors: Sequence[nnx.Param | None],
    residual: jax.Array | None = None,
    dimensions: int = 1,
    **options: Any,
) -> Any:
    """Return a norm of x over its last `dimensions`.

    Where devices share one of these, XLA computes the norm, with a sum over the devices.

    Args:
      operation: `rms_norm` or `layer_norm` of `kernels_pallas`, or a function at the top of a module, in `jax.numpy`,
        of the channels of one token and of vectors as long, which returns an array like them. `options` are hashable.
      axes: the logical axes of x.
      vectors: the gain, and the bias where the operation has one, of the shape of these dimensions. Those of key/value
        heads are copied as the heads are.
      residual: where it is given the result is (x + residual, its norm), by one kernel if there is one.
    """

    def normalise(x: jax.Array, residual: jax.Array | None, *vectors: jax.Array | None, **options: Any) -> Any:
        rows = x.shape[:-dimensions]
        flat = [v if v is None else v.reshape(-1) for v in vectors]
        added = residual if residual is None else residual.reshape(*rows, width)
        results = operation(x.reshape(*rows, width), *flat, residual=added, **options)
        return jax.tree.map(lambda y: y.reshape(*rows, *shape), results)

    if operation not in _KERNELS:
        operation = functools.partial(_with_residual, operation)
    normalised, shape = axes[-dimensions:], x.shape[-dimensions:]
    width = math.prod(shape)
    of_heads = [v if v is None else repeat_heads(v, 0, shape[0] // v[...].shape[0]) for v in vectors]
    if any(axis and shards_of(axis, size) > 1 for axis, size in zip(normalised, shape, strict=True)):
        return normalise(x, residual, *of_heads, implementation="xla", **options)
    return kernels.run(normalise, (x, axes), (residual, axes), *((v, normalised) for v in of_heads), **options)


def _with_residual(
    function: Callable[..., jax.Array],
    x: jax.Array,
    *vectors: jax.Array | None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    **options: Any,
) -> Any:
    """Call a function as an operation of `kernels_pallas` is called. XLA computes it, whatever runs elsewhere."""
    parameters = [vector for vector in vectors if vector is not None]
    of_rows = functools.partial(function, **options)
    for _ in x.shape[:-1]:
        of_rows = jax.vmap(of_rows, in_axes=(0, *[None] * len(parameters)))
    if residual is None:
        return of_rows(x, *parameters)
    total = x + residual
    return total, of_rows(total, *parameters)
