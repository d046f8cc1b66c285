"""Gated activations: SwiGLU, GeGLU exact and by tanh, ReLU² and their like."""

import jax

from kernels_pallas.core import activations, checks, rows
from kernels_pallas.core.launch import KernelCosts
from kernels_pallas.gated_activation import reference, xla
from kernels_pallas.gated_activation.body import GatedActivationBody


def gated_activation(
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str = "silu",
    implementation: str | None = None,
) -> jax.Array:
    """activation(gate) ⊙ up (Shazeer 2020, arXiv:2002.05202, equation 5).

    Args:
      gate, up: [..., F] of one dtype, float32, bfloat16 or float16; arithmetic is float32.
      activation: "silu" (SwiGLU), "gelu" (GeGLU, exact), "gelu_tanh", "relu" (ReGLU) or "relu_squared".
      implementation: "reference", "xla", "triton", "mosaic_gpu" or "mosaic_tpu"; None chooses one of the last four by
        the chip being lowered for and the shape.

    Returns [..., F] in that dtype.

    Under a mesh of several devices the kernels live inside `jax.shard_map`; elsewhere None is "xla".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    checks.matrix("gated_activation", gate=gate, up=up)
    checks.like("gated_activation", "gate", gate, up=up)
    activations.check("gated_activation", activation, required=True)
    kernel = rows.choose_kernel(GatedActivationBody, gate, implementation, tuned_for_xla=True)
    if kernel is None:
        return reference.gated_activation(gate, up, activation=activation)
    if kernel == "xla":
        return xla.gated_activation(gate, up, activation=activation)
    return rows.apply(GatedActivationBody(activation), kernel, (gate, up))


def costs(gate: jax.Array, up: jax.Array, *, activation: str = "silu") -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes."""
    return rows.costs(GatedActivationBody(activation), (gate, up))
