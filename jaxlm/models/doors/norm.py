"""Norms: operations of `kernels_pallas` over one or more of the last dimensions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.cost import DoorCost, Local, LocalArray, Loop, Saved, Statistics, launched, loop
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.heads import repeat_heads
from jaxlm.models.logical_axes import Axes
from jaxlm.parallel.partition import shards_of
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
    options = {"operation": operation.__name__, "dimensions": dimensions, **options}
    return Signature([(x, axes), *parameters, (residual, axes)], results, options)


# FLOPs as the jaxprs of this project's configurations have them, to a fifth.
_LOOPS = {"rms_norm": (Loop(5.3, 0, 3), Loop(9.5, 0, 6)), "layer_norm": (Loop(8.1, 0, 3), Loop(13.4, 0, 6))}
_OF_PARTS = Loop(0, 0, 2), Loop(0, 0, 2)  # of each head: their FLOPs are in those of what they are fused into
_RESIDUAL = Loop(1, 0, 3), Loop(1, 0, 3)
_COSTS = {"rms_norm": rms_norm_costs, "layer_norm": layer_norm_costs}
_STATISTICS = {"rms_norm": 1, "layer_norm": 2}  # sums over the channels of each token


def _declare(local: Local) -> DoorCost:
    x = local.operands[0]
    name, dimensions = local.options["operation"], local.options["dimensions"]
    has_residual = len(local.results) == 2
    is_kernel = local.kernels and not any(x.sharded[-dimensions:])
    if is_kernel:
        flat = [_flat(each, dimensions) for each in local.operands]
        residual = flat.pop() if has_residual else None
        passes = [launched(_COSTS[name](*flat, residual=residual))]
    elif dimensions == 1 and len(x.shape) > 3:
        passes = [loop(_OF_PARTS, x)]
    else:
        passes = [loop(_LOOPS[name], x, fused_once=True)]
        passes += [loop(_RESIDUAL, x, "residual", fused_once=True)] * has_residual
    # Without a kernel XLA keeps the float32 insides of a norm instead of what it reads.
    insides = 0 if is_kernel else 4 * 3 * x.numbers
    each = Statistics(0, range(-dimensions, 0), 4 * math.prod(x.shape[:2]), "norms", _STATISTICS[name], True)
    saved = Saved(results=(0,), instead=insides) if has_residual else Saved((0,), instead=insides)
    return DoorCost(passes=tuple(passes), saved=saved, statistics=(each,))


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
    """Return a norm of x, an operation of `kernels_pallas`, over its last `dimensions`.

    Where devices share one of these, XLA computes the norm, with a sum over the devices.

    Args:
      operation: `rms_norm` or `layer_norm`, with its `options`.
      axes: the logical axes of x.
      vectors: the gain, and the bias where the operation has one, of the shape of these dimensions. Those of key/value
        heads are copied as the heads are.
      residual: where it is given the result is (x + residual, its norm), by one kernel.
    """

    def normalise(x: jax.Array, residual: jax.Array | None, *vectors: jax.Array | None, **options: Any) -> Any:
        rows = x.shape[:-dimensions]
        flat = [v if v is None else v.reshape(-1) for v in vectors]
        added = residual if residual is None else residual.reshape(*rows, width)
        results = operation(x.reshape(*rows, width), *flat, residual=added, **options)
        return jax.tree.map(lambda y: y.reshape(*rows, *shape), results)

    normalised, shape = axes[-dimensions:], x.shape[-dimensions:]
    width = math.prod(shape)
    of_heads = [v if v is None else repeat_heads(v, 0, shape[0] // v[...].shape[0]) for v in vectors]
    if any(axis and shards_of(axis, size) > 1 for axis, size in zip(normalised, shape, strict=True)):
        return normalise(x, residual, *of_heads, implementation="xla", **options)
    return kernels.run(normalise, (x, axes), (residual, axes), *((v, normalised) for v in of_heads), **options)
