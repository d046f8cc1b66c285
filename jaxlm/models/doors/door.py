"""The decorator that makes a function a door: recorded while a recording is made, computed otherwise.

A door is a file with two functions: one that computes, and one that declares what that costs.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive

from jaxlm.models.doors.cost import DoorCost, Local
from jaxlm.models.logical_axes import Axes
from jaxlm.models.parameters import Module, scope
from jaxlm.models.recording import is_recording
from jaxlm.parallel.partition import constrain

P = ParamSpec("P")
R = TypeVar("R")

AxedArray = tuple[jax.Array | jax.ShapeDtypeStruct, Axes]


class Signature(NamedTuple):
    """The arrays of one use of a door, each with its logical axes.

    `results`: by shape and dtype. `options`: what its cost depends on besides; hashable. `of`: the parameter, or the
    quantised matrix, whose name
    everything in the door carries. `name`: of the results, for rematerialisation.
    """

    operands: Sequence[tuple[jax.Array | None, Axes]]
    results: Sequence[AxedArray]
    options: dict[str, Any] = {}
    of: nnx.Param | Module | None = None
    name: str | None = None


@dataclass(frozen=True, eq=False)
class Door:
    """An operation through which models compute; `declare` gives its cost on one device."""

    name: str
    declare: Callable[[Local], DoorCost]


class Marker(NamedTuple):
    """One use of a door in a recording, with the logical axes of its operands and results, and its options."""

    door: Door
    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    options: tuple[tuple[str, Any], ...] = ()


DOORS: dict[str, Door] = {}  # by name

MARKER = Primitive("door")
MARKER.multiple_results = True
MARKER.def_abstract_eval(lambda *operands, marker, results: list(results))


def door(
    signature: Callable[P, Signature],
    declare: Callable[[Local], DoorCost],
    *,
    name: str | None = None,
    pinned: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return the decorator of a function of arrays through which models compute.

    While a recording is made a marker stands in the jaxpr in its place. Otherwise it computes.

    Args:
      signature: takes the arguments of the function.
      declare: gives the cost of one use on one device.
      name: of the door; that of the function where None.
      pinned: the sharding of the result is constrained by its logical axes.
    """

    def decorate(compute: Callable[P, R]) -> Callable[P, R]:
        new_door = DOORS[name or compute.__name__] = Door(name or compute.__name__, declare)

        @functools.wraps(compute)
        def inner(*arguments: P.args, **options: P.kwargs) -> R:
            use = signature(*arguments, **options)
            with scope(use.of):
                if is_recording():
                    results = _record(new_door, use)
                    return cast(R, results[0] if len(results) == 1 else tuple(results))
                result = compute(*arguments, **options)
                return cast(R, constrain(cast(jax.Array, result), *use.results[0][1])) if pinned else result

        return inner

    return decorate


def _record(door: Door, use: Signature) -> list[jax.Array]:
    """Put a marker into the jaxpr and return its results."""
    operands = [(x, axes) for x, axes in use.operands if x is not None]
    axes = tuple(axes for _, axes in operands), tuple(axes for _, axes in use.results)
    marker = Marker(door, *axes, tuple(sorted(use.options.items())))
    shapes = tuple(ShapedArray(x.shape, x.dtype) for x, _ in use.results)
    results = MARKER.bind(*(x for x, _ in operands), marker=marker, results=shapes)
    return results if use.name is None else [checkpoint_name(x, use.name) for x in results]
