"""The programs that the host starts for a step."""

from jaxlm.costs import local_shapes
from jaxlm.costs.workload import Workload
from jaxlm.inference.step_shapes import steps_per_dispatch


def steps_together(work: Workload) -> int:
    """Return the steps of decoding that one program runs with their draws, as a warm engine does where no request
    waits; 1 for others, whose step and draw are two programs."""
    if work.kind != "decode" or work.drafts or not work.is_padded:
        return 1
    weights = sum(work.itemsize_of(d) * local_shapes.stored(work, d.axes, d.shape) for d in work.parameters.values())
    return work.steps_per_dispatch or steps_per_dispatch(weights, work.draws(), work.platform)


def engine_turns(work: Workload) -> float:
    """Return how often an engine chooses rows, dispatches them and hands out tokens, for one step of a workload of
    inference."""
    passes = sum(each.passes for each in work.without_drafts().by_step_shape())
    return passes / steps_together(work)


def dispatches(work: Workload) -> float:
    """Return the programs that are started one after the other for a step: one in training; in inference two for each
    turn of the engine, the step and its draw, or one where that runs several steps, and twice as many with a model that
    draws drafts."""
    if work.kind == "train":
        return 1
    together = 1 if steps_together(work) > 1 else 2
    return engine_turns(work) * together * (1 + (work.draft_model is not None))
