"""The shapes of steps, and the chunks in which prompts are read, held against the scheduler."""

import pytest

from jaxlm.inference.pages import PageGroup, Pages
from jaxlm.inference.requests import Request
from jaxlm.inference.scheduler import Scheduler
from jaxlm.inference.step_shapes import TILE, StepShapes, fitting, prompt_chunks


@pytest.mark.parametrize("prompts, tokens, tiles", [(1, 1, 2), (3, 32, 4), (3, 100, 4), (2, 257, 2), (5, 70, 16)])
def test_prompts_are_cut_as_the_scheduler_cuts_them(prompts, tokens, tiles):
    pages = Pages([PageGroup(1 + prompts * (1 - -tokens // TILE))], TILE)
    limits = {"max_queued": prompts, "max_queued_tokens": prompts * tokens, "max_context": tokens}
    scheduler = Scheduler([pages], slots=prompts, chunk_tokens=tiles * TILE, tile=TILE, **limits)
    for prompt in range(prompts):
        scheduler.submit(Request([prompt] * tokens, 1))
    planned = []
    while (plan := scheduler.plan()) is not None:
        planned.append([range(chunk.start, chunk.stop) for chunk in plan.chunks])
        scheduler.commit(plan, {generation.id: [0] for generation in plan.draws})
    assert list(prompt_chunks(prompts, tokens, tiles)) == planned


def test_the_smallest_shape_takes_a_step():
    of_engine = StepShapes(slots=64, chunk_tokens=512, fewest=2)
    shapes = of_engine.all(scores=True)
    assert [shape._replace(scores=False) for shape in shapes] == of_engine.all()
    assert fitting(shapes, 1, 0)[:2] == (2, 0)
    assert fitting(shapes, 1, 512)[:2] == (8, 16)
    assert fitting(shapes, 9, 33)[:2] == (64, 2)
    assert fitting(shapes, 1, 1, scores=True) == (8, 16, TILE, True)
