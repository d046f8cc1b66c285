"""LayerNorm, with an optional residual sum before it."""

from typing import Any

import jax

from kernels_pallas.core import checks, rows
from kernels_pallas.core.launch import KernelCosts
from kernels_pallas.layer_norm import reference
from kernels_pallas.layer_norm.body import LayerNormBody


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    plus_one: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return (x − mean) / √(variance + ε) · scale + bias over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    Args:
      x: [..., D] in float32, bfloat16 or float16; statistics are float32, the variance is that of x − mean.
      scale, bias: [D], of any of these dtypes; None is 1 and 0.
      residual: [..., D] like x: then s = x + residual is normalised, and both are returned.
      epsilon: a normal positive number of float32.
      plus_one: multiply by 1 + scale.
      implementation: "reference", "triton", "mosaic_gpu" or "mosaic_tpu"; None chooses by the chip being lowered for
        and the shape.

    Returns y [..., D] in x's dtype; with a residual (s, y).

    Under a mesh of several devices the kernels run inside `jax.shard_map` with D whole; elsewhere None is "reference".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    epsilon = checks.norm("layer_norm", x, {"scale": scale, "bias": bias}, residual, epsilon, plus_one)
    kernel = rows.choose_kernel(LayerNormBody, x, implementation)
    if kernel is None:
        return reference.layer_norm(x, scale, bias, residual=residual, epsilon=epsilon, plus_one=plus_one)
    body, vectors = (
        LayerNormBody(x.shape[-1], epsilon, plus_one, scale is not None, bias is not None),
        _given(scale, bias),
    )
    if residual is None:
        return rows.apply(body, kernel, (x,), vectors)
    return rows.apply_to_sum(body, kernel, x, residual, vectors)


def costs(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    **_: Any,
) -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes."""
    vectors = _given(scale, bias)
    return (
        rows.costs(LayerNormBody, (x,), vectors) if residual is None else rows.costs_of_sum(LayerNormBody, x, vectors)
    )


def _given(*vectors: jax.Array | None) -> tuple[jax.Array, ...]:
    return tuple(v for v in vectors if v is not None)
