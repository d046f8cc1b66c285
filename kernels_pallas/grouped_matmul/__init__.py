"""A product of groups of rows, each with a matrix of its own: the experts of a mixture, without padding or dropping.

The sizes of groups are known at run time only. Every implementation walks over tiles of the sorted rows, and reads
the matrices of groups that have rows; `visits.py` has the walk.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from kernels_pallas.core import checks, rows
from kernels_pallas.core.choice import choose
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.grouped_matmul import mosaic_gpu, mosaic_tpu, reference, triton, visits, xla
from kernels_pallas.grouped_matmul.quantized import quantized_grouped_matmul

__all__ = ["grouped_matmul", "quantized_grouped_matmul"]

# In order of preference.
KERNELS = {"triton": triton, "mosaic_gpu": mosaic_gpu, "mosaic_tpu": mosaic_tpu}
_UNMEASURED = ("mosaic_gpu",)  # beside Triton's, which serve more calls


def grouped_matmul(
    x: jax.Array,
    matrices: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    expected: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return x[r] · matrices[g] for each row r of group g: the first sizes[0] rows are of group 0, the next sizes[1]
    of group 1, and so on (MegaBlocks, arXiv:2211.15841, computes experts so).

    A row's result depends on that row and its group's matrix alone: not on other rows, not even on NaNs in them. On a
    CPU "xla" gives it to the bit whatever the other groups are, and with `transposed` matrices however many rows there
    are. The gradient of a matrix without rows is zero.

    Args:
      x: [R, K], rows sorted by group, in float32, bfloat16 or float16; sums are float32. Float32 products have the
        precision of `jax.default_matmul_precision`.
      matrices: [G, K, N] in x's dtype, or [G, N, K] where `transposed`.
      sizes: int32 [G], 0 or more. Rows past the last group have zeros as their result, and no gradient.
      expected: the rows that groups are expected to have together, where x has room for more: those that the kernels'
        costs state; None: all.
      implementation: "reference", "xla", "triton", "mosaic_gpu" (Hopper) or "mosaic_tpu"; None chooses by the chip
        being lowered for and the shape, and takes "mosaic_gpu" only where JAX no longer lowers Triton.

    Returns [R, N] in x's dtype.

    Under a mesh of several devices the kernels run inside `jax.shard_map`; elsewhere None is "xla".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    _check(x, matrices, sizes, transposed)
    serves = functools.partial(rows.unsupported_reason, x, max_width=None)
    reasons = dict.fromkeys(KERNELS, serves) | {"xla": lambda chip: None}
    N = matrices.shape[1 if transposed else 2]
    reasons["mosaic_gpu"] = lambda chip: serves(chip) or mosaic_gpu.unsupported_reason(x, N)
    chosen = choose("grouped_matmul", implementation, reasons, by_name=_UNMEASURED, call=CallClass.of_rows(x))
    if chosen == "reference" or 0 in (x.size, matrices.size):
        return reference.grouped_matmul(x, matrices, sizes, transposed=transposed)
    return _grouped(_GroupedSettings(transposed, chosen, expected), *vary(x, matrices, sizes))


def costs(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False) -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes, with every row in a group and every matrix read.

    The rows that tiles compute for nothing are left out (`computed_rows`): how many these are, sizes decide.
    """
    y = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[1 if transposed else 2]), x.dtype)
    each = _cost(x, y, matrices)
    return KernelCosts(each, KernelCost(2 * each.flops, 0, 2 * each.bytes))


def computed_rows(
    tokens: int,
    choices: int,
    groups: int,
    dtype: np.dtype,
    implementation: str,
    platform: str | None,
    multiplied: int | None = None,
    room: int | None = None,
) -> visits.TileRows:
    """Return the rows that a product computes for tokens each of which chooses so many of the groups, with tiles that
    are not tuned. `multiplied`: the groups whose rows are multiplied; all where None. `room`: the rows of x, which may
    be more; None: those that tokens choose."""
    multiplied = groups if multiplied is None else multiplied
    rows = tokens * choices if room is None else room
    lengths: tuple[int, ...] = ()
    if implementation == "xla":
        tile = xla.tile_rows(rows, multiplied)
        lengths = xla.tile_lengths(tile, platform)
    else:
        tile = {"triton": triton, "mosaic_tpu": mosaic_tpu}[implementation].tile_rows(rows, multiplied, dtype)
    is_aligned = implementation == "mosaic_tpu"
    return visits.computed_rows(tokens, choices, groups, tile, is_aligned, multiplied, room, lengths)


class _GroupedSettings(NamedTuple):
    transposed: bool
    implementation: str
    expected: int | None

    def cost(self, x, y, matrices) -> KernelCost:
        """Return the cost of one product of the rows that are expected."""
        return _cost(*(_expected(each, self.expected) for each in (x, y)), matrices)


def _expected(x, rows: int | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(x) if rows is None else rows, x.shape[1]), x.dtype)


def _cost(x, y, matrices) -> KernelCost:
    return KernelCost(2 * x.size * y.shape[1], 0, size_of(x, y, matrices))


@compiled_once(static=2)
def _product(name: str, settings: _GroupedSettings, x, matrices, sizes) -> jax.Array:
    if settings.implementation == "xla":
        tile = xla.tile_rows(len(x), len(sizes))
        return xla.product(x, matrices, sizes, transposed=settings.transposed, tile=tile)
    y = jax.ShapeDtypeStruct((len(x), matrices.shape[1 if settings.transposed else 2]), x.dtype)
    run, cost = KERNELS[settings.implementation].product, settings.cost(x, y, matrices)
    return run(x, matrices, sizes, transposed=settings.transposed, cost=cost, name=name)


@compiled_once(static=1)
def _matrix_gradient(settings: _GroupedSettings, x, y, sizes) -> jax.Array:
    if settings.implementation == "xla":
        return xla.matrix_gradient(x, y, sizes, rows=xla.gradient_rows(len(x), len(sizes)))
    matrices = jax.ShapeDtypeStruct((len(sizes), x.shape[1], y.shape[1]), x.dtype)
    run, cost = KERNELS[settings.implementation].matrix_gradient, settings.cost(x, y, matrices)
    return run(x, y, sizes, cost=cost, name="grouped_matmul_backward_matrices")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(settings, x, matrices, sizes):
    return _product("grouped_matmul", settings, x, matrices, sizes)


def _fwd(settings, x, matrices, sizes):
    return _grouped(settings, x, matrices, sizes), (x, matrices, sizes)


def _bwd(settings, saved, d_y):
    x, matrices, sizes = saved
    turned = settings._replace(transposed=not settings.transposed)
    d_x = _product("grouped_matmul_backward_x", turned, d_y, matrices, sizes)
    d_matrices = _matrix_gradient(settings, *((d_y, x) if settings.transposed else (x, d_y)), sizes)
    return d_x, d_matrices, np.zeros(sizes.shape, jax.dtypes.float0)


_grouped.defvjp(_fwd, _bwd)


def _check(x, matrices, sizes, transposed) -> None:
    checks.array("grouped_matmul", x=x, matrices=matrices, sizes=sizes)
    checks.floating("grouped_matmul", x=x, matrices=matrices)
    checks.boolean("grouped_matmul", transposed=transposed)
    wanted = "[G, N, K]" if transposed else "[G, K, N]"
    inner = 2 if transposed else 1
    fits = x.ndim == 2 and matrices.ndim == 3 and x.shape[1] == matrices.shape[inner] and x.dtype == matrices.dtype
    if not fits or matrices.shape[0] == 0:
        raise ValueError(
            f"grouped_matmul: x is {x.dtype}{list(x.shape)} and matrices are {matrices.dtype}{list(matrices.shape)}; "
            f"they must be [R, K] and {wanted} of one dtype, with a group or more"
        )
    visits.check_sizes("grouped_matmul", sizes, matrices.shape[0], x.shape[0])
