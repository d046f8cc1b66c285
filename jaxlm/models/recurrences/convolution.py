"""The short convolution that recurrent mixers have before their recurrence, or in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxlm.models.doors.scan import ChunkRows, Recurrence, States, TokenArray, tail_after, windows
from jaxlm.models.logical_axes import Axes
from kernels_pallas.core.unfused import unfused

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
    """The function of all tokens of a pass."""

    slot: str
    activation: Shape

    def __call__(
        self, states: States, rows: ChunkRows, x: jax.Array, weights: jax.Array, bias: jax.Array | None = None
    ) -> tuple[States, jax.Array]:
        tail = states[self.slot]
        return {self.slot: tail_after(tail, rows, x)}, _outputs(self.activation, tail, rows, x, weights, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(
    activation: Shape, tail: jax.Array, rows: ChunkRows, x: jax.Array, weights: jax.Array, bias: jax.Array | None
) -> jax.Array:
    return _ACTIVATIONS[activation](_sum(_taps(tail, rows, x), weights, bias)).astype(x.dtype)


def _outputs_forward(activation: Shape, *operands: Any) -> tuple[jax.Array, tuple]:
    return _outputs(activation, *operands), operands


def _outputs_backward(activation: Shape, operands: tuple, d_outputs: jax.Array) -> tuple:
    """Compute the sums again; the gradient of them goes through memory once, in the dtype of x, for all taps."""
    # As the gradients come, so that XLA does not keep what the forward pass computed in their place.
    tail, rows, x, weights, bias = operands
    x, d_outputs = jax.lax.optimization_barrier((x, d_outputs))
    taps = _taps(tail, rows, x)
    _, pull_back = jax.vjp(_ACTIVATIONS[activation], _sum(taps, weights, bias))
    d_sum = jax.lax.optimization_barrier(pull_back(d_outputs.astype(jnp.float32))[0].astype(x.dtype))
    wide = d_sum.astype(jnp.float32)
    d_weights = jnp.stack([jnp.sum(wide * tap, axis=(0, 1)) for tap in taps])
    d_bias = None if bias is None else jnp.sum(wide, axis=(0, 1)).astype(bias.dtype)

    before, C = tail.shape[1], x.shape[1]
    is_read = windows(jnp.ones(tail.shape[:2], bool), rows, jnp.ones(x.shape[:2], bool))
    d_tail, d_x = jnp.zeros(tail.shape, jnp.float32), jnp.zeros(x.shape, jnp.float32)
    for i, is_read_BC in enumerate(is_read):
        d_tail += _where(is_read_BC, d_sum, -i, before) * _wide(weights[i])
        d_x += _where(is_read_BC, d_sum, before - i, C) * _wide(weights[i])
    return d_tail.astype(tail.dtype), None, d_x.astype(x.dtype), d_weights.astype(weights.dtype), d_bias


_outputs.defvjp(_outputs_forward, _outputs_backward)

_ACTIVATIONS: dict[Shape, Callable[[jax.Array], jax.Array]] = {"silu": jax.nn.silu, "linear": lambda x: x}


def _taps(tail: jax.Array, rows: ChunkRows, x: jax.Array) -> list[jax.Array]:
    return [each.astype(jnp.float32) for each in windows(tail, rows, x)]


def _sum(taps: list[jax.Array], weights: jax.Array, bias: jax.Array | None) -> jax.Array:
    y: Any = sum(unfused(tap * _wide(weights[i])) for i, tap in enumerate(taps))
    return y if bias is None else y + _wide(bias)


def _wide(weight: jax.Array) -> jax.Array:
    """Return a weight [*shape] as float32 [1, 1, *shape]."""
    return weight.astype(jnp.float32)[None, None]


def _where(is_read_BC: jax.Array, x: jax.Array, by: int, length: int) -> jax.Array:
    """Return x [B, C, …] of the tokens from `by` on as float32 [B, length, …], zero where it is not read."""
    is_read, x = _shifted(is_read_BC, by, length), _shifted(x, by, length)
    is_read = is_read.reshape(*is_read.shape, *[1] * (x.ndim - 2))
    return jnp.where(is_read, x, jnp.zeros((), x.dtype)).astype(jnp.float32)


def _shifted(x: jax.Array, by: int, length: int) -> jax.Array:
    """Return so many tokens of x [B, C, …] from `by` on, zeros before the first and after the last."""
    padding = max(-by, 0), max(by + length - x.shape[1], 0)
    first = max(by, 0)
    return jnp.pad(x, [(0, 0), padding] + [(0, 0)] * (x.ndim - 2))[:, first : first + length]
