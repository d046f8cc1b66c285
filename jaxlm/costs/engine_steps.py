"""The steps of the engine that a workload of inference runs: the shape of each, and the pages that its rows read."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from jaxlm.inference.step_shapes import TILE, StepShape, StepShapes, fitting, prompt_chunks
from jaxlm.models.doors.cost import WholeTexts
from kernels_pallas.paged_attention.costs import PagedRuns

Window = int | None  # the last tokens that a token reads; None: all


class EngineSteps(NamedTuple):
    """Steps of one shape on one shard of the engine.

    Attributes:
      times: of them.
      runs: of rows that decode and of tiles of prompts, with the pages of all these steps together.
    """

    shape: StepShape
    times: int
    runs: tuple[PagedRuns | WholeTexts, ...]


@functools.lru_cache(maxsize=1024)
def decode_steps(shapes: StepShapes, length: int, page: int, windows: tuple[Window, ...]) -> tuple[EngineSteps, ...]:
    """Return the step in which every slot reads the last of its `length` tokens."""
    shape = fitting(shapes.all(), shapes.slots, 0)
    token = range(length - 1, length)
    pages = tuple((window, _pages(token, page, window)) for window in windows)
    return (EngineSteps(shape, 1, (PagedRuns(shape.decode, 1, pages),)),)


@functools.lru_cache(maxsize=1024)
def prefill_steps(shapes: StepShapes, prompt: int, page: int, windows: tuple[Window, ...]) -> tuple[EngineSteps, ...]:
    """Return the steps that read a prompt of this many tokens in every slot and draw the token after it, those of one
    shape together, in the order in which a shape is last run."""
    together: dict[StepShape, EngineSteps] = {}
    for chunks in _chunks(shapes, prompt):
        step = _prefill_step(shapes, prompt, page, windows, chunks)
        before = together.pop(step.shape, None)
        together[step.shape] = step if before is None else _sum(before, step)
    return tuple(together.values())


@functools.lru_cache(maxsize=1024)
def largest_step(kind: str, shapes: StepShapes, tokens: int, page: int, windows: tuple[Window, ...]) -> EngineSteps:
    """Return one step, of decoding or of reading prompts: the last one of those with the most rows."""
    if kind == "decode":
        return decode_steps(shapes, tokens, page, windows)[-1]
    steps = (_prefill_step(shapes, tokens, page, windows, chunks) for chunks in _chunks(shapes, tokens))
    return functools.reduce(lambda first, second: second if second.shape.rows >= first.shape.rows else first, steps)


def _chunks(shapes: StepShapes, prompt: int) -> Iterator[list[range]]:
    """Yield the chunks of prompts that each step reads."""
    return prompt_chunks(shapes.slots, prompt, shapes.tiles[-1])


def _prefill_step(
    shapes: StepShapes, prompt: int, page: int, windows: tuple[Window, ...], chunks: list[range]
) -> EngineSteps:
    tiles = [tile for chunk in chunks for tile in _tiles(chunk)]
    shape = fitting(shapes.all(), sum(chunk.stop == prompt for chunk in chunks), TILE * len(tiles))
    pages = tuple((window, max(_pages(tile, page, window) for tile in tiles)) for window in windows)
    idle = tuple((window, 0) for window in windows)
    return EngineSteps(shape, 1, (PagedRuns(shape.decode, 1, idle), PagedRuns(shape.tiles, TILE, pages)))


def _sum(first: EngineSteps, second: EngineSteps) -> EngineSteps:
    """Return steps of one shape together."""
    runs = (
        a._replace(pages=tuple((window, m + n) for (window, m), (_, n) in zip(a.pages, b.pages, strict=True)))
        for a, b in zip(first.runs, second.runs, strict=True)
    )
    return EngineSteps(first.shape, first.times + second.times, tuple(runs))


def _tiles(chunk: range) -> Iterator[range]:
    """Yield the tiles of a chunk, which begins at a multiple of their rows."""
    return (chunk[first : first + TILE] for first in range(0, len(chunk), TILE))


def _pages(rows: range, page: int, window: Window) -> int:
    """Return the pages that a run of rows reads, which stand at these positions."""
    first = 0 if window is None else max(rows.start + 1 - window, 0)
    return -(-rows.stop // page) - first // page
