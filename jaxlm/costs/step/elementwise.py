"""Elementwise work around the products of a step, as XLA compiles it: norms, softmax, activations, the loss. Each is a
chain of elementwise operations, and at the upper end of the bracket a loop of its own through memory."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.step.parameters import parameters
from jaxlm.costs.workload import Workload
from jaxlm.models.config import Activation, ModelConfig
from kernels_pallas import gated_activation
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.slopes import activation

# Scopes of a step's operations element by element, of which kernels take the place of some.
SOFTMAX, HEADS = "layers/attention/softmax", "layers/attention/heads"
NORMS, POSITIONS, RESIDUAL = "layers/norms", "layers/attention/positions", "layers/attention/residual"
ACTIVATION, LOSS = "layers/feed_forward/activation", "loss"
LAST_NORM = "layers/feed_forward_post_norm"  # where it is a kernel


class Elementwise(NamedTuple):
    """Elementwise work that a step does `times` times. A kernel is not fused into a neighbour; if the result that it
    `makes` is saved under that name, rematerialisation skips its forward pass."""

    scope: str
    times: int
    forward: KernelCost
    backward: KernelCost
    kernel: bool = False
    makes: str = ""


class Loop(NamedTuple):
    """The cost of a loop per number of an array: FLOPs, and reads and writes in `float32` and in the compute dtype
    (`narrow`)."""

    flops: float
    float32: float
    narrow: float

    def over(self, numbers: int, itemsize: int) -> KernelCost:
        """Return the cost over `numbers` numbers, in a compute dtype of `itemsize` bytes."""
        moved = numbers * (4 * self.float32 + itemsize * self.narrow)
        return KernelCost(flops=round(numbers * self.flops), bytes=round(moved))


# Forward and backward. FLOPs are what jaxlm.costs.jaxpr.count finds in this project's configurations, to a fifth; those
# of activations it is asked for (`_activation`).
_SOFTMAX = Loop(5.5, 3, 1), Loop(4, 4, 2)
_NORMS = {"rms": (Loop(5.3, 0, 3), Loop(9.5, 0, 6)), "layer": (Loop(8.1, 0, 3), Loop(13.4, 0, 6))}
_RESIDUAL = Loop(1, 0, 3), Loop(1, 0, 3)
_DROPOUT = Loop(5, 0, 2), Loop(1, 0, 2)
_LOSS = Loop(5, 2, 0), Loop(2, 2, 0)
_SOFT_CAP = Loop(3, 1, 0), Loop(5, 1, 0)  # within the loop of what it caps, which keeps the slope
_MOVED = Loop(0, 0, 2), Loop(0, 0, 2)
_BESIDE = Loop(0, 0, 2), Loop(0, 0, 2)  # their FLOPs are in those of the softmax and the activation
_LOOKUP = Loop(0, 0, 2), Loop(1, 0, 3)
_SCALED = Loop(1, 0, 2), Loop(1, 0, 2)


def norms_per_layer(model: ModelConfig) -> int:
    """Return the number of norms of the residual stream in a layer."""
    return 4 if model.post_norms else 2


@functools.cache
def _activation(name: Activation, gated: bool) -> tuple[Loop, Loop]:
    """Return the forward and backward loops of an activation, with counted FLOPs; without a gate they include its
    bias."""

    one_operand = functools.partial(activation, name)
    forward = functools.partial(gated_activation, activation=name, implementation="xla") if gated else one_operand

    def both(*x: jax.Array) -> tuple:
        y, pull_back = jax.vjp(forward, *x)
        return y, pull_back(y)

    one = (jax.ShapeDtypeStruct((1,), jnp.float32),) * (1 + gated)
    once, all_in_all, bias = count(forward, *one).flops, count(both, *one).flops, not gated
    return Loop(once + bias, 0, 2 + gated), Loop(all_in_all - once + bias, 0, 4 + gated)


def loops(work: Workload) -> Iterator[Elementwise]:
    """Yield the elementwise work of a step, as if there were no kernels."""

    def each(scope: str, times: int, numbers: int, directions: tuple[Loop, Loop]) -> Elementwise:
        return Elementwise(scope, times, *(loop.over(numbers, work.itemsize) for loop in directions))

    model, attention, rows, queries = work.model, work.model.attention, work.rows(), work.queries
    tokens, L, H = rows * queries, model.num_layers, attention.head_dim
    stream = rows * work.local("residual", queries) * model.d_model
    N, K = work.local("act_heads", attention.num_heads), work.local("act_kv_heads", attention.num_kv_heads)
    scores = rows * work.scores() * N
    yield each(SOFTMAX, L, scores, _SOFTMAX)
    if attention.soft_cap:
        yield each(SOFTMAX, L, scores, _SOFT_CAP)
    yield each(NORMS, norms_per_layer(model) * L, stream, _NORMS[model.norm.kind])
    for path, d in parameters(model).items():
        if not d.inputs and path.endswith("_bias"):
            added = math.prod(work.local(d.axes[i], d.shape[i]) for i in d.outputs)
            yield each(path, L, tokens * added, _BESIDE)
    turned = (N + K) * H * ((model.position.kind == "rope") + attention.qk_norm)
    yield each(POSITIONS, L, tokens * turned, _BESIDE)
    # Heads move in front of the sequence and back.
    yield each(HEADS, L, 2 * rows * (queries * N + work.sequence * K) * H, _MOVED)
    yield each(RESIDUAL, L, stream, _RESIDUAL)
    yield each("layers/feed_forward/residual", L, stream, _RESIDUAL)
    hidden = tokens * work.local("act_feed_forward", model.feed_forward.d_ff)
    yield each(ACTIVATION, L, hidden, _activation(model.feed_forward.activation, model.feed_forward.gated))
    yield each("embedding/lookup", 1, tokens * model.d_model, _LOOKUP)
    if model.scale_embeddings:
        yield each("embedding/scale", 1, stream, _SCALED)
    if work.dropout:
        yield each("layers/dropout", 2 * L, stream, _DROPOUT)
        yield each("embedding/dropout", 1, stream, _DROPOUT)
    if work.kind == "train":
        logits = tokens * work.local("act_vocab", model.vocab_size)
        yield each(LOSS, 1, logits, _LOSS)
        if model.logit_soft_cap:
            yield each(LOSS, 1, logits, _SOFT_CAP)
