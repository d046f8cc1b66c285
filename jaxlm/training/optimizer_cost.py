"""The cost of an optimizer: what it keeps, multiplies and moves for one parameter."""

from typing import NamedTuple


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


class UpdateCost(NamedTuple):
    """The products and collectives of an update of one parameter, which the optimizer declares."""

    products: tuple[OptimizerProduct, ...] = ()
    moves: tuple[OptimizerMove, ...] = ()


class StateArray(NamedTuple):
    """An array that an optimizer keeps: the dimensions of the parameter that it has, and bytes of a number."""

    dimensions: tuple[int, ...]
    itemsize: int


class OptimizerCost(NamedTuple):
    """The cost of an update of one parameter, except for reading and writing the parameter.

    `state`: the arrays that are kept with its dimensions. `whole_bytes`: of other arrays, which every device keeps
    whole.
    """

    state: tuple[StateArray, ...]
    whole_bytes: int
    products: tuple[OptimizerProduct, ...]
    moves: tuple[OptimizerMove, ...]
