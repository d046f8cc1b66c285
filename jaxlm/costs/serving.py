"""Serving arithmetic: the critical batch of decoding, and the speedup of speculative decoding."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.counted.operations import Operation
from jaxlm.costs.draft_steps import draft_drawing, draft_reading
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload

_DOUBLINGS = 21


class TokenCost(NamedTuple):
    """The counted cost of a decoding step.

    Attributes:
      context: tokens of each sequence.
      flops: model FLOPs of one sequence.
      read_bytes: the least bytes of the step that all devices together read and write: all weights, and the keys and
        values of every sequence.
      bound_s: the lower bound of the step's time on these chips; None without chips.
    """

    context: int
    flops: int
    read_bytes: int
    bound_s: float | None


def token_cost(work: Workload, target: Target | None) -> TokenCost:
    """Return the cost of a decoding step, as `jaxlm plan` counts it."""
    if target is not None:
        work = work.on(target.chip)
    least = _least_bytes(operations.step(work)) * work.layout.size
    bound = None if target is None else step_time(work, target).lower_bound
    return TokenCost(work.sequence, round(flops(work).model / work.batch), round(least), bound)


def draft_model_bytes(work: Workload, rows: int) -> int:
    """Return the least bytes that the draft model of a decoding step reads and writes on one device beside a step of so
    many rows; 0 where there is none."""
    if work.draft_model is None:
        return 0
    read = operations.step(replace(draft_reading(work), batch=rows))
    drawn = work.drafts * _least_bytes(operations.step(draft_drawing(work)))
    return round(_least_bytes(op for op in read if op.kind != "draw") + drawn)


def _least_bytes(ops: Iterable[Operation]) -> float:
    return sum(op.times * op.least_bytes for op in ops)


def critical_batch(work: Workload, target: Target) -> int | None:
    """Return the smallest batch of the whole job at which a decoding step computes as long as it reads memory; it is a
    power of two times the devices that shard the batch.

    None if no batch up to a million does: every sequence has a cache of its own, whose bytes grow with the batch as
    FLOPs do (scaling-book, inference). Raises InputError for another workload.
    """
    if work.kind != "decode":
        raise InputError("only decoding has a batch at which it stops being bound by memory")
    parts = work.batch_shards
    for batch in (parts * 2**n for n in range(_DOUBLINGS)):
        seconds = step_time(replace(work.on(target.chip), batch=batch), target)
        if seconds.compute >= seconds.memory:
            return batch
    return None


def speculative_speedup(acceptance: float, guesses: int, cost_ratio: float) -> float:
    """Return the speedup of speculative decoding, in which a draft model guesses tokens that the model then verifies in
    one step (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8).

    Args:
      acceptance: probability that a guess is accepted, in [0, 1].
      guesses: tokens guessed before each verification, at least 1.
      cost_ratio: time of a step of the draft model over the time of a step of the model.

    Raises InputError for values outside these ranges.
    """
    if not 0.0 <= acceptance <= 1.0 or guesses < 1 or cost_ratio < 0.0:
        raise InputError("acceptance lies in [0, 1], guesses are at least 1 and the cost ratio is not negative")
    expected = guesses + 1.0 if acceptance == 1.0 else (1.0 - acceptance ** (guesses + 1)) / (1.0 - acceptance)
    return expected / (guesses * cost_ratio + 1.0)
