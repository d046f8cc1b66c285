"""Linear attention as its recurrences say it, one token after the other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.linear_attention.unit import unit


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    is_token: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.gated_delta_rule`. Sums are float32, or float64 of float64."""
    query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)

    def change(state: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array) -> jax.Array:
        return beta[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))

    arrays = query, key, value, log_decay, beta
    outputs, state = _recurrence(change, arrays, state, is_token, begins)
    return outputs.astype(value.dtype), state


def state_space(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    delta: jax.Array,
    skip: jax.Array,
    state: jax.Array,
    is_token: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.state_space`. Sums are float32, or float64 of float64."""

    def change(state: jax.Array, k: jax.Array, v: jax.Array, delta: jax.Array) -> jax.Array:
        return delta[..., None] * v

    arrays = query, key, value, log_decay, delta
    outputs, state = _recurrence(change, arrays, state, is_token, begins)
    return (outputs + skip.astype(outputs.dtype)[None, None, :, None] * value).astype(value.dtype), state


def _recurrence(
    change: Callable[..., jax.Array],
    arrays: tuple[jax.Array, ...],
    state: jax.Array,
    is_token: jax.Array | None,
    begins: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return outputs Sᵀq [B, T, N, V] of states S that add k·dᵀ, where d = change(S, k, v, w), and the last of them."""
    (B, T, K, _), N = arrays[0].shape, arrays[2].shape[2]
    wide = np.promote_types(arrays[0].dtype, jnp.float32)
    query, key, *rest = (x.astype(wide) for x in arrays)
    query, key = (jnp.repeat(x, N // K, axis=2) for x in (query, key))
    is_token = jnp.ones((B, T), bool) if is_token is None else is_token
    begins = jnp.zeros((B, T), bool) if begins is None else begins

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        is_token, begins, q, k, v, g, w = token
        before = jnp.where(begins[:, None, None, None], 0.0, state) * jnp.exp(g)[..., None, None]
        after = before + k[..., None] * change(before, k, v, w)[..., None, :]
        after = jnp.where(is_token[:, None, None, None], after, state)
        return after, jnp.sum(after * q[..., None], axis=-2)

    tokens = (jnp.swapaxes(x, 0, 1) for x in (is_token, begins, query, key, *rest))
    last, outputs = jax.lax.scan(step, state.astype(wide), tuple(tokens))
    return jnp.swapaxes(outputs, 0, 1), last
