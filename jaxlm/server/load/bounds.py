"""Counted bounds of what a load measures: no server answers sooner on these chips."""

import math
from dataclasses import replace
from typing import NamedTuple

from jaxlm.config.experiment import Experiment
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.placement import layout_on
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload


class LoadBounds(NamedTuple):
    """The least seconds of each metric of a request, and the most output tokens a second, by the lower bound of
    `jaxlm plan`: each operation takes the longer of its compute and its least traffic.

    A first token needs the prompt's own reading; a later one a step of as many sequences as are under way, at half of
    what follows, or where drafts are read its share of that, as if all were right. Tokens a second: both for all
    requests, and nothing between them.
    """

    ttft: float
    tpot: float
    e2el: float
    output_throughput: float


def bounds(
    experiment: Experiment, target: Target, input_tokens: float, follow: float, concurrency: float
) -> LoadBounds:
    """Return the bounds for requests that read and then draw so many tokens, of which so many are under way on average.
    Raises InputError where the catalog lacks a figure of the chips."""
    layout = layout_on(experiment, target, "decode")

    def seconds(kind, batch: float, sequence: float) -> float:
        work = Workload.of(experiment, layout, kind)
        batch = math.ceil(max(batch, 1.0) / work.batch_shards) * work.batch_shards
        sequence = min(max(round(sequence), 1), experiment.model.context_length)
        least = step_time(replace(work, batch=batch, sequence=sequence).on(target.chip), target).lower_bound
        return least / (1 + work.drafts)

    first = seconds("prefill", 1, input_tokens)
    # Fewer than the mean is less work: what is rounded down stays a bound.
    together = max(math.floor(concurrency), 1)
    later = seconds("decode", together, input_tokens + follow / 2)
    return LoadBounds(first, later, first + (follow - 1) * later, follow / (first + follow * later / together))
