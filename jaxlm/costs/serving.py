"""Arithmetic of serving: when decoding stops waiting for memory, and what guessing ahead gives."""

from dataclasses import replace

from jaxlm.costs import operations
from jaxlm.costs.hardware import Target
from jaxlm.costs.workload import Workload
from jaxlm.errors import InputError


def critical_batch(work: Workload, target: Target, most: int = 2**20) -> int | None:
    """The smallest power of two of sequences at which a decoding step computes as long as it reads memory.

    None where no batch does: every sequence brings a cache of its own, whose bytes grow with the batch as FLOPs do
    (scaling-book, inference).
    """
    if work.kind != "decode":
        raise InputError("only decoding has a batch at which it stops being bound by memory")
    chip = target.chip
    batch = work.mesh.data * work.mesh.fsdp
    while batch <= most:
        ops = operations.step(replace(work, batch=batch))
        compute = sum(op.times * op.flops for op in ops) / chip.peak(work.dtype)
        memory = sum(op.times * op.least_bytes for op in ops) / chip.memory_bytes_per_s
        if compute >= memory:
            return batch
        batch *= 2
    return None


def speculative_speedup(acceptance: float, guesses: int, cost_ratio: float) -> float:
    """How many times faster decoding gets where a draft model guesses tokens that the model then checks at once
    (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8).

    Args:
      acceptance: probability that a guess is accepted, in [0, 1].
      guesses: tokens guessed before each check, at least 1.
      cost_ratio: time of a step of the draft over one of the model.
    """
    if not 0.0 <= acceptance <= 1.0 or guesses < 1 or cost_ratio < 0.0:
        raise InputError("acceptance lies in [0, 1], guesses are at least 1 and the cost ratio is not negative")
    expected = guesses + 1.0 if acceptance == 1.0 else (1.0 - acceptance ** (guesses + 1)) / (1.0 - acceptance)
    return expected / (guesses * cost_ratio + 1.0)
