"""Elementwise work around the products of a step, as XLA compiles it: norms, softmax, activations, the loss. Each is a
chain of elementwise operations, and at the upper end of the bracket a loop of its own through memory."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.costs.counted import attention, kernel_costs
from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.kernel_costs import Elementwise
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.jaxpr.count import count
from jaxlm.models.config import Activation
from jaxlm.models.logical_axes import GATHERED
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
_NUMBER = Loop(1, 0, 1), Loop(1, 0, 1)  # between operations; several of them are one loop


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


def parts(device: DeviceStep, use: RecordedOp) -> Iterator[Elementwise]:
    """Yield the elementwise work of an operation: its kernel, or else the loops that XLA makes of it."""
    kernels = list(kernel_costs.elementwise(device, use))
    yield from kernels or loops(device, use)


def loops(device: DeviceStep, use: RecordedOp) -> Iterator[Elementwise]:
    """Yield the loops of an operation without a kernel. XLA fuses the last norm, and what is done once to positions,
    into what reads it."""

    def each(scope: str, numbers: int, directions: tuple[Loop, Loop]) -> Elementwise:
        costs = (loop.over(numbers, device.work.itemsize) for loop in directions)
        return Elementwise(f"{use.scope}/{scope}".strip("/"), use.times, *costs)

    axes, layered = use.marker.operands, use.layer is not None
    numbers = math.prod(device.operand(use, 0))
    match use.name:
        case "look_up" if "vocab" in axes[0]:
            yield each("look-up", math.prod(device.work.shape(GATHERED, use.result_shapes[0])), _LOOKUP)
        case "scale":
            yield each("scale", numbers, _SCALED)
        case "dropout":
            yield each("dropout", numbers, _DROPOUT)
        case "linear" if len(axes) == 3:
            yield each(
                "bias",
                math.prod(device.work.shape((*GATHERED[:2], *axes[2]), use.result_shapes[0], use.num_query_heads)),
                _BESIDE,
            )
        case "norm" if axes[0][-use.options["dimensions"]] == "act_head_dim":
            yield each("", numbers, _BESIDE)
        case "norm" if layered:
            yield each("", numbers, _NORMS[use.options["operation"]])
            if len(use.results) == 2:
                yield each("residual", numbers, _RESIDUAL)
        case "add" if layered:
            yield each("residual", numbers, _RESIDUAL)
        case "rope":
            yield each("rope", numbers, _BESIDE)
        case "attention" if attention.kernel(device, use) is None:
            keys = math.prod(device.operand(use, 1))
            scores = attention.scores(device, use)
            yield each("softmax", scores, _SOFTMAX)
            if use.options["soft_cap"]:
                yield each("softmax", scores, _SOFT_CAP)
            yield each("heads", 2 * (numbers + keys), _MOVED)  # heads move in front of the sequence and back
        case "elementwise":
            yield each("elementwise", numbers, _NUMBER)
        case "activation" | "gated":
            directions = _activation(use.options["name"], use.name == "gated")
            yield each("activation", numbers, directions)
        case "cross_entropy":
            logits = math.prod(kernel_costs.logits(device, use))
            yield each("loss", logits, _LOSS)
            if use.options["soft_cap"]:
                yield each("loss", logits, _SOFT_CAP)
