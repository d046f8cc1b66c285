"""A collective of a step."""

from typing import Literal, NamedTuple


class Collective(NamedTuple):
    """A collective that a step runs `times` times over mesh axes, on average.

    `bytes`: the whole array on one device, which is the result of an all-gather and the operand of a reduce-scatter or
    an all-reduce. `of`: the kind of array, such as "residual" or "gradients", or the path of a table. `behind`: the
    pass whose computation does not depend on it, so that it may run meanwhile; None if all that follows waits for it.
    `waits`: the runs among `times`, or parts of runs, that nothing is left to run behind: the first of a pass, or the
    last.
    `narrow_gradients`: it sums gradients of parameters in the dtype of the computation.
    """

    kind: str
    axes: tuple[str, ...]
    times: float
    bytes: int
    of: str
    behind: Literal["forward", "backward"] | None = None
    waits: float = 0
    narrow_gradients: bool = False
