"""The shapes of the engine's steps: the numbers of rows that its programs are compiled for. Imports no JAX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TILE = 32  # rows of a prompt that read their keys together
FEWEST = 2  # rows of the smallest program: one row goes to another kernel than several
_FEW = 8  # rows that decode in a smaller program than that of all

_MOST_STEPS = 8  # of a dispatch
_DISPATCH_SECONDS = 0.02  # that the steps of a dispatch may take, since what comes meanwhile waits for them


class _StepRates(NamedTuple):
    """The rates of a slow device of a platform: bytes per second, the rows that take no longer than one row to multiply
    by weights, and seconds for each row whatever the model."""

    bytes_per_s: float
    free_rows: int
    row_s: float


# Of a CPU as measured (2 cores with AVX-512); of GPUs and TPUs about the least published bandwidths of those served on.
_RATES = {
    "cpu": _StepRates(1e10, 8, 0.15e-3),
    "gpu": _StepRates(1e12, 256, 1e-6),
    "tpu": _StepRates(8e11, 256, 1e-6),
}


def steps_per_dispatch(weight_bytes: float, rows: int, platform: str) -> int:
    """Return how many steps of so many rows, which read so many bytes of weights on each device, one program runs where
    no request waits: a power of 2, as many as take 20 ms at most, and at most 8."""
    rates = _RATES[platform]
    seconds = weight_bytes / rates.bytes_per_s * max(1.0, rows / rates.free_rows) + rows * rates.row_s
    steps = 1
    while 2 * steps <= _MOST_STEPS and 2 * steps * seconds <= _DISPATCH_SECONDS:
        steps *= 2
    return steps


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

    def on_device(self, parts: int) -> "StepShape":
        """Return the rows that a device reads where so many devices share out the tiles."""
        return self._replace(tiles=self.tiles // parts)


@dataclass(frozen=True)
class StepShapes:
    """The shapes that an engine has programs for.

    Attributes:
      slots: the most sequences that decode.
      chunk_tokens: the most rows of prompts in a step on a device, rounded up to whole tiles.
      fewest: the rows of the smallest program.
      drafts: the most drafts of a sequence, each a row.
      parts: the devices of a shard that share out the tiles, of which each has as many.
    """

    slots: int
    chunk_tokens: int
    fewest: int
    drafts: int = 0
    parts: int = 1

    @property
    def decode(self) -> list[int]:
        """The numbers of decoding rows that there are programs for."""
        most = max(self.fewest, self.slots * (1 + self.drafts))
        return [*(n for n in sorted({self.fewest, _FEW, self.slots}) if self.fewest <= n < most), most]

    @property
    def tiles(self) -> list[int]:
        """The numbers of tiles of prompts that there are programs for."""
        most = max(-(-self.chunk_tokens // TILE), 1)
        return sorted({self.parts * n for n in (0, min(2, most), most)})

    def all(self, scores: bool = False) -> list[StepShape]:
        """Return the shapes that there are programs for; with `scores` those of the most tiles give scores."""
        fewest, *more = self.decode
        shapes = [StepShape(fewest, tiles, TILE) for tiles in (self.tiles[:-1] if more else self.tiles)]
        shapes += [StepShape(decode, tiles, TILE) for decode in more for tiles in self.tiles]
        return [shape._replace(scores=scores and shape.tiles == self.tiles[-1]) for shape in shapes]


def fitting(shapes: Sequence[StepShape], draws: int, rows: int, scores: bool = False) -> StepShape:
    """Return the smallest of some shapes that takes these draws and rows of prompts, in whole tiles; with `scores` of
    those that give scores."""
    return next(
        shape
        for shape in shapes
        if shape.scores >= scores and shape.decode >= draws and shape.tiles * shape.tile >= rows
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
