"""Softmax and log-softmax with temperature, soft cap and mask."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.core import checks, rows
from kernels_pallas.core.launch import KernelCosts
from kernels_pallas.softmax import reference
from kernels_pallas.softmax.body import LogSoftmaxBody, SoftmaxBody


def softmax(
    x: jax.Array,
    where: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return exp(z) / Σ exp(z) over the last dimension, z = soft_cap · tanh(x / soft_cap) / temperature.

    Args:
      x: [..., D] in float32, bfloat16 or float16; arithmetic is float32.
      where: bool [..., D]; False masks a number, whose weight is 0. A row without any True is all zeros.
      temperature: positive.
      soft_cap: positive; None caps nothing (Gemma 2, arXiv:2408.00118, section 2).
      implementation: "reference", "triton", "mosaic_gpu" or "mosaic_tpu"; None chooses by the chip being lowered for
        and the shape.

    Returns [..., D] in x's dtype.

    Under a mesh of several devices the kernels run inside `jax.shard_map` with D whole; elsewhere None is "reference".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    return _run(SoftmaxBody, reference.softmax, x, where, temperature, soft_cap, implementation)


def log_softmax(
    x: jax.Array,
    where: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return the logarithm of `softmax`, with the same arguments: −∞ where masked, also in a row without any True."""
    return _run(LogSoftmaxBody, reference.log_softmax, x, where, temperature, soft_cap, implementation)


def costs(x: jax.Array, where: jax.Array | None = None, **_: Any) -> KernelCosts:
    """Return the costs of the kernels of `softmax` on these arrays, or shapes and dtypes."""
    return rows.costs(SoftmaxBody, _operands(x, where))


def log_costs(x: jax.Array, where: jax.Array | None = None, **_: Any) -> KernelCosts:
    """Return the costs of the kernels of `log_softmax` on these arrays, or shapes and dtypes."""
    return rows.costs(LogSoftmaxBody, _operands(x, where))


def _run(body, plain, x, where, temperature, soft_cap, implementation) -> jax.Array:
    checks.matrix(body.name, x=x)
    (temperature,) = checks.positive(body.name, temperature=temperature)
    (soft_cap,) = checks.positive_or_none(body.name, soft_cap=soft_cap)
    if where is not None:
        checks.array(body.name, where=where)
    if where is not None and (where.shape, where.dtype) != (x.shape, jnp.dtype(bool)):
        raise ValueError(
            f"{body.name}: where is {where.dtype}{list(where.shape)}; it must be bool{list(x.shape)}, as large as x"
        )
    kernel = rows.choose_kernel(body, x, implementation)
    if kernel is None:
        return plain(x, where, temperature=temperature, soft_cap=soft_cap)
    return rows.apply(body(temperature, soft_cap), kernel, _operands(x, where))


def _operands(x, where) -> tuple:
    return (x,) if where is None else (x, where)
