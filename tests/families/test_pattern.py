"""Rearrangements of stored tensors, there and back."""

import re

import numpy as np
import pytest

from jaxlm.families.pattern import Pattern

SIZES = {"d": 10, "n": 6, "k": 2, "h": 4, "f": 7, "r": 3, "two": 2, "q": 5, "c": 9, "g": 3, "i": 8}
PATTERNS = [
    "(n h) d -> d n h",
    "d (n h) -> n h d",
    "f d -> d f",
    "(n h | k h | k h) d -> d n h ; d k h ; d k h",  # Phi-3
    "d (n h | n h | n h) -> d n h ; d n h ; d n h",  # GPT-2
    "(n (h | h | h)) d -> d n h ; d n h ; d n h",  # GPT-NeoX, head by head
    "(f | f) d -> d f ; d f",
    "(n (r two)) d -> d n (two r)",  # interleaved rotary pairs
    "(c | (r two)) d -> d c ; d (two r)",
    "(n (h | (r two))) q -> q n h ; q n (two r)",
    "(n h | k h | k h) -> n h ; k h ; k h",
    "(k (h | h | (g i) | (g i))) d -> d k h ; d k h ; d (k g) i ; d (k g) i",  # Qwen3-Next
    "(c | k h) 1 q -> q c ; q k h",  # convolutions
]


def arrays(pattern):
    """An array for each output, of distinct numbers."""
    shapes = []
    for output in pattern.outputs:
        groups = re.sub(r"\((\w+) (\w+)\)", r"\1*\2", output).split()
        shapes.append(tuple(int(np.prod([SIZES[axis] for axis in group.split("*")])) for group in groups))
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum(sizes)
    return [np.arange(end - n, end).reshape(shape) for end, n, shape in zip(ends, sizes, shapes, strict=True)]


@pytest.mark.parametrize("text", PATTERNS)
def test_both_directions_undo_one_another(text):
    pattern = Pattern(text)
    parts = arrays(pattern)
    stored = pattern.write(parts)
    assert stored.shape == pattern.stored_shape([part.shape for part in parts])
    assert sorted(stored.reshape(-1)) == list(range(sum(part.size for part in parts)))  # each number once
    for read, part in zip(pattern.read(stored, [part.shape for part in parts]), parts, strict=True):
        np.testing.assert_array_equal(read, part)
    np.testing.assert_array_equal(pattern.write(pattern.read(stored, [part.shape for part in parts])), stored)


def test_fused_matrices_lie_one_after_another():
    query, key, value = arrays(Pattern(PATTERNS[3]))
    stored = Pattern(PATTERNS[3]).write([query, key, value])
    np.testing.assert_array_equal(stored[:24], query.reshape(10, 24).T)
    np.testing.assert_array_equal(stored[24:32], key.reshape(10, 8).T)


def test_interleaved_pairs_become_halves():
    (read,) = Pattern("(n (r two)) -> n (two r)").read(np.arange(12), [(2, 6)])
    assert read.tolist() == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]


@pytest.mark.parametrize(
    ("text", "shapes"),
    [("(f | f) d -> d f", None), ("f d -> d f", [(3,)]), ("(n h | n h) -> n h ; n h", [(2, 3), (2, 4)])],
)
def test_a_pattern_that_does_not_fit_is_refused(text, shapes):
    with pytest.raises(ValueError):
        Pattern(text).sizes(shapes)


def test_sizes_that_shapes_leave_open_are_given():
    text = "(heads (g | g)) d -> d (heads g) ; d (heads g)"
    shapes = [(10, 6), (10, 6)]
    with pytest.raises(ValueError, match="does not go with 6"):
        Pattern(text).sizes(shapes)
    pattern = Pattern(text).with_sizes({"heads": 3, "other": 9})
    stored = np.arange(120).reshape(12, 10)  # of each head two rows of the first and two of the second
    first, second = pattern.read(stored, shapes)
    assert first[0].tolist() == [0, 10, 40, 50, 80, 90] and second[0].tolist() == [20, 30, 60, 70, 100, 110]
    np.testing.assert_array_equal(pattern.write([first, second]), stored)
