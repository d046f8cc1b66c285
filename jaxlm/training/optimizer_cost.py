"""The declaration of an optimizer's cost: what it holds, multiplies and moves for one parameter."""

from typing import NamedTuple

from jaxlm.models.tree import Dimensions


class OptimizerProduct(NamedTuple):
    """`times` products [m, k] × [k, n], float32, of `batch` matrices at once, on one device."""

    times: int
    batch: int
    m: int
    k: int
    n: int


class OptimizerMove(NamedTuple):
    """A collective over a mesh axis that runs `times` times, with `numbers` float32 elements on one device."""

    kind: str
    axis: str
    times: int
    numbers: int


class OptimizerCost(NamedTuple):
    """The cost of an update of one parameter, except for reading and writing the parameter.

    `state`: the float32 arrays that are kept, each as the dimensions of the parameter that it has.
    """

    state: tuple[tuple[int, ...], ...]
    products: tuple[OptimizerProduct, ...] = ()
    moves: tuple[OptimizerMove, ...] = ()


def moments(d: Dimensions, n: int) -> OptimizerCost:
    """Return the cost of an update that keeps `n` arrays like the parameter."""
    return OptimizerCost((tuple(range(len(d.shape))),) * n)
