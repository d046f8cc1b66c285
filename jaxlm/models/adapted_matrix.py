"""A matrix with an adapter, as a module in the place of others."""

import math
import string

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.parameters import RANK, Module, param, uniform, zeros
from jaxlm.models.quantized_matrix import QuantizedMatrix


class AdaptedMatrix(Module):
    """A matrix W that is not trained, and the adapter A, B that is: x·W + scale · (x·A)·B.

    `base` is W [*inputs, *outputs], perhaps quantised, `a` is [*inputs, rank] and `b` [rank, *outputs]; all may be
    stacked. A begins uniform between ±1/√inputs, as PEFT has it, and B at zero, so that the sum begins as W (Hu et al.
    2021, arXiv:2106.09685, section 4.1).
    """

    base: nnx.Param | QuantizedMatrix

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[str, ...], inputs: int, rank: int, scale: float, rngs: nnx.Rngs
    ):
        """Declare the adapter of a matrix of this shape and these axes, the first `inputs` of which it contracts. The
        matrix becomes `base` afterwards."""
        self.scale = scale
        before, after = " ".join(axes[:inputs]), " ".join(axes[inputs:])
        bound = math.prod(shape[:inputs]) ** -0.5
        self.a = param(rngs, (*shape[:inputs], rank), f"{before} -> {RANK}", uniform(bound))
        self.b = param(rngs, (rank, *shape[inputs:]), f"{RANK} -> {after}", zeros)

    def sum(self) -> jax.Array:
        """Return W + scale · A·B, computed in float32, in the dtype of W; float32 where W is quantised."""
        letters = dict(zip(dict.fromkeys((*self.base.axes, RANK)), string.ascii_letters, strict=False))
        a, b, base = ("".join(letters[axis] for axis in p.axes) for p in (self.a, self.b, self.base))
        wide = (p[...].astype(jnp.float32) for p in (self.a, self.b))
        product = jnp.einsum(f"{a},{b}->{base}", *wide, precision="highest")
        w = self.base[...] if isinstance(self.base, nnx.Param) else self.base.widened()
        return (w.astype(jnp.float32) + self.scale * product).astype(w.dtype)
