"""Bias and activation, as both kernels compute them."""

import dataclasses
from typing import Any

from kernels_pallas.core.activations import FLOPS, KERNEL, TRANSCENDENTALS


@dataclasses.dataclass(frozen=True)
class BiasActivationBody:
    """A body that returns activation(x + bias)."""

    activation: str

    name = "bias_activation"
    elementwise = True
    flops = property(lambda self: (FLOPS[self.activation][0] + 1, FLOPS[self.activation][1] + 2))
    transcendentals = property(lambda self: TRANSCENDENTALS[self.activation])

    def __call__(self, inside: Any, rows: tuple, vectors: tuple) -> tuple:
        (x,), (bias,) = rows, vectors
        return (KERNEL[self.activation](x + bias),)
