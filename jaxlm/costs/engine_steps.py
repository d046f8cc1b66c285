"""The engine's steps of a workload of inference: their shapes, and the pages that their rows read."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxlm.inference.step_shapes import TILE, StepShape, StepShapes, fitting, prompt_chunks
from jaxlm.models.doors.cost import UnpaddedReads
from kernels_pallas.paged_attention.costs import SectionReads, block_trips

Window = int | None  # tokens that a token reads, itself the last; None: all
Trips = tuple[tuple[Window, int], ...]


class EngineSteps(NamedTuple):
    """Steps of one shape on one shard of the engine.

    Attributes:
      times: the number of steps.
      drawing: how many of them give a sequence its next token; the others end no prompt, and draw for padding alone.
      sections: rows that decode and tiles of prompts, with the pages that all these steps together read, on the device
        with the most of both. In steps that read prompts, all rows that decode are padding, and their loop over pages
        has zero trips.
    """

    shape: StepShape
    times: int
    drawing: int
    sections: tuple[SectionReads | UnpaddedReads, ...]


@functools.lru_cache(maxsize=1024)
def decode_steps(shapes: StepShapes, length: int, page: int, windows: tuple[Window, ...]) -> tuple[EngineSteps, ...]:
    """Return the step in which every slot reads the last of its `length` tokens."""
    shape = fitting(shapes.all(), shapes.slots, 0)
    token = range(length - 1, length)
    pages = tuple((window, _pages(token, page, window)) for window in windows)
    decode = SectionReads(shape.decode, 1, pages, _table(length, page), padding=shape.decode - shapes.slots)
    return (EngineSteps(shape, 1, 1, (decode,)),)


@functools.lru_cache(maxsize=1024)
def prefill_steps(shapes: StepShapes, prompt: int, page: int, windows: tuple[Window, ...]) -> tuple[EngineSteps, ...]:
    """Return the steps that read a prompt of this many tokens in every slot and draw the token after each prompt.

    Steps of one shape are one entry; entries are in the order in which their shapes are last run.
    """
    by_shape: dict[StepShape, EngineSteps] = {}
    for chunks in _chunks(shapes, prompt):
        step = _prefill_step(shapes, prompt, page, windows, chunks)
        before = by_shape.pop(step.shape, None)
        by_shape[step.shape] = step if before is None else _sum(before, step)
    return tuple(by_shape.values())


@functools.lru_cache(maxsize=1024)
def mixed_steps(
    shapes: StepShapes, prompt: int, length: int, page: int, windows: tuple[Window, ...]
) -> tuple[EngineSteps, ...]:
    """Return the steps that read one prompt, in each of which every slot also reads the last of its `length` tokens.

    Entries are those of `prefill_steps`.
    """
    token = range(length - 1, length)
    pages = tuple((window, _pages(token, page, window)) for window in windows)
    one = replace(shapes, slots=1, drafts=0)
    by_shape: dict[StepShape, EngineSteps] = {}
    for chunks in _chunks(one, prompt):
        alone = _prefill_step(one, prompt, page, windows, chunks)
        shape = fitting(shapes.all(), shapes.slots, alone.shape.tiles * alone.shape.tile)
        decode = SectionReads(shape.decode, 1, pages, _table(length, page), padding=shape.decode - shapes.slots)
        tiles = alone.sections[1]
        more = shape.on_device(shapes.parts).tiles - tiles.sequences
        tiles = tiles._replace(sequences=tiles.sequences + more, padding=tiles.padding + TILE * more)
        step = EngineSteps(shape, 1, 1, (decode, tiles))
        before = by_shape.pop(shape, None)
        by_shape[shape] = step if before is None else _sum(before, step)
    return tuple(by_shape.values())


def proposal_steps(steps: EngineSteps, slots: int) -> EngineSteps:
    """Return the steps in which a draft model draws one draft after each of `steps`: one row of each slot, which reads
    what a row that decodes does."""
    rows = steps.sections[0]._replace(sequences=slots, padding=0)
    return EngineSteps(StepShape(slots, 0, TILE), steps.times, steps.times, (rows,))


@functools.lru_cache(maxsize=1024)
def largest_step(kind: str, shapes: StepShapes, tokens: int, page: int, windows: tuple[Window, ...]) -> EngineSteps:
    """Return the last of the steps with the most rows, among the steps that decode or those that read prompts."""
    if kind == "decode":
        return decode_steps(shapes, tokens, page, windows)[-1]
    steps = (_prefill_step(shapes, tokens, page, windows, chunks) for chunks in _chunks(shapes, tokens))
    return functools.reduce(lambda first, second: second if second.shape.rows >= first.shape.rows else first, steps)


def _chunks(shapes: StepShapes, prompt: int) -> Iterator[list[range]]:
    """Yield for each step the chunks of prompts that the step reads."""
    return prompt_chunks(shapes.slots, prompt, shapes.tiles[-1])


def _prefill_step(
    shapes: StepShapes, prompt: int, page: int, windows: tuple[Window, ...], chunks: list[range]
) -> EngineSteps:
    """Return the step that reads these chunks of prompts."""
    tiles = [tile for chunk in chunks for tile in _tiles(chunk)]
    ended = sum(chunk.stop == prompt for chunk in chunks)
    shape = fitting(shapes.all(), ended, TILE * len(tiles))
    by_window = [(window, [_pages(tile, page, window) for tile in tiles]) for window in windows]
    pages = tuple((window, max(each)) for window, each in by_window)
    # A device of several has every so many-th tile, the first device as many as any.
    parts, count = shapes.parts, shape.on_device(shapes.parts).tiles
    loops = tuple(
        (window, max(block_trips(each[part::parts], count, TILE) for part in range(parts)))
        for window, each in by_window
    )
    no_pages = tuple((window, 0) for window in windows)  # every row of the decode section is padding
    table = _table(prompt, page)
    tokens = sum(map(len, tiles[::parts]))
    decode = SectionReads(shape.decode, 1, no_pages, table, padding=shape.decode)
    prompts = SectionReads(count, TILE, pages, table, padding=TILE * count - tokens, loops=loops)
    return EngineSteps(shape, 1, int(ended > 0), (decode, prompts))


def _sum(first: EngineSteps, second: EngineSteps) -> EngineSteps:
    """Return the steps of two entries with one shape as one entry."""
    sections = (
        a._replace(
            pages=_added(a.pages, b.pages),
            loops=a.loops and b.loops and _added(a.loops, b.loops),
            steps=a.steps + b.steps,
            padding=a.padding + b.padding,
        )
        for a, b in zip(first.sections, second.sections, strict=True)
    )
    return EngineSteps(first.shape, first.times + second.times, first.drawing + second.drawing, tuple(sections))


def _added(first: Trips, second: Trips) -> Trips:
    return tuple((window, m + n) for (window, m), (_, n) in zip(first, second, strict=True))


def _tiles(chunk: range) -> Iterator[range]:
    """Yield the tiles of a chunk, whose start is a multiple of TILE."""
    return (chunk[first : first + TILE] for first in range(0, len(chunk), TILE))


def _table(tokens: int, page: int) -> int:
    """Return the pages of the table of a sequence that comes to this many tokens."""
    return -(-tokens // page)


def _pages(rows: range, page: int, window: Window) -> int:
    """Return the number of pages that the rows at these positions of a sequence read."""
    first = 0 if window is None else max(rows.start + 1 - window, 0)
    return -(-rows.stop // page) - first // page
