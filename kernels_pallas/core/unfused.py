"""Products that a CPU does not compute as fused multiply-adds."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import target


@jax.custom_jvp
def unfused(product: jax.Array) -> jax.Array:
    """Return a product of any shape, float32 or float64. On a mesh of CPUs it is rounded before it is added.

    XLA's code on a CPU computes a product and a sum as a fused multiply-add, which rounds once, in some programs and
    not in others: a result's bits would depend on the program. It does not where the product goes through an operation
    that its compiler cannot remove. Here that is the minimum of its bits, as an integer, and those of a NaN: infinity
    and finite numbers are less, or negative. Gradients are those of the identity.
    """
    if target.platform() != "cpu":
        return product
    nan = np.array(np.nan, product.dtype).view(f"int{8 * product.dtype.itemsize}")
    bits = jnp.minimum(jax.lax.bitcast_convert_type(product, nan.dtype), nan)
    return jax.lax.bitcast_convert_type(bits, product.dtype)


@unfused.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return unfused(*primals), *tangents
