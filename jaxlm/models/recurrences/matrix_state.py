"""The state of recurrences with a matrix per head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxlm.models.doors.scan import Chunk, ChunkRows, Recurrence, States, TokenArray
from jaxlm.models.logical_axes import HEAD_STATE, HEADS
from jaxlm.models.recurrences.decay import by_token

_SLOT = "matrix"
# Take the matrices [B, K, G, H, V] before the tokens, the tokens' documents [B, C] and arrays of tokens, the first
# three q and k [B, K, C, H] and v [B, K, G, C, V]; return outputs [B, K, G, C, V] and the matrices after.
Function = Callable[..., tuple[jax.Array, jax.Array]]


def matrix_recurrence(
    chunk: Chunk, size: int, heads: int, key_dim: int, value_dim: int, weights: tuple[TokenArray, ...] = ()
) -> Recurrence:
    """Return the recurrence of a chunk's function, `size` tokens at most, whose state is a matrix [N, H, V] called
    `matrix`, float32 and zero at first."""
    first = {_SLOT: (jnp.zeros((heads, key_dim, value_dim), jnp.float32), HEAD_STATE)}
    return Recurrence(chunk, first, HEADS, size, weights)


def through_matrix(
    states: States, rows: ChunkRows, token: Function, tokens: Function, *arrays: jax.Array
) -> tuple[States, jax.Array]:
    """Return the states after a chunk, and its outputs [B, C, N, V]: by the function of one token, or of several."""
    B, K, G, C, V = arrays[2].shape
    state_BKGHV = states[_SLOT].reshape(B, K, G, -1, V)
    y_BKGCV, after_BKGHV = (token if C == 1 else tokens)(state_BKGHV, rows.document_BC, *arrays)
    return {_SLOT: after_BKGHV.reshape(states[_SLOT].shape)}, by_token(y_BKGCV)
