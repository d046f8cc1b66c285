"""The draw of tokens from logits, which follows each step of an engine (`jaxlm.inference.ragged_step.draw`)."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.costs import local_shapes
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.workload import Workload
from jaxlm.inference.ragged_step import DrawRows, SlotState, draw
from jaxlm.inference.requests import GREEDY, MAX_LOGPROBS, Sampling
from jaxlm.inference.sampling import row_sampling

# XLA holds this many arrays of the logits' size at once. The branch with filters needs most, and all branches share its
# memory.
_ARRAYS = {"tpu": 3, "gpu": 5, "cpu": 5}


class DrawWork(NamedTuple):
    """The FLOPs of a draw on one device, none of them of products, and the bytes that it moves if nothing is fused."""

    flops: int
    bytes: int


def draws(work: Workload) -> list[tuple[int, DrawWork]]:
    """Return how often the draws of an engine's steps run, with their work on one device.

    A draw after which a sequence has a new token samples at temperature 1 without filters, the default of every
    command. The other draws, after steps in which no prompt ends, are of padding, which takes the likeliest token.
    """
    steps, rows, vocabulary = work.engine_steps, work.draws(), work.model.vocab_size
    each = ((steps.drawing, Sampling()), (steps.times - steps.drawing, GREEDY))
    return [(times, draw_work(rows, vocabulary, how, work.platform)) for times, how in each if times]


def draw_work(rows: int, vocabulary: int, how: Sampling, platform: str) -> DrawWork:
    """Return the work of drawing a token for each of these rows, all of which sample alike, without biases."""
    # The fixed work is the same for 2 and 3 rows, so that two traces give any number of rows.
    two, three = (_traced(n, vocabulary, how, platform) for n in (2, 3))
    return DrawWork(*(x + (rows - 2) * (y - x) for x, y in zip(two, three, strict=True)))


@functools.lru_cache(maxsize=256)
def _traced(rows: int, vocabulary: int, how: Sampling, platform: str) -> DrawWork:
    state = SlotState.empty(rows + 1, vocabulary)._replace(how=row_sampling([how] * (rows + 1), 0))
    logits = jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32)
    valid = jax.ShapeDtypeStruct((vocabulary,), jnp.bool)
    ids = np.arange(rows, dtype=np.int32)
    cost = count(draw, state, logits, DrawRows(ids, 0 * ids, 0 * ids, ids), valid, platform=platform)
    return DrawWork(cost.flops, cost.bytes_in + cost.bytes_out)


def logits_bytes(work: Workload) -> tuple[int, int]:
    """Return the bytes of float32 logits that a step gives on one device, and those of the gathered logits that a draw
    reads there."""
    here = local_shapes.local_shape(work, ("draws", "act_vocab"), (1, work.model.vocab_size))
    return 4 * math.prod(here), 4 * work.draws() * work.model.vocab_size


def drawn_bytes(work: Workload) -> int:
    """Return the bytes of the drawn tokens and log-probabilities of all shards, which each device gets."""
    likeliest = min(MAX_LOGPROBS, work.model.vocab_size)
    # Ids and log-probabilities, and whether drafts are accepted.
    return work.batch_shards * work.draws() * (2 * 4 * (1 + likeliest) + 1)


def slots_bytes(work: Workload) -> int:
    """Return the bytes of the state of an engine's slots on one device, with that of the slot for padding."""
    history = work.sequence if work.drafts and work.draft_model is None else 0
    return (work.slots + 1) * _slot_bytes(work.model.vocab_size, work.drafts, history)


@functools.cache
def _slot_bytes(vocabulary: int, drafts: int, history: int) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(SlotState.empty(1, vocabulary, drafts, history)))


def workspace(work: Workload) -> int:
    """Return the bytes of a draw's temporaries on one device."""
    here, whole = logits_bytes(work)
    return whole * (_ARRAYS[work.platform] + (work.platform != "tpu" and here < whole))
