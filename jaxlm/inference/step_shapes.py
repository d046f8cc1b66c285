"""The shapes of the engine's steps: the numbers of rows that its programs are compiled for. Imports no JAX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TILE = 32  # rows of a prompt that read their keys together
FEWEST = 2  # rows of the smallest program: one row goes to another kernel than several
_FEW = 8  # rows that decode in a smaller program than that of all


class StepShape(NamedTuple):
    """The rows of a step, which a program is compiled for: `decode` rows of sequences that decode, and `tiles` runs of
    `tile` rows of prompts. The program gives the logits of as many draws as rows may decode. `scores`: whether the
    program also gives the log-probabilities of the tokens after the prompts' rows."""

    decode: int
    tiles: int
    tile: int
    scores: bool = False

    @property
    def rows(self) -> int:
        """The rows in all."""
        return self.decode + self.tiles * self.tile

    @property
    def runs(self) -> int:
        """The runs of rows of one sequence."""
        return self.decode + self.tiles


@dataclass(frozen=True)
class StepShapes:
    """The shapes that an engine has programs for.

    Attributes:
      slots: the most sequences that decode.
      chunk_tokens: the most rows of prompts in a step, rounded up to whole tiles.
      fewest: the rows of the smallest program.
      drafts: the most drafts of a sequence, each a row.
    """

    slots: int
    chunk_tokens: int
    fewest: int
    drafts: int = 0

    @property
    def decode(self) -> list[int]:
        """The numbers of decoding rows that there are programs for."""
        most = max(self.fewest, self.slots * (1 + self.drafts))
        return [*(n for n in sorted({self.fewest, _FEW, self.slots}) if self.fewest <= n < most), most]

    @property
    def tiles(self) -> list[int]:
        """The numbers of tiles of prompts that there are programs for."""
        most = max(-(-self.chunk_tokens // TILE), 1)
        return sorted({0, min(2, most), most})

    def all(self, scores: bool = False) -> list[StepShape]:
        """Return the shapes that there are programs for; with `scores` also the shapes whose programs give scores."""
        fewest, *more = self.decode
        shapes = [StepShape(fewest, tiles, TILE) for tiles in (self.tiles[:-1] if more else self.tiles)]
        shapes += [StepShape(decode, tiles, TILE) for decode in more for tiles in self.tiles]
        scored = [shape._replace(scores=True) for shape in shapes if shape.tiles == self.tiles[-1]]
        return [*shapes, *(scored if scores else [])]


def fitting(shapes: Sequence[StepShape], draws: int, rows: int, scores: bool = False) -> StepShape:
    """Return the smallest of some shapes that takes these draws and rows of prompts, in whole tiles."""
    return next(
        shape
        for shape in shapes
        if shape.scores == scores and shape.decode >= draws and shape.tiles * shape.tile >= rows
    )


def prompt_chunks(prompts: int, tokens: int, tiles: int) -> Iterator[list[range]]:
    """Yield, for each step of an engine that reads equal numbers of tokens of some prompts and decodes nothing else,
    the tokens of each chunk, as `Scheduler.plan` cuts them for this many tiles."""
    left, step = tiles, []
    for _ in range(prompts):
        start = 0
        while start < tokens:
            stop = min(start + left * TILE, tokens)
            step.append(range(start, stop))
            left -= -(-(stop - start) // TILE)
            start = stop
            if not left:
                yield step
                left, step = tiles, []
    if step:
        yield step
