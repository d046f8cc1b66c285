"""The schedule of a pipeline: which microbatch a stage carries when. Imports no JAX.

Stages work in lockstep. In tick t stage s of S carries microbatch t − s forward, and microbatch t − 2 (S − 1) + s back:
the last stage goes back in the tick in which it has gone forward, and the others follow one by one (1F1B: Narayanan et
al. 2021, arXiv:2104.04473, section 2.2). So the first S − 1 ticks have forward passes alone, the last S − 1 backward
passes alone, and the M between them both.
"""

from typing import NamedTuple


class Ticks(NamedTuple):
    """The ticks of M microbatches on S stages.

    A stage does nothing useful in S − 1 of M + S − 1 forward passes, and in as many backward passes.
    """

    stages: int
    microbatches: int

    @property
    def alone(self) -> int:
        """The ticks with forward passes alone, and those with backward passes alone."""
        return self.stages - 1

    @property
    def passes(self) -> int:
        """The forward passes of each stage, idle ones among them; the backward passes are as many."""
        return self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the time of stages in which they are idle."""
        return (self.stages - 1) / self.passes

    @property
    def kept(self) -> int:
        """The inputs of a stage that are kept for backward passes, whatever the number of microbatches is."""
        return 2 * self.stages - 1

    def forward(self, stage: int, tick: int) -> int | None:
        """Return the microbatch that a stage carries forward in a tick, or None."""
        return self._index(tick - stage)

    def backward(self, stage: int, tick: int) -> int | None:
        """Return the microbatch that a stage carries back in a tick, or None."""
        return self._index(tick - 2 * (self.stages - 1) + stage)

    def _index(self, index: int) -> int | None:
        return index if 0 <= index < self.microbatches else None
