"""A bias and an activation after a linear map."""

import jax

from kernels_pallas.bias_activation import reference
from kernels_pallas.bias_activation.body import BiasActivationBody
from kernels_pallas.core import activations, checks, rows
from kernels_pallas.core.launch import KernelCosts


def bias_activation(
    x: jax.Array,
    bias: jax.Array,
    *,
    activation: str = "gelu",
    implementation: str | None = None,
) -> jax.Array:
    """Return activation(x + bias).

    Args:
      x: [..., F] in float32, bfloat16 or float16; arithmetic is float32.
      bias: [F], of any of these dtypes.
      activation: "gelu" (exact), "gelu_tanh", "silu", "relu" or "relu_squared".
      implementation: "reference", "triton", "mosaic_gpu" or "mosaic_tpu"; None chooses by the chip being lowered for
        and the shape.

    Returns [..., F] in x's dtype.

    Under a mesh of several devices the kernels run inside `jax.shard_map`; elsewhere None is "reference".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    checks.matrix("bias_activation", x=x)
    checks.array("bias_activation", bias=bias)
    checks.floating("bias_activation", bias=bias)
    checks.vector("bias_activation", x, bias=bias)
    activations.check("bias_activation", activation, required=True)
    kernel = rows.choose_kernel(BiasActivationBody, x, implementation)
    if kernel is None:
        return reference.bias_activation(x, bias, activation=activation)
    return rows.apply(BiasActivationBody(activation), kernel, (x,), (bias,))


def costs(x: jax.Array, bias: jax.Array, *, activation: str = "gelu") -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes."""
    return rows.costs(BiasActivationBody(activation), (x,), (bias,))
