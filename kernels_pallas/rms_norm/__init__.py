"""RMSNorm, with an optional residual sum before it."""

from typing import Any

import jax

from kernels_pallas.core import checks, rows
from kernels_pallas.core.launch import KernelCosts
from kernels_pallas.rms_norm import reference
from kernels_pallas.rms_norm.body import RMSNormBody


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    plus_one: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return x / √(mean(x²) + ε) · scale over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467, equation
    4).

    Args:
      x: [..., D] in float32, bfloat16 or float16; statistics are float32.
      scale: [D], of any of these dtypes; None is 1.
      residual: [..., D] like x: then s = x + residual is normalised, and both are returned.
      epsilon: a normal positive number of float32.
      plus_one: multiply by 1 + scale, as Gemma does.
      implementation: "reference", "triton", "mosaic_gpu" or "mosaic_tpu"; None chooses by the chip being lowered for
        and the shape.

    Returns y [..., D] in x's dtype; with a residual (s, y).

    Under a mesh of several devices the kernels run inside `jax.shard_map` with D whole; elsewhere None is "reference".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    epsilon = checks.norm("rms_norm", x, {"scale": scale}, residual, epsilon, plus_one)
    kernel = rows.choose_kernel(RMSNormBody, x, implementation)
    if kernel is None:
        return reference.rms_norm(x, scale, residual=residual, epsilon=epsilon, plus_one=plus_one)
    body, vectors = RMSNormBody(x.shape[-1], epsilon, plus_one), () if scale is None else (scale,)
    if residual is None:
        return rows.apply(body, kernel, (x,), vectors)
    return rows.apply_to_sum(body, kernel, x, residual, vectors)


def costs(x: jax.Array, scale: jax.Array | None = None, *, residual: jax.Array | None = None, **_: Any) -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes."""
    vectors = () if scale is None else (scale,)
    return rows.costs(RMSNormBody, (x,), vectors) if residual is None else rows.costs_of_sum(RMSNormBody, x, vectors)
