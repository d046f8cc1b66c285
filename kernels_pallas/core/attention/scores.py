"""The mathematics of one tile of scores, as all kernels compute it (FlashAttention-2, arXiv:2307.08691, section 3.1).

Scores are in units of log₂ e, so that exp becomes exp2, which the chips have. Masked scores are −∞ and running maxima
finite: exp2(−∞ − m) is 0 without another mask.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.core.attention.key_range import KeyRange

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# tanh is computed as 1 − 2 / (1 + e²ˣ), with an error of 10⁻⁷ times the cap: for large caps, small x use a series.
_WIDE_CAP = 256
LOWEST = float(jnp.finfo(jnp.float32).min) / 2


@dataclasses.dataclass(frozen=True, eq=False)
class FlashSettings:
    """The static settings of a call.

    They say how scores are computed, how many are unmasked per head, which ones (numpy arrays [B, T], where known while
    tracing), which kernel runs, and whether gradients are bit-equal in each run.
    """

    scale: float
    soft_cap: float | None
    unmasked_scores: int
    key_range: KeyRange | None
    implementation: str
    deterministic: bool = True

    @functools.cached_property
    def _all(self) -> tuple:
        """All fields in hashable form: numpy arrays are compared by content."""
        held = () if self.key_range is None else tuple((x.dtype, x.shape, x.tobytes()) for x in self.key_range)
        return (self.scale, self.soft_cap, self.unmasked_scores, held, self.implementation, self.deterministic)

    def __hash__(self) -> int:
        return hash(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlashSettings) and self._all == other._all

    def factored(
        self,
        products: jax.Array,
        bias: jax.Array | None = None,
        tanh: Callable[[jax.Array, float], jax.Array] = lambda x, factor: jnp.tanh(x * factor),
    ) -> tuple[jax.Array, float, jax.Array | None]:
        """Return values, a positive factor and a slope, from products q·k in float32.

        The scores are values · factor. The slope is their derivative by the scaled products, None where it is 1. The
        largest score belongs to the largest value, and in a difference of scores the factor costs nothing (an FMA).
        """
        if self.soft_cap is None:
            values, factor, slope = products, self.scale * LOG2_E, None
        else:
            values, factor = tanh(products, self.scale / self.soft_cap), self.soft_cap * LOG2_E
            if self.soft_cap > _WIDE_CAP:
                x = products * (self.scale / self.soft_cap)
                values = jnp.where(jnp.abs(x) < 0.1, x * (1.0 - x * x * (1 / 3 - x * x * (2 / 15))), values)
            slope = 1.0 - values * values
        if bias is not None:
            values, factor = values * factor + bias.astype(jnp.float32) * LOG2_E, 1.0
        return values, factor, slope


def tanh_by_exp2(x: jax.Array, factor: float) -> jax.Array:
    """Return tanh(x · factor) to 10⁻⁶; the instruction of NVIDIA's GPUs has an error of 5 · 10⁻⁴."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (factor * 2 * LOG2_E)))


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Return the product of two matrices over these dimensions, summed in float32; float32 is multiplied as float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def recomputed(weights: jax.Array) -> jax.Array:
    """Return weights made from scores and their log-sum-exp, at most 1: scores of 10⁴ and more round by more than the
    exponential forgives.
    """
    return jnp.minimum(weights, 1.0)


def score_gradient(weights: jax.Array, d_weights: jax.Array, delta: jax.Array, slope: jax.Array | None) -> jax.Array:
    """Return the gradient by the scaled products: weights · (d_weights − delta), delta = Σ output · its gradient per
    row.
    """
    gradient = weights * (d_weights - delta)
    return gradient if slope is None else gradient * slope
