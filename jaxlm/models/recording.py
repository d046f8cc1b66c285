"""Recordings of a model: while one is made, each operation stands in the jaxpr as a marker that says what it computes.

The recorded jaxpr is that of the model's own forward pass: loops tell how often an operation runs, variables what it
reads, and names what rematerialisation may keep. It knows no mesh, no chip and no implementation.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive

Axes = tuple[str | None, ...]


class Marker(NamedTuple):
    """One use of an operation: its name, the logical axes of its operands and results, and what else it depends on."""

    operation: str
    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    options: tuple[tuple[str, Any], ...] = ()


# A user context: JAX keys its caches by it, so that what is traced here is not reused outside.
_recording = jax.make_user_context(False)

MARKER = Primitive("operation")
MARKER.multiple_results = True
MARKER.def_abstract_eval(lambda *operands, marker, results: list(results))


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Trace models inside as recordings, which know nothing of a mesh around."""
    with _recording(True), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def is_recording() -> bool:
    """Return whether a recording is made around."""
    return _recording.value


def mark(
    operation: str,
    operands: Sequence[tuple[jax.Array | None, Axes]],
    results: Sequence[tuple[jax.ShapeDtypeStruct | jax.Array, Axes]],
    **options: Any,
) -> list[jax.Array]:
    """Record a use of an operation and return its results.

    Args:
      operands: each array, or None, with its logical axes.
      results: shape and dtype of each result, with its logical axes.
      options: what its cost depends on besides; hashable.
    """
    given = [(x, axes) for x, axes in operands if x is not None]
    marker = Marker(
        operation, tuple(axes for _, axes in given), tuple(axes for _, axes in results), tuple(sorted(options.items()))
    )
    shapes = tuple(ShapedArray(x.shape, x.dtype) for x, _ in results)
    return MARKER.bind(*(x for x, _ in given), marker=marker, results=shapes)
