"""A product with a matrix whose numbers are stored in eight or four bits: weights alone, which are frozen.

A step of decoding reads every weight for a few rows, so that its time is that of the bytes. Kernels read values as they
are stored, and make numbers of them on the chip.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core import checks, rows
from kernels_pallas.core.choice import choose
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.core.quantized import formats, serving, xla
from kernels_pallas.core.quantized.formats import KINDS, dequantize, quantize
from kernels_pallas.quantized_matmul import mosaic_tpu, reference, triton

__all__ = ["KINDS", "dequantize", "quantize", "quantized_matmul"]

# In order of preference.
KERNELS = {"triton": triton, "mosaic_tpu": mosaic_tpu}


def quantized_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    kind: str,
    by_outputs: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return x · matrix, of a matrix that `values` and `scales` are the parts of.

    The number of input k and output n is values[k, n] · scales[k // (K / G), n // (N / H)]. `quantize` makes the parts
    of a matrix, and transposing both makes those by outputs.

    kind       | values                          | scales
    "int8"     | int8 [K, N]                     | float32 [G, H]
    "w8a8"     | int8 [K, N]                     | float32 [1, H], and x is rounded too
    "int4"     | uint8 [K/2, N], numbers −8 … 7  | float32 [G, H], of groups of an even number of inputs
    "fp8"      | float8_e4m3fn [K, N]            | float32 [G, H]
    "mxfp4"    | uint8 [K/2, N], numbers in E2M1 | uint8 [K/32, H], exponents in E8M0

    Two numbers in a byte are two's complement of four bits, or E2M1: within a group of inputs the first half lies in
    the low nibbles, the second half in the high nibbles of the same bytes, in order.

    Nothing is rounded but the result, with two exceptions. "w8a8" rounds each row of x to int8, by the scale that makes
    its largest magnitude 127. Scales of groups of inputs multiply the numbers before the product, which are then in x's
    dtype, in "mosaic_tpu" (groups of fewer than 128 stored rows), in "triton" (of 33 rows of x or more, where a step
    multiplies several groups), and in "xla" on other chips than CPUs.

    On a CPU kinds but "w8a8" save memory, and cost time of few rows and of many: of 2048 × 8192 by outputs "int8" takes
    1.4 times as long as float32 for 2 rows, "int4" 1.5 and "w8a8" a third (benchmarks/quantized_matmul.py).

    On a CPU "xla" gives a row to the bit whatever the other rows are, and with a matrix by its outputs however many
    there are.

    Args:
      x: [..., K] in float32, bfloat16 or float16; sums are float32.
      values, scales: as above; or with `by_outputs` both transposed, [N, K] or [N, K/2], and [H, G].
      implementation: "reference", "xla", "triton" or "mosaic_tpu"; None chooses by the chip being lowered for and the
        shape. Kernels read matrices by their inputs alone.

    Returns [..., N] in x's dtype. Only x has a gradient. XLA computes it for every implementation but the reference, of
    a matrix that it rounds to x's dtype; the gradient of "w8a8" is that of rows that are not rounded.

    Under a mesh of several devices the kernels run inside `jax.shard_map`; elsewhere None is "xla".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    N = _check(x, values, scales, kind, by_outputs)
    reasons = {
        name: functools.partial(_unsupported_reason, name, x, values, scales, kind, by_outputs) for name in KERNELS
    }
    call = CallClass.of_rows(x)
    chosen = choose("quantized_matmul", implementation, reasons | {"xla": lambda chip: None}, call=call)
    if chosen == "reference" or 0 in (x.size, values.size):
        return reference.quantized_matmul(x, values, scales, kind=kind, by_outputs=by_outputs)
    operands = vary(x.reshape(-1, x.shape[-1]), values, scales)
    return _quantized(_QuantizedSettings(kind, by_outputs, chosen), *operands).reshape(*x.shape[:-1], N)


def costs(x: jax.Array, values: jax.Array, scales: jax.Array, *, kind: str, by_outputs: bool = False) -> KernelCosts:
    """Return the costs on these arrays, or shapes and dtypes.

    Forward each byte moves once, as it is stored; backward the matrix is in x's dtype, and the sums in float32.
    """
    K, N = x.shape[-1], values.shape[0 if by_outputs else 1]
    y, matrix = (jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((math.prod(x.shape[:-1]), N), (K, N)))
    flops = 2 * x.size * N
    sums = jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    backward = KernelCost(flops, 0, size_of(y, matrix, sums))
    return KernelCosts(KernelCost(flops, 0, size_of(x, values, scales, y)), backward)


class _QuantizedSettings(NamedTuple):
    kind: str
    by_outputs: bool
    implementation: str


def _unsupported_reason(name, x, values, scales, kind, by_outputs, chip) -> str | None:
    reason = rows.unsupported_reason(x, chip, max_width=None)
    return reason or serving.unsupported_reason(name, kind, by_outputs, values.shape[0], scales.shape[0])


@compiled_once(static=1)
def _product(settings: _QuantizedSettings, x, values, scales) -> jax.Array:
    if settings.implementation == "xla":
        return xla.product(x, values, scales, kind=settings.kind, by_outputs=settings.by_outputs)
    cost = costs(x, values, scales, kind=settings.kind).forward
    per_output = jnp.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
    run = KERNELS[settings.implementation].product
    return run(x, values, per_output, kind=settings.kind, cost=cost, name="quantized_matmul")


@compiled_once(static=1)
def _gradient(settings: _QuantizedSettings, d_y, values, scales) -> jax.Array:
    return xla.gradient(d_y, values, scales, kind=settings.kind, by_outputs=settings.by_outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(settings, x, values, scales):
    return _product(settings, x, values, scales)


def _fwd(settings, x, values, scales):
    return _quantized(settings, x, values, scales), (values, scales)


def _bwd(settings, saved, d_y):
    return _gradient(settings, d_y, *saved), None, None


_quantized.defvjp(_fwd, _bwd)


def _check(x, values, scales, kind, by_outputs) -> int:
    """Check the operands; return N."""
    checks.matrix("quantized_matmul", x=x)
    K, N = formats.check("quantized_matmul", values, scales, kind, by_outputs)
    if x.shape[-1] != K:
        raise ValueError(f"quantized_matmul: x has shape {list(x.shape)}, and the matrix {K} inputs")
    return N
