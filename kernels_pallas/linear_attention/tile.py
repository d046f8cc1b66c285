"""A chunk of one head, as kernels compute it: by products of matrices, masks, and sums over rows or columns alone.

JAX differentiates the same function for the backward pass, inside the kernel.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.linear_attention.unit import unit

Form = Literal["ab", "abt", "atb"]  # which of the two matrices is transposed
_CONTRACTED: dict[Form, tuple[int, int]] = {"ab": (1, 0), "abt": (1, 1), "atb": (0, 0)}
_EXACT = jax.lax.Precision.HIGHEST


class TokenNumbers(NamedTuple):
    """Numbers of each token of a chunk, [1, C], float32.

    Attributes:
      decay: the logarithm of its decay, 0 for padding.
      weight: of what it writes: β or δ, 0 for padding.
      document: the documents that have begun up to it; 0 is the one that the state before the chunk is of.
    """

    decay: jax.Array
    weight: jax.Array
    document: jax.Array


def tile(
    is_delta: bool,
    q_CH: jax.Array,
    k_CH: jax.Array,
    v_CV: jax.Array,
    state_HV: jax.Array,
    rows: TokenNumbers,
    skip_11: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [C, V] and the state [H, V] after a chunk, all float32: of `kernels_pallas.gated_delta_rule`,
    or else of `state_space`."""
    C = v_CV.shape[0]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    decay_C1, weight_C1, document_C1 = (_sum(jnp.where(row == column, x, 0.0), 1) for x in rows)
    total_C1 = _sum(jnp.where(column <= row, rows.decay, 0.0), 1)
    total_1C = _sum(jnp.where(row <= column, decay_C1, 0.0), 0)
    is_read_CC = (column <= row) & (document_C1 == rows.document)
    decay_CC = jnp.exp(jnp.where(is_read_CC, total_C1 - total_1C, -jnp.inf))
    before_C1 = jnp.where(document_C1 == 0, jnp.exp(total_C1), 0.0)
    last_11, total_11 = jnp.max(rows.document, axis=1, keepdims=True), _sum(rows.decay, 1)
    left_C1 = jnp.exp(jnp.where(document_C1 == last_11, total_11 - total_C1, -jnp.inf))
    kept_11 = jnp.where(last_11 == 0, jnp.exp(total_11), 0.0)

    if is_delta:
        q_CH, k_CH = unit(q_CH) * q_CH.shape[1] ** -0.5, unit(k_CH)
        system_CC = jnp.where(column < row, weight_C1 * product("abt", None, k_CH, k_CH) * decay_CC, 0.0)
        right_CV = weight_C1 * (v_CV - before_C1 * product("ab", None, k_CH, state_HV))
        change_CV = solved(system_CC, right_CV)
    else:
        change_CV = weight_C1 * v_CV
    y_CV = before_C1 * product("ab", None, q_CH, state_HV)
    y_CV += product("ab", None, product("abt", None, q_CH, k_CH) * decay_CC, change_CV)
    after_HV = kept_11 * state_HV + product("atb", None, k_CH, left_C1 * change_CV)
    return (y_CV if skip_11 is None else y_CV + skip_11 * v_CV), after_HV


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(form: Form, precision: jax.lax.Precision | None, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a · b, a · bᵀ or aᵀ · b of float32 matrices. Its gradients are such products, and transpose nothing."""
    return multiplied(form, precision, a, b)


def multiplied(form: Form, precision: jax.lax.Precision | None, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return what `product` does, for kernels that take no function with gradients of its own."""
    contracted = tuple((axis,) for axis in _CONTRACTED[form])
    return jax.lax.dot_general(a, b, (contracted, ((), ())), precision, jnp.float32)


def _product_forward(form: Form, precision: jax.lax.Precision | None, a: jax.Array, b: jax.Array) -> tuple:
    return product(form, precision, a, b), (a, b)


def _product_backward(form: Form, precision: jax.lax.Precision | None, operands: tuple, d_y: jax.Array) -> tuple:
    a, b = operands
    match form:
        case "ab":
            return product("abt", precision, d_y, b), product("atb", precision, a, d_y)
        case "abt":
            return product("ab", precision, d_y, b), product("atb", precision, d_y, a)
    return product("abt", precision, b, d_y), product("ab", precision, a, d_y)


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def solved(lower_CC: jax.Array, right_CV: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹ · R of a strictly lower triangular L."""
    return product("ab", _EXACT, _inverse(lower_CC), right_CV)


def _solved_forward(lower_CC: jax.Array, right_CV: jax.Array) -> tuple:
    inverse_CC = _inverse(lower_CC)
    x_CV = product("ab", _EXACT, inverse_CC, right_CV)
    return x_CV, (inverse_CC, x_CV)


def _solved_backward(kept: tuple, dx_CV: jax.Array) -> tuple:
    inverse_CC, x_CV = kept
    dright_CV = product("atb", _EXACT, inverse_CC, dx_CV)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, inverse_CC.shape, axis) for axis in (0, 1))
    return jnp.where(column < row, -product("abt", _EXACT, dright_CV, x_CV), 0.0), dright_CV


solved.defvjp(_solved_forward, _solved_backward)


def _inverse(lower_CC: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹ in blocks of twice as many rows from one step to the next: X − X·B·X of the inverses X of the
    blocks and what B of L lies between two of them."""
    C = lower_CC.shape[0]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    inverse_CC = jnp.where(row == column, 1.0, jnp.where(row // 2 == column // 2, -lower_CC, 0.0))
    size = 2
    while size < C:
        is_between = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        below_CC = product("ab", _EXACT, jnp.where(is_between, lower_CC, 0.0), inverse_CC)
        inverse_CC -= product("ab", _EXACT, inverse_CC, below_CC)
        size *= 2
    return inverse_CC


def _sum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(x, axis=axis, keepdims=True)
