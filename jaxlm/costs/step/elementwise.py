"""Elementwise work around the products of a step, as XLA compiles it: norms, softmax, activations, the loss. Each is a
chain of elementwise operations, and at the upper end of the bracket a loop of its own through memory."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.paper import Use
from jaxlm.costs.step import kernel_costs
from jaxlm.costs.step.scopes import (
    ACTIVATION,
    HEADS,
    LOSS,
    NORMS,
    POSITIONS,
    RESIDUAL,
    SOFTMAX,
    Elementwise,
)
from jaxlm.costs.workload import Workload
from jaxlm.models.config import Activation
from jaxlm.models.operations import WHOLE
from kernels_pallas import gated_activation
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.core.slopes import activation


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
_NORMS = {"rms_norm": (Loop(5.3, 0, 3), Loop(9.5, 0, 6)), "layer_norm": (Loop(8.1, 0, 3), Loop(13.4, 0, 6))}
_RESIDUAL = Loop(1, 0, 3), Loop(1, 0, 3)
_DROPOUT = Loop(5, 0, 2), Loop(1, 0, 2)
_LOSS = Loop(5, 2, 0), Loop(2, 2, 0)
_SOFT_CAP = Loop(3, 1, 0), Loop(5, 1, 0)  # within the loop of what it caps, which keeps the slope
_MOVED = Loop(0, 0, 2), Loop(0, 0, 2)
_BESIDE = Loop(0, 0, 2), Loop(0, 0, 2)  # their FLOPs are in those of the softmax and the activation
_LOOKUP = Loop(0, 0, 2), Loop(1, 0, 3)
_SCALED = Loop(1, 0, 2), Loop(1, 0, 2)


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


def parts(work: Workload, use: Use) -> Iterator[Elementwise]:
    """Yield the elementwise work of an operation: its kernel, or else the loops that XLA makes of it."""
    kernels = list(kernel_costs.elementwise(work, use))
    yield from kernels or loops(work, use)


def loops(work: Workload, use: Use) -> Iterator[Elementwise]:
    """Yield the loops of an operation without a kernel. XLA fuses the last norm, and what is done once to positions,
    into what reads it."""

    def each(scope: str, numbers: int, directions: tuple[Loop, Loop]) -> Elementwise:
        return Elementwise(scope, use.times, *(loop.over(numbers, work.itemsize) for loop in directions))

    axes, layered = use.marker.operands, use.loop is not None
    numbers = math.prod(work.shape(axes[0], use.shapes[0]))
    match use.name:
        case "look_up" if "vocab" in axes[0]:
            yield each("embedding/lookup", math.prod(work.shape(WHOLE, (*use.shapes[1], use.shapes[0][1]))), _LOOKUP)
        case "scale":
            yield each("embedding/scale", numbers, _SCALED)
        case "dropout":
            yield each("layers/dropout" if layered else "embedding/dropout", numbers, _DROPOUT)
        case "linear" if len(axes) == 3:
            added = math.prod(work.shape((*axes[0][:2], *axes[2]), (*use.shapes[0][:2], *use.shapes[2])))
            yield each(f"{use.scope}_bias", added, _BESIDE)
        case "rms_norm" | "layer_norm" if axes[0][-1] == "act_head_dim":
            yield each(POSITIONS, numbers, _BESIDE)
        case "rms_norm" | "layer_norm" if layered:
            yield each(NORMS, numbers, _NORMS[use.name])
            if len(use.marker.results) == 2:
                yield each(RESIDUAL, numbers, _RESIDUAL)
        case "add" if layered:
            yield each("layers/feed_forward/residual", numbers, _RESIDUAL)
        case "rope":
            yield each(POSITIONS, numbers, _BESIDE)
        case "attention" if kernel_costs.attention(work, use.shapes[1][1]) is None:
            keys = math.prod(work.shape(axes[1], use.shapes[1]))
            scores = work.rows() * work.scores(use.shapes[1][1]) * work.local("act_heads", use.shapes[0][2])
            yield each(SOFTMAX, scores, _SOFTMAX)
            if use.options["soft_cap"]:
                yield each(SOFTMAX, scores, _SOFT_CAP)
            yield each(HEADS, 2 * (numbers + keys), _MOVED)  # heads move in front of the sequence and back
        case "activation" | "gated_activation":
            yield each(ACTIVATION, numbers, _activation(use.options["name"], use.name == "gated_activation"))
        case "cross_entropy":
            logits = work.rows() * use.shapes[0][1] * work.local("act_vocab", work.model.vocab_size)
            yield each(LOSS, logits, _LOSS)
            if use.options["soft_cap"]:
                yield each(LOSS, logits, _SOFT_CAP)
