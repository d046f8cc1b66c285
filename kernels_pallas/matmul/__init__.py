"""A matrix product with bias, activation and residual in its epilogue: the kernel to learn from.

`triton.py` shows reuse on a GPU: a program's tile of the result stays in registers while tiles of both operands stream
through shared memory, several in flight. Programs that share operands run close together, for the L2 cache.
`mosaic_tpu.py` shows reuse on a TPU: a sequential grid whose innermost axis accumulates a sum in VMEM, while the
pipeline fetches the next tiles. `tiles.py` has the parts that both share, the product of two tiles and the epilogue.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core import activations, checks, rows
from kernels_pallas.core.choice import choose
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.core.target import TargetChip
from kernels_pallas.matmul import mosaic_tpu, reference, triton
from kernels_pallas.matmul.tiles import MatmulProduct

_RUN = {"triton": triton.run, "mosaic_tpu": mosaic_tpu.run}
IMPLEMENTATIONS = tuple(_RUN)
# Algorithms of `jax.lax.DotAlgorithmPreset` by which these multiply float32; others may crash Triton's compiler.
_ALGORITHMS = {
    "triton": {
        "F32_F32_F32",
        "TF32_TF32_F32",
        "TF32_TF32_F32_X3",
        "BF16_BF16_F32",
        "BF16_BF16_F32_X3",
        "BF16_BF16_F32_X6",
    },
    "mosaic_tpu": set(),
}


def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return activation(a · b + bias) + residual, rounded once.

    Args:
      a: [..., K], b: [K, N], of one dtype, float32, bfloat16 or float16; sums are float32. Float32 products have the
        precision of `jax.default_matmul_precision`, as everywhere in JAX; on TPUs "high" is "highest".
      bias: [N], residual: [..., N] in a's dtype.
      activation: "gelu", "gelu_tanh", "silu", "relu", "relu_squared" or None.
      implementation: "reference", "triton" or "mosaic_tpu"; None chooses by the chip being lowered for and the shape.

    Returns [..., N] in a's dtype. When differentiated with an activation, a · b + bias is saved in that dtype.

    Under a mesh of several devices the kernels run inside `jax.shard_map`; elsewhere None is "reference".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    _check(a, b, bias, residual)
    activations.check("matmul", activation)
    reasons = {name: functools.partial(_unsupported_reason, name, a) for name in _RUN}
    chosen = choose("matmul", implementation, reasons, call=CallClass.of_rows(a))
    if chosen == "reference" or 0 in (a.size, b.size):
        return reference.matmul(a, b, bias, residual, activation=activation)
    shape = (*a.shape[:-1], b.shape[1])
    flat = None if residual is None else residual.reshape(-1, b.shape[1])
    operands = vary(a.reshape(-1, a.shape[-1]), b, bias, flat)
    return _matmul(_MatmulSettings(activation, chosen), *operands).reshape(shape)


def costs(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    activation: str | None = None,
) -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes, where they are differentiated."""
    rows, products = math.prod(a.shape[:-1]), 2 * a.size * b.shape[1]
    y = jax.ShapeDtypeStruct((rows, b.shape[1]), a.dtype)
    forward = _cost(_product(activation, bias, residual, keeps_sum=activation is not None), a, b, bias, residual, y)
    return KernelCosts(forward, KernelCost(2 * products, 0, 2 * size_of(a, b, y)))


def _unsupported_reason(name: str, a: jax.Array, chip: TargetChip) -> str | None:
    asked = jax.config.jax_default_matmul_precision
    if a.dtype == jnp.float32 and asked in jax.lax.DotAlgorithmPreset.__members__ and asked not in _ALGORITHMS[name]:
        return f"it does not multiply float32 by {asked}, which jax.default_matmul_precision says"
    return rows.unsupported_reason(a, chip, max_width=None)


class _MatmulSettings(NamedTuple):
    activation: str | None
    implementation: str


def _product(activation, bias, residual, keeps_sum: bool) -> MatmulProduct:
    return MatmulProduct((False, False), bias is not None, activation, residual is not None, keeps_sum)


def _cost(product: MatmulProduct, a, b, bias, residual, y) -> KernelCost:
    extra = product.biased + product.added + (activations.FLOPS[product.activation][0] if product.activation else 0)
    transcendentals = activations.TRANSCENDENTALS[product.activation][0] if product.activation else 0
    flops = 2 * a.size * y.shape[-1] + extra * y.size
    written = (y,) * (1 + product.keeps_sum)
    return KernelCost(flops, transcendentals * y.size, size_of(a, b, bias, residual, *written))


@compiled_once(static=3)
def _run(name: str, settings: _MatmulSettings, product: MatmulProduct, a, b, bias=None, residual=None) -> list:
    M, N, K = product.sizes(a, b)
    y = jax.ShapeDtypeStruct((M, N), a.dtype)
    cost = _cost(product, jax.ShapeDtypeStruct((M, K), a.dtype), b, bias, residual, y)
    run = _RUN[settings.implementation]
    return run(product, a, b, bias, residual, cost=cost, name=name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(settings, a, b, bias, residual):
    (y,) = _run("matmul", settings, _product(settings.activation, bias, residual, False), a, b, bias, residual)
    return y


def _fwd(settings, a, b, bias, residual):
    keeps = settings.activation is not None
    y, *z = _run("matmul", settings, _product(settings.activation, bias, residual, keeps), a, b, bias, residual)
    return y, (a, b, z, bias, residual)


def _bwd(settings, saved, d_y):
    a, b, z, bias, residual = saved
    d_z = d_y
    if z:
        # A sum that a narrow dtype cannot hold was saved as an infinity, where derivatives are NaN.
        most = float(jnp.finfo(a.dtype).max)
        wide = jnp.clip(z[0].astype(jnp.float32), -most, most)
        d_z = jax.vjp(activations.REFERENCE[settings.activation], wide)[1](d_y.astype(jnp.float32))[0].astype(a.dtype)
    (d_a,) = _run("matmul_backward_a", settings, MatmulProduct(transposed=(False, True)), d_z, b)
    (d_b,) = _run("matmul_backward_b", settings, MatmulProduct(transposed=(True, False)), a, d_z)
    d_bias = None if bias is None else jnp.sum(d_z, axis=0, dtype=jnp.float32).astype(bias.dtype)
    return d_a, d_b, d_bias, None if residual is None else d_y


_matmul.defvjp(_fwd, _bwd)


def _check(a, b, bias, residual) -> None:
    checks.array("matmul", a=a, b=b)
    checks.floating("matmul", a=a, b=b, bias=bias, residual=residual)
    if a.ndim == 0 or b.ndim != 2 or a.shape[-1] != b.shape[0] or a.dtype != b.dtype:
        raise ValueError(
            f"matmul: a is {a.dtype}{list(a.shape)} and b is {b.dtype}{list(b.shape)}; "
            "they must be [..., K] and [K, N] of one dtype"
        )
    if bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(f"matmul: bias has shape {list(bias.shape)}; it must be {list(b.shape[1:])}")
    wanted = (*a.shape[:-1], b.shape[1])
    if residual is not None and (residual.shape, residual.dtype) != (wanted, a.dtype):
        raise ValueError(
            f"matmul: residual is {residual.dtype}{list(residual.shape)}; it must be {a.dtype}{list(wanted)}"
        )
