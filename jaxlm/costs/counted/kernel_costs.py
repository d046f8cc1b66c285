"""Costs of the kernels of a step on one device, as each kernel declares them (`costs` in kernels_pallas)."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.recorder import RecordedOp
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.gated_activation import costs as gated_costs
from kernels_pallas.layer_norm import costs as layer_norm_costs
from kernels_pallas.linear_cross_entropy import chunks
from kernels_pallas.linear_cross_entropy.costs import gradient_cost, statistics_cost
from kernels_pallas.rms_norm import costs as rms_norm_costs
from kernels_pallas.rotary_embedding import costs as rotary_costs

_NORMS = {"rms_norm": rms_norm_costs, "layer_norm": layer_norm_costs}


class Elementwise(NamedTuple):
    """Elementwise work that a step does `times` times. A kernel is not fused into a neighbour."""

    scope: str
    times: int
    forward: KernelCost
    backward: KernelCost
    kernel: bool = False


class Loss(NamedTuple):
    """The chunks of a microbatch's loss, the tokens in each, and each device's labels, padded."""

    chunks: int
    tokens: int
    labels: int


def elementwise(device: DeviceStep, use: RecordedOp) -> Iterator[Elementwise]:
    """Yield the kernel of an operation except attention; none where XLA computes it."""
    work = device.work
    if not work.runs_kernels:
        return

    def arrays() -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(device.operand(use, i), work.dtype) for i in range(len(use.operands))]

    match use.name:
        case "norm" if not device.shares_norm(use):
            over = use.options["dimensions"]
            x, *vectors = (
                jax.ShapeDtypeStruct((*a.shape[:-over], math.prod(a.shape[-over:])), a.dtype) for a in arrays()
            )
            residual = vectors.pop() if len(use.results) == 2 else None
            yield _launched(use.scope, use.times, _NORMS[use.options["operation"]](x, *vectors, residual=residual))
        case "rope":
            x, *angles = arrays()
            angles = [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in angles]
            first = jax.ShapeDtypeStruct((*x.shape[:-1], 2 * angles[0].shape[-1]), x.dtype)
            yield _launched(f"{use.scope}/rope", use.times, rotary_costs(first, *angles))
            if first.size < x.size:  # the kernel's operand is cut out, and its result joined with the others
                moved = KernelCost(bytes=2 * x.dtype.itemsize * (first.size + x.size))
                yield Elementwise(f"{use.scope}/rope", use.times, moved, moved)
        case "gated":
            costs = gated_costs(*arrays(), activation=use.options["name"])
            yield _launched(f"{use.scope}/activation", use.times, costs)
        case "cross_entropy" if chunked := loss(device, use):
            sizes = chunked.tokens, chunked.labels, use.options["soft_cap"]
            kernels = statistics_cost(*sizes), gradient_cost(*sizes, work.dtype)
            # The gradient of the logits is made in the forward pass.
            once = KernelCost(*map(sum, zip(*kernels, strict=True)))
            yield _launched("loss", chunked.chunks, KernelCosts(once, KernelCost()))


def loss(device: DeviceStep, use: RecordedOp) -> Loss | None:
    """Return the chunks of a microbatch's loss; None if its logits are held whole, since they are few."""
    tokens, labels = logits(device, use)
    if not device.work.runs_kernels or tokens * labels < chunks.WORTHWHILE:
        return None
    return Loss(*chunks.chunk(tokens, labels), chunks.padded(labels))


def logits(device: DeviceStep, use: RecordedOp) -> tuple[int, int]:
    """Return the tokens and the labels of logits, or of a loss."""
    rows, tokens, _ = device.operand(use, 0)
    axes = use.marker.operands[1]
    return rows * tokens, device.operand(use, 1)[axes.index("vocab")]


def _launched(scope: str, times: int, costs: KernelCosts) -> Elementwise:
    return Elementwise(scope, times, *costs, kernel=True)
