"""The steps by which an engine checks that its programs compute a text in one way. Imports no JAX."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.inference.step_shapes import TILE, StepShape

_LENGTHS = TILE + 3, 2, 20  # of two tiles, and of one


class CheckText(NamedTuple):
    """A text that is read. `tokens`: int [T]. `pages`: its pages of each group. `adapter`: from 1 on, 0 for none."""

    tokens: np.ndarray
    pages: range
    adapter: int


class CheckRun(NamedTuple):
    """A part of a text, by its index, that a run of a step reads: a row that decodes, or a tile."""

    run: int
    text: int
    part: range


class CheckStep(NamedTuple):
    """A step that reads parts of texts; its other rows are padding."""

    shape: StepShape
    runs: tuple[CheckRun, ...]


def check_texts(
    vocabulary: int, *, most: int, context: int, size: int, pages: int, adapters: int = 0
) -> list[CheckText]:
    """Return random texts of unequal lengths: the first with the last adapter, the next with the one before it.

    Args:
      most: the most texts.
      context: the most tokens of a text.
      size: tokens of a page.
      pages: those of each group, the first of which is for rows of padding. There are as many texts as fit.
    """
    draw, texts, first = np.random.default_rng(0), [], 1
    for length in _LENGTHS:
        end = first + -(-length // size)
        if len(texts) < most and length <= context and end <= pages:
            adapter = max(adapters - len(texts), 0)
            texts.append(CheckText(draw.integers(0, vocabulary, length), range(first, end), adapter))
            first = end
    return texts


def check_steps(shapes: Sequence[StepShape], lengths: Sequence[int], *, carries_states: bool) -> list[CheckStep]:
    """Return steps of each shape that read the first text alone and among the others, at other rows: as a prompt, and
    its last token by itself. Of the others each shape of two rows that decode, or more, reads as many as it can in two
    steps.

    Args:
      lengths: the tokens of each text.
      carries_states: whether a last token by itself goes on from the state before it, which is then read each time.
    """
    if not lengths:
        return []
    texts, steps = range(len(lengths)), []
    tiled = [shape for shape in shapes if shape.tiles]
    for shape in tiled:
        among = _prompts(shape, {text: lengths[text] for text in (*texts[1:2], 0, *texts[2:])})
        alone = _prompts(shape, {0: lengths[0]}, at_end=True)
        steps += among + alone * (alone != among)
    for shape in shapes:
        among = dict(zip(range(shape.decode), texts, strict=False))
        rest = dict(zip(range(shape.decode - 1), texts[shape.decode :], strict=False)) | {shape.decode - 1: 0}
        for rows in (among, rest)[: 1 + (rest != among)]:
            if carries_states:
                steps += _prompts(tiled[0], {text: lengths[text] - 1 for text in rows.values()})
            last = (CheckRun(row, text, range(lengths[text])[-1:]) for row, text in rows.items())
            steps.append(CheckStep(shape, tuple(last)))
    return steps


def _prompts(shape: StepShape, lengths: Mapping[int, int], *, at_end: bool = False) -> list[CheckStep]:
    """Return the steps that read so many tokens of texts, one text after the other, in the first tiles or the last."""
    parts = [(text, range(length)[at : at + TILE]) for text, length in lengths.items() for at in range(0, length, TILE)]
    steps = []
    for at in range(0, len(parts), shape.tiles):
        step = parts[at : at + shape.tiles]
        first = shape.runs - len(step) if at_end else shape.decode
        steps.append(CheckStep(shape, tuple(CheckRun(run, *part) for run, part in enumerate(step, first))))
    return steps
