"""The texts and steps of an engine's check of itself: each text at several rows, alone and among others."""

import itertools

import pytest

from jaxlm.inference.check_steps import check_steps, check_texts
from jaxlm.inference.step_shapes import TILE, StepShapes

SIZES = {"most": 8, "context": 160, "size": 32, "pages": 9}


@pytest.mark.parametrize(
    "sizes, lengths",
    [({}, [35, 2, 20]), ({"pages": 4}, [35, 2]), ({"context": 32}, [2, 20]), ({"most": 1}, [35]), ({"context": 1}, [])],
)
def test_texts_have_pages_of_their_own_as_far_as_there_are_any(sizes, lengths):
    sizes = {**SIZES, **sizes}
    texts = check_texts(64, **sizes, adapters=2)
    assert [len(text.tokens) for text in texts] == lengths
    pages = [*itertools.chain.from_iterable(text.pages for text in texts)]
    assert pages == [*range(1, len(pages) + 1)] and len(pages) < sizes["pages"]
    assert all(len(text.pages) * sizes["size"] >= len(text.tokens) for text in texts)
    assert [text.adapter for text in texts] == [2, 1, 0][: len(texts)]


@pytest.mark.parametrize("carries_states", [False, True])
@pytest.mark.parametrize("slots, chunk_tokens, fewest", [(8, 64, 2), (64, 512, 2), (8, 32, 2), (3, 64, 1), (1, 32, 1)])
def test_each_shape_reads_the_first_text_alone_and_among_others(slots, chunk_tokens, fewest, carries_states):
    """In the order of its tokens; one token by itself after all before it."""
    shapes = StepShapes(slots, chunk_tokens, fewest).all()
    lengths = [TILE + 3, 2, 20][:slots]
    steps = check_steps(shapes, lengths, carries_states=carries_states)
    read, beside = [0] * len(lengths), {shape: [] for shape in shapes}
    for shape, runs in steps:
        assert len({run.run for run in runs}) == len(runs)
        for run in runs:
            assert (run.run < shape.decode) == (len(run.part) == 1 == lengths[run.text] - run.part.start)
            assert run.run < shape.runs and (run.run < shape.decode or run.part.start % TILE == 0)
            before = {run.part.start} if carries_states else {run.part.start, lengths[run.text]}
            assert not run.part.start or read[run.text] in before
            read[run.text] = run.part.stop
        if any(run.text == 0 and run.part.stop == lengths[0] for run in runs):
            beside[shape].append((runs[0].run < shape.decode, len({run.text for run in runs}) > 1))
    for shape, found in beside.items():
        kinds = {True, len(lengths) > shape.decode} if shape.decode > 1 and slots > 1 else {False}
        assert {is_among for is_decode, is_among in found if is_decode} == kinds
        assert not shape.tiles or (False, False) in found
        assert shape.tiles < 2 or slots == 1 or (False, True) in found
        last = {run.text for step in steps if step.shape == shape for run in step.runs if run.run < shape.decode}
        assert last == {*range(len(lengths) if shape.decode > 1 else 1)}
    assert check_steps(shapes, [], carries_states=carries_states) == []
