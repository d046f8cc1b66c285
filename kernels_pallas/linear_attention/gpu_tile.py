"""Chunks in Triton's kernels: products, what tokens see of one another, and inverses of triangular matrices."""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.core.tiles import precision_of
from kernels_pallas.linear_attention.tile import Form, multiplied

BLOCK = 16  # rows of a triangular matrix whose inverse is made row by row: the smallest that tensor cores multiply
_TF32 = -(1 << 13)  # the bits of a float32 that tensor cores multiply


def seen(total_C: jax.Array, document_C: jax.Array) -> jax.Array:
    """Return what each token (row) sees of what each token wrote, [C, C]: zero of later ones and of other documents.

    `total_C`: the sums of the logarithms of decays from the first token on.
    """
    row, column = iotas(total_C.shape[0])
    is_read_CC = (column <= row) & (document_C[:, None] == document_C[None])
    return jnp.exp(jnp.where(is_read_CC, total_C[:, None] - total_C[None], -jnp.inf))


def iotas(size: int) -> tuple[jax.Array, jax.Array]:
    """Return the row and the column of each number of a square matrix."""
    return tuple(jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))


def multiplied_as(*dtypes: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the numbers that tensor cores multiply, for arrays of these: bfloat16 of bfloat16, unless
    `jax.default_matmul_precision` asks for more."""
    is_default = jax.config.jax_default_matmul_precision in (None, "default", "fastest", "bfloat16")
    is_narrow = is_default and all(dtype == jnp.bfloat16 for dtype in dtypes)
    return jnp.dtype(jnp.bfloat16 if is_narrow else jnp.float32)


def product(form: Form, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a product in float32 of matrices, both bfloat16 or both float32; of float32 in the precision of
    `jax.default_matmul_precision`."""
    return multiplied(form, precision_of(a.dtype), a, b)


def exact(form: Form, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a product of float32 matrices to 2⁻²⁰ by three products on tensor cores, which multiply the first eleven
    bits of a number."""
    (high_a, low_a), (high_b, low_b) = _halves(a), _halves(b)
    once = functools.partial(multiplied, form, jax.lax.Precision.DEFAULT)
    return once(high_a, low_b) + once(low_a, high_b) + once(high_a, high_b)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_TF32)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def inverse(lower_CC: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹ of a strictly lower triangular L: of blocks of 16 rows by elimination, and then in blocks of
    twice as many rows from one step to the next: X − X·B·X of the inverses X of the blocks and what B of L lies between
    two of them."""
    C = lower_CC.shape[0]
    row, column = iotas(C)
    inverse_CC = _inverse_of_blocks(lower_CC)
    size = BLOCK
    while size < C:
        is_between = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        below_CC = exact("ab", jnp.where(is_between, lower_CC, 0.0), inverse_CC)
        inverse_CC -= exact("ab", inverse_CC, below_CC)
        size *= 2
    return inverse_CC


def _inverse_of_blocks(lower_CC: jax.Array) -> jax.Array:
    """Return the inverses of the blocks on the diagonal of I + L, zero elsewhere."""
    C = lower_CC.shape[0]
    n, size = C // BLOCK, BLOCK
    across = n, size, n, size
    is_diagonal = _iota(across, 0) == _iota(across, 2)
    lower = jnp.sum(jnp.where(is_diagonal, lower_CC.reshape(across), 0.0), axis=2)
    shape = n, size, size
    row, column = _iota(shape, 1), _iota(shape, 2)

    def eliminate(i: jax.Array, x: jax.Array) -> jax.Array:
        """Subtract row i of the inverse from the rows below, as often as L says."""
        factors = jnp.sum(jnp.where(column == i, lower, 0.0), axis=2)
        pivot = jnp.sum(jnp.where(row == i, x, 0.0), axis=1)
        return x - factors[:, :, None] * pivot[:, None, :]

    x = jax.lax.fori_loop(0, size - 1, eliminate, jnp.where(row == column, 1.0, 0.0))
    return jnp.where(is_diagonal, x[:, :, None, :], 0.0).reshape(C, C)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
