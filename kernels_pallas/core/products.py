"""Products that XLA computes, in the dtypes that matrix units multiply."""

import functools

import jax
import jax.numpy as jnp


def einsum_in_float32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum(subscripts, a, b) with a float32 result, whose backward pass multiplies in the operands' dtype.

    JAX alone would multiply the float32 cotangent with operands widened to float32, at a fraction of a matrix
    unit's rate. Every index of an operand must appear in the other or in the result.
    """
    if a.dtype == b.dtype == jnp.float32:
        return jnp.einsum(subscripts, a, b)
    return _einsum_in_float32(subscripts, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum_in_float32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _forward(subscripts: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple]:
    return _einsum_in_float32(subscripts, a, b), (a, b)


def _backward(subscripts: str, operands: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    (a, b), (inputs, result) = operands, subscripts.split("->")
    left, right = inputs.split(",")
    narrow = cotangent.astype(a.dtype)
    return jnp.einsum(f"{result},{right}->{left}", narrow, b), jnp.einsum(f"{result},{left}->{right}", narrow, a)


_einsum_in_float32.defvjp(_forward, _backward)
