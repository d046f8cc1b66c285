"""The short convolution that recurrent mixers have before their recurrence, or in its place."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxlm.models.doors.scan import ChunkRows, Recurrence, States, TokenArray, tail_after, windows
from jaxlm.models.logical_axes import Axes

Shape = Literal["linear", "silu"]


def short_convolution(
    weights: TokenArray, bias: TokenArray | None, slot: str, dtype: jnp.dtype, activation: Shape = "silu"
) -> Recurrence:
    """Return the recurrence act(Σ w_i ⊙ x_{t−taps+1+i} + bias) over the last tokens of a document, channel by channel.

    Its input and outputs are [B, T, *shape] of one dtype; sums are float32. Its state [taps − 1, *shape] is the inputs
    of the last tokens. A tap whose token is before the document's first reads zero.

    Args:
      weights: [taps, *shape], the oldest token's first, with their logical axes; those of the shape are activations'.
      bias: [*shape].
      slot, dtype: the name and the dtype of the state.
    """
    array, (_, *axes) = weights
    taps, *shape = array.shape
    first = {slot: (jnp.zeros((taps - 1, *shape), dtype), (None, *axes))}
    of_tokens: Axes = ("batch", "sequence", *axes)
    parameters = (weights,) if bias is None else (weights, bias)
    return Recurrence(_Convolution(slot, activation), first, of_tokens, weights=parameters)


@dataclass(frozen=True)
class _Convolution:
    """The function of all tokens of a pass. The backward pass computes it again, and keeps its input alone."""

    slot: str
    activation: Shape

    def __call__(
        self, states: States, rows: ChunkRows, x: jax.Array, weights: jax.Array, *bias: jax.Array
    ) -> tuple[States, jax.Array]:
        tail = states[self.slot]
        return {self.slot: tail_after(tail, rows, x)}, jax.checkpoint(self._outputs)(tail, rows, x, weights, *bias)

    def _outputs(
        self, tail: jax.Array, rows: ChunkRows, x: jax.Array, weights: jax.Array, *bias: jax.Array
    ) -> jax.Array:
        float32 = jnp.float32
        y: Any = sum(
            part.astype(float32) * weights[i].astype(float32)[None, None]
            for i, part in enumerate(windows(tail, rows, x))
        )
        y = sum((each.astype(float32)[None, None] for each in bias), y)
        return (jax.nn.silu(y) if self.activation == "silu" else y).astype(x.dtype)
