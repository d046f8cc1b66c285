"""The parts that the Triton and the Mosaic kernel of a product share: its description, the product of two tiles, the
epilogue.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core.activations import KERNEL


class MatmulProduct(NamedTuple):
    """A product of two matrices as they lie in memory, and the epilogue applied before it leaves the chip.

    a is [M, K], or [K, M] where `transposed[0]`; b is [K, N], or [N, K] where `transposed[1]`. `keeps_sum`: a·b + bias
    is a second result, for the activation's derivative.
    """

    transposed: tuple[bool, bool] = (False, False)
    biased: bool = False
    activation: str | None = None
    added: bool = False
    keeps_sum: bool = False

    def sizes(self, a: jax.Array, b: jax.Array) -> tuple[int, int, int]:
        """Return M, N and K."""
        m, k = reversed(a.shape) if self.transposed[0] else a.shape
        return m, b.shape[0 if self.transposed[1] else 1], k

    def of_tiles(self, a: jax.Array, b: jax.Array, precision: jax.lax.Precision | None) -> jax.Array:
        """Return the product of two tiles, as they lie, in float32."""
        contracted = ((0 if self.transposed[0] else 1,), (1 if self.transposed[1] else 0,))
        return jax.lax.dot_general(
            a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def epilogue(self, total: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> list[jax.Array]:
        """Return the results for a finished tile: activation(total + bias) + residual, and with `keeps_sum` total +
        bias.
        """
        if bias is not None:
            total = total + bias.astype(jnp.float32)
        y = total if self.activation is None else KERNEL[self.activation](total)
        if residual is not None:
            y = y + residual.astype(jnp.float32)
        return [y, total] if self.keeps_sum else [y]
