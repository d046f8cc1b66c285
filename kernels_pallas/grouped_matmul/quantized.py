"""The grouped product with frozen matrices whose numbers are stored in eight or four bits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import checks, rows
from kernels_pallas.core.choice import choose
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.core.quantized import formats, serving
from kernels_pallas.grouped_matmul import mosaic_tpu, reference, triton, visits, xla

# In order of preference.
KERNELS = {"triton": triton, "mosaic_tpu": mosaic_tpu}
_NAME = "quantized_grouped_matmul"


def quantized_grouped_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    sizes: jax.Array,
    *,
    kind: str,
    by_outputs: bool = False,
    expected: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return x[r] · matrices[g] for each row r of group g, of matrices that `values` and `scales` are the parts of.

    Groups are those of `grouped_matmul`, and the parts of each matrix those of `quantized_matmul`, with its kinds and
    roundings. The numbers of a matrix are made where a tile of rows is multiplied: never those of all matrices at once,
    and of no matrix without rows.

    A row's result depends on that row and its group's matrix alone. On a CPU "xla" gives it to the bit whatever the
    other groups are, and with matrices by their outputs however many rows there are.

    Args:
      x: [R, K], rows sorted by group, in float32, bfloat16 or float16; sums are float32.
      values, scales: [G, K, N], of two numbers in a byte [G, K/2, N], and [G, K's groups, N's groups]; or with
        `by_outputs` the last two axes of both turned.
      sizes: int32 [G], 0 or more. Rows past the last group have zeros as their result, and no gradient.
      kind: "int8", "w8a8", "int4", "fp8" or "mxfp4".
      expected: the rows that groups are expected to have together, where x has room for more: those that the kernels'
        costs state; None: all.
      implementation: "reference", "xla", "triton" or "mosaic_tpu"; None chooses by the chip being lowered for and the
        shape. Kernels read matrices by their inputs alone.

    Returns [R, N] in x's dtype. Only x has a gradient. XLA computes it for every implementation but the reference, of
    matrices that it rounds to x's dtype; the gradient of "w8a8" is that of rows that are not rounded.

    Under a mesh of several devices the kernels run inside `jax.shard_map`; elsewhere None is "xla".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    N = _check(x, values, scales, sizes, kind, by_outputs)
    reasons = {
        name: functools.partial(_unsupported_reason, name, x, values, scales, kind, by_outputs) for name in KERNELS
    }
    chosen = choose(_NAME, implementation, reasons | {"xla": lambda chip: None}, call=CallClass.of_rows(x))
    if chosen == "reference" or 0 in (x.size, N):
        return reference.quantized_grouped_matmul(x, values, scales, sizes, kind=kind, by_outputs=by_outputs)
    return _grouped(_Settings(kind, by_outputs, chosen, expected), *vary(x, values, scales, sizes))


def costs(
    x: jax.Array, values: jax.Array, scales: jax.Array, sizes: jax.Array, *, kind: str, by_outputs: bool = False
) -> KernelCosts:
    """Return the costs on these arrays, or shapes and dtypes, with every row in a group and every matrix read.

    Forward each byte moves once, as it is stored; backward matrices are in x's dtype, and the sums in float32.
    """
    (R, K), N = x.shape, values.shape[1 if by_outputs else 2]
    y, matrices = (jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((R, N), (len(values), K, N)))
    sums = jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    flops = 2 * R * K * N
    return KernelCosts(
        KernelCost(flops, 0, size_of(x, values, scales, y)), KernelCost(flops, 0, size_of(y, matrices, sums))
    )


class _Settings(NamedTuple):
    kind: str
    by_outputs: bool
    implementation: str
    expected: int | None


def _unsupported_reason(name, x, values, scales, kind, by_outputs, chip) -> str | None:
    reason = rows.unsupported_reason(x, chip, max_width=None)
    return reason or serving.unsupported_reason(name, kind, by_outputs, values.shape[1], scales.shape[1])


@compiled_once(static=1)
def _product(settings: _Settings, x, values, scales, sizes) -> jax.Array:
    kind, by_outputs, implementation, expected = settings
    if implementation == "xla":
        tile = xla.tile_rows(len(x), len(sizes))
        return xla.quantized_product(x, values, scales, sizes, kind=kind, by_outputs=by_outputs, tile=tile)
    rows = jax.ShapeDtypeStruct((len(x) if expected is None else expected, x.shape[1]), x.dtype)
    cost = costs(rows, values, scales, sizes, kind=kind).forward
    per_output = jnp.repeat(scales, values.shape[2] // scales.shape[2], axis=2)
    run = KERNELS[implementation].quantized_product
    return run(x, values, per_output, sizes, kind=kind, cost=cost, name=_NAME)


@compiled_once(static=1)
def _gradient(settings: _Settings, d_y, values, scales, sizes) -> jax.Array:
    tile = xla.tile_rows(len(d_y), len(sizes))
    return xla.quantized_gradient(
        d_y, values, scales, sizes, kind=settings.kind, by_outputs=settings.by_outputs, tile=tile
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(settings, x, values, scales, sizes):
    return _product(settings, x, values, scales, sizes)


def _fwd(settings, x, values, scales, sizes):
    return _grouped(settings, x, values, scales, sizes), (values, scales, sizes)


def _bwd(settings, saved, d_y):
    values, scales, sizes = saved
    return _gradient(settings, d_y, *saved), None, None, np.zeros(sizes.shape, jax.dtypes.float0)


_grouped.defvjp(_fwd, _bwd)


def _check(x, values, scales, sizes, kind, by_outputs) -> int:
    """Check the operands; return N."""
    checks.array(_NAME, x=x, sizes=sizes)
    checks.floating(_NAME, x=x)
    K, N = formats.check(_NAME, values, scales, kind, by_outputs, stacked=True)
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"{_NAME}: x has shape {list(x.shape)}; it must be [R, {K}], as matrices have {K} inputs")
    visits.check_sizes(_NAME, sizes, len(values), x.shape[0])
    return N
