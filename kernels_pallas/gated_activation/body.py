"""Gated activations, as both kernels compute them."""

import dataclasses
from typing import Any

from kernels_pallas.core.activations import FLOPS, KERNEL, TRANSCENDENTALS


@dataclasses.dataclass(frozen=True)
class GatedActivationBody:
    """A body that returns activation(gate) · up."""

    activation: str

    name = "gated_activation"
    elementwise = True
    flops = property(lambda self: (FLOPS[self.activation][0] + 1, FLOPS[self.activation][1] + 3))
    transcendentals = property(lambda self: TRANSCENDENTALS[self.activation])

    def __call__(self, inside: Any, rows: tuple, vectors: tuple) -> tuple:
        gate, up = rows
        return (KERNEL[self.activation](gate) * up,)
