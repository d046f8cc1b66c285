"""Norms: operations of `kernels_pallas` over one or more of the last dimensions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxlm.models import kernels
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.doors.heads import repeat_heads
from jaxlm.models.logical_axes import Axes
from jaxlm.parallel.partition import shards_of


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


@door(_signature)
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
