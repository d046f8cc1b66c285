"""Scopes of the elementwise work of a step, and one piece of it."""

from typing import NamedTuple

from kernels_pallas.core.launch import KernelCost

# Scopes of a step's operations element by element, of which kernels take the place of some.
SOFTMAX, HEADS = "layers/attention/softmax", "layers/attention/heads"
NORMS, POSITIONS, RESIDUAL = "layers/norms", "layers/attention/positions", "layers/attention/residual"
ACTIVATION, LOSS = "layers/feed_forward/activation", "loss"


class Elementwise(NamedTuple):
    """Elementwise work that a step does `times` times. A kernel is not fused into a neighbour."""

    scope: str
    times: int
    forward: KernelCost
    backward: KernelCost
    kernel: bool = False
