"""Products, short convolutions and decays of recurrent layers with a matrix per head."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.cache import LayerCache
from jaxlm.models.doors import repeat_heads
from jaxlm.models.doors.scan import TokenArray
from jaxlm.models.parameters import normal, param, uniform
from jaxlm.models.recurrences.convolution import short_convolution
from jaxlm.models.recurrences.decay import log_rates, time_biases
from jaxlm.models.rows import RowContext

NAMES = "query", "key", "value", "gate"
Heads = tuple[int, int, str]  # their number, the channels of each, and the logical axis of the number


def projections(rngs: nnx.Rngs, d_model: int, shared: Heads, own: Heads, std: float) -> tuple[nnx.Param, ...]:
    """Return the matrices that make queries and keys, of shared heads, and values and gates, of heads of their own."""
    heads = shared, shared, own, own
    return tuple(param(rngs, (d_model, n, size), f"embed -> {axis} head_dim", normal(std)) for n, size, axis in heads)


def convolution_taps(rngs: nnx.Rngs, taps: int, shared: Heads, own: Heads) -> tuple[nnx.Param, ...]:
    """Return the weights [taps, heads, channels] of the convolutions of queries, keys and values."""
    init = uniform(taps**-0.5)
    return tuple(param(rngs, (taps, n, size), f"taps {axis} head_dim", init) for n, size, axis in (shared, shared, own))


def decay_parameters(rngs: nnx.Rngs, heads: int) -> tuple[nnx.Param, nnx.Param]:
    """Return the logarithms of the rates, and the biases of the times [heads]."""
    return param(rngs, (heads,), "heads", log_rates), param(rngs, (heads,), "heads", time_biases)


def convolved(
    cache: LayerCache,
    rows: RowContext,
    taps: tuple[nnx.Param, ...],
    biases: tuple[nnx.Param | None, ...],
    inputs: tuple[TokenArray, ...],
) -> tuple[list[TokenArray], LayerCache]:
    """Return queries, keys and values [B, T, heads, channels] after their convolutions, and the cache after them.

    Args:
      taps, biases: of each; heads that `linear` copied have copies of them.
    """
    outputs = []
    for slot, weight, bias, (x_BTNH, axes) in zip(NAMES, taps, biases, inputs, strict=False):
        copies = x_BTNH.shape[2] // weight.shape[-2]
        weights = repeat_heads(weight, 1, copies), (None, *axes[2:])
        added = None if bias is None else (repeat_heads(bias, 0, copies), axes[2:])
        y_BTNH, cache = cache.scan(rows, short_convolution(weights, added, slot, x_BTNH.dtype), (x_BTNH, axes))
        outputs.append((y_BTNH, axes))
    return outputs, cache


def rates_and_times(log_rate: nnx.Param, time_bias: nnx.Param, time_BTN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return −rate [1, 1, N] and softplus(time + bias) [B, T, N], float32; their product is the logarithm of a decay
    (Mamba-2, arXiv:2405.21060)."""
    rate_N, bias_N = (x[...].astype(jnp.float32)[None, None] for x in (log_rate, time_bias))
    return -jnp.exp(rate_N), jax.nn.softplus(time_BTN.astype(jnp.float32) + bias_N)
