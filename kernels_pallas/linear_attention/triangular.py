"""Systems of equations with a triangular matrix, solved by the inverse of it, which products of blocks make."""

from functools import partial

import jax
import jax.numpy as jnp

_BLOCK = 8  # rows of a block that is inverted row by row: products of blocks that small take longer


@jax.custom_vjp
def solved(lower: jax.Array, right: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹ · R of strictly lower triangular L [..., C, C] and R [..., C, V], float32."""
    return _product(_inverse(lower), right)


def _solved(lower: jax.Array, right: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _inverse(lower)
    x = _product(inverse, right)
    return x, (inverse, x)


def _solved_backward(kept: tuple[jax.Array, jax.Array], dx: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, x = kept
    dright = _product(jnp.swapaxes(inverse, -1, -2), dx)
    return -jnp.tril(_product(dright, jnp.swapaxes(x, -1, -2)), -1), dright


solved.defvjp(_solved, _solved_backward)

_product = partial(jnp.matmul, precision="highest")


def _inverse(lower: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹, in blocks of twice as many rows from one product to the next: [[P, 0], [−R·Q·P, R]] of the
    inverses P and R of two blocks and Q below the first."""
    C, size = lower.shape[-1], _BLOCK
    rows = max(_BLOCK, 1 << (C - 1).bit_length())
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, rows - C)] * 2)
    inverse = _substituted(_blocks(lower, size, 0))
    while size < rows:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -_product(second, _product(_blocks(lower, 2 * size, size), first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse, size = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2), 2 * size
    return inverse[..., 0, :C, :C]


def _substituted(lower: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹ by forward substitution, in sums of rows."""
    eye, rows = jnp.broadcast_to(jnp.eye(_BLOCK), lower.shape), []
    for i in range(_BLOCK):
        rows.append(eye[..., i, :] - sum(lower[..., i, j, None] * rows[j] for j in range(i)))
    return jnp.stack(rows, axis=-2)


def _blocks(x: jax.Array, step: int, down: int) -> jax.Array:
    """Return the blocks [..., n, size, size] of x [..., C, C] whose first column is a multiple of `step`, and whose
    first row is `down` after it; size is `down`, or else the step."""
    size = down or step
    starts = range(0, x.shape[-1], step)
    return jnp.stack([x[..., i + down : i + down + size, i : i + size] for i in starts], axis=-3)
