"""The steps of the model that draws the drafts of a decoding step."""

from dataclasses import replace

from jaxlm.costs.engine_steps import proposal_steps
from jaxlm.costs.workload import Workload


def draft_reading(work: Workload) -> Workload:
    """Return the step in which the draft model reads the rows of the engine's step. It draws nothing."""
    return _of_draft_model(work, work.without_drafts())


def draft_drawing(work: Workload) -> Workload:
    """Return the step in which the draft model draws a draft of each sequence: as many follow one another as there are
    drafts."""
    of_engine = work.engine_steps or draft_reading(work).largest_step().engine_steps
    steps = proposal_steps(of_engine, work.slots)
    return _of_draft_model(work, replace(work.without_drafts(), batch=work.batch, run=1, engine_steps=steps))


def _of_draft_model(work: Workload, rows: Workload) -> Workload:
    """Return the step of rows with the draft model in place of the model."""
    model, quantize, group = work.draft_model
    return replace(rows, model=model).with_execution(quantize=quantize, quantize_group=group)
