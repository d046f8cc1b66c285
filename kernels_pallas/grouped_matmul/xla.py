"""A grouped product as XLA runs it: a loop over the tiles that have rows, which reads no other matrix.

Tiles are slices of the sorted rows in place: the end of a group's last tile has rows of the next group, whose results
that group's first tile overwrites. On a CPU a tile multiplies only as many of its rows as its group needs, in one of a
few lengths. For the gradients of matrices the first rows of all groups are one product, where groups have enough.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import target
from kernels_pallas.core.quantized import xla as quantized
from kernels_pallas.core.quantized.formats import KINDS
from kernels_pallas.grouped_matmul import visits


def tile_rows(rows: int, groups: int) -> int:
    """Return the rows of a tile, by how many a group has on average: so many that most groups need one tile, since each
    tile reads its matrix anew. With matrices [N, K] all sizes give equal bits on a CPU; a tile of one row would not."""
    each = rows / groups
    if each < 4:
        return 2 ** max(1, math.ceil(math.log2(2 * each)))
    return min(32 * math.ceil(1.25 * each / 32), 256)


def tile_lengths(tile: int, platform: str | None) -> tuple[int, ...]:
    """Return the numbers of rows of which a tile multiplies the least that has those of its group. Only a CPU has more
    than one: elsewhere each tile would wait for the host to choose."""
    step = 32 if tile <= 128 else 64
    return (*range(step, tile, step), tile) if platform == "cpu" else (tile,)


class GradientRows(NamedTuple):
    """The rows of each group that products for the gradient of its matrix have: `first` those of one product of all
    groups, `tile` those of each tile of the others."""

    first: int
    tile: int


def gradient_rows(rows: int, groups: int) -> GradientRows:
    """Return the rows of products for the gradients of matrices, by how many rows a group has on average: half of that
    at first, so that few are computed for nothing whatever the sizes are. A loop reads and writes the sum of its group
    in each trip; the first product makes all sums at once."""
    each = rows / groups
    if not 4 <= each <= 128:  # most groups have no rows, or several tiles
        return GradientRows(0, tile_rows(rows, groups))
    half = 8 * math.ceil(each / 16)
    return GradientRows(half, 2 * half)


def loop_name(tile: int, after: int = 0) -> str:
    """Return the scope in a program of the loop over tiles of so many rows, whose number sizes decide; `after`: the
    rows of each group that it leaves out."""
    return f"tiles_of_{tile}_rows" + (f"_after_{after}" if after else "")


def product(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool, tile: int) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group."""
    wide = np.promote_types(x.dtype, jnp.float32)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        return jax.lax.dot_general(rows, matrix, contracted, preferred_element_type=wide)

    return _of_tiles(multiply, x, (matrices,), matrices.shape[1 if transposed else 2], sizes, tile)


def quantized_product(
    x: jax.Array, values: jax.Array, scales: jax.Array, sizes: jax.Array, *, kind: str, by_outputs: bool, tile: int
) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group. The numbers of a tile's
    matrix are made inside the loop, and of no other matrix."""

    def multiply(rows: jax.Array, *matrix: jax.Array) -> jax.Array:
        return quantized.product(rows, *matrix, kind=kind, by_outputs=by_outputs)

    return _of_tiles(multiply, x, (values, scales), values.shape[1 if by_outputs else 2], sizes, tile)


def quantized_gradient(
    d_y: jax.Array, values: jax.Array, scales: jax.Array, sizes: jax.Array, *, kind: str, by_outputs: bool, tile: int
) -> jax.Array:
    """Return d_y · matrixᵀ of each row's group, [R, K] in d_y's dtype; zeros past the last group."""

    def multiply(rows: jax.Array, *matrix: jax.Array) -> jax.Array:
        return quantized.gradient(rows, *matrix, kind=kind, by_outputs=by_outputs)

    K = values.shape[2 if by_outputs else 1] * (1 + KINDS[kind].packed)
    return _of_tiles(multiply, d_y, (values, scales), K, sizes, tile)


def _of_tiles(
    multiply: Callable[..., jax.Array], x: jax.Array, parts: Sequence[jax.Array], N: int, sizes: jax.Array, tile: int
) -> jax.Array:
    """Return multiply(rows, *matrix), [rows, N], of all tiles, [R, N] in x's dtype; zeros past the last group. `parts`:
    the arrays of all matrices."""
    R, walk = x.shape[0], _walk(x, sizes, tile)
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def one(visit: jax.Array, y: jax.Array) -> jax.Array:
        start, group = walk.start[visit], walk.group[visit]
        matrix = [_matrix_of(each, group) for each in parts]

        def of_first(rows: int) -> jax.Array:
            y_rows = multiply(jax.lax.dynamic_slice_in_dim(padded, start, rows), *matrix)
            return jnp.pad(y_rows.astype(x.dtype), ((0, tile - rows), (0, 0)))

        y_tile = _of_length(of_first, tile_lengths(tile, target.platform()), walk.end[group] - start)
        return jax.lax.dynamic_update_slice_in_dim(y, y_tile, start, 0)

    begins = jnp.zeros_like(padded, shape=(R + tile, N))
    with jax.named_scope(loop_name(tile)):
        y = jax.lax.fori_loop(0, walk.count, one, begins)[:R]
    return jnp.where(jnp.arange(R)[:, None] < walk.end[-1], y, 0)


def _of_length(function: Callable[[int], jax.Array], lengths: Sequence[int], rows: jax.Array) -> jax.Array:
    """Return function(length) for the least length that is at least `rows`, or the last."""
    if len(lengths) == 1:
        return function(lengths[0])
    which = sum((rows > length).astype(jnp.int32) for length in lengths[:-1])
    return jax.lax.switch(which, [partial(function, length) for length in lengths])


def matrix_gradient(x: jax.Array, y: jax.Array, sizes: jax.Array, *, rows: GradientRows) -> jax.Array:
    """Return the sum of xᵀ · y over the rows of each group, [G, K, N] in x's dtype; zeros of an empty group."""
    first, tile = rows
    lengths = tile_lengths(tile, target.platform())
    wide, walk = np.promote_types(x.dtype, jnp.float32), _walk(x, sizes, tile, after=first)
    padded = [jnp.pad(each, ((0, max(rows)), (0, 0))) for each in (x, y)]

    def of_rows(start: jax.Array, end: jax.Array, length: int) -> jax.Array:
        # Both are masked: a zero times a NaN of another group's row is a NaN.
        is_own = jnp.arange(length)[:, None] < end - start
        own = (jnp.where(is_own, jax.lax.dynamic_slice_in_dim(each, start, length), 0) for each in padded)
        return jax.lax.dot_general(*own, (((0,), (0,)), ((), ())), preferred_element_type=wide)

    def add(visit: jax.Array, sums: jax.Array) -> jax.Array:
        start, group = walk.start[visit], walk.group[visit]
        end = walk.end[group]
        more = _of_length(partial(of_rows, start, end), lengths, end - start)
        total = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False) + more
        return jax.lax.dynamic_update_index_in_dim(sums, total, group, 0)

    if first:
        sums = jax.vmap(lambda begin, end: of_rows(begin, end, first))(walk.begin, walk.end)
    else:
        sums = jnp.zeros_like(x, shape=(len(sizes), x.shape[1], y.shape[1]), dtype=wide)
    with jax.named_scope(loop_name(tile, first)):
        return jax.lax.fori_loop(0, walk.count, add, sums).astype(x.dtype)


def _matrix_of(matrices: jax.Array, group: jax.Array) -> jax.Array:
    """Return the matrix of a group."""

    def copied(matrices: jax.Array, group: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(matrices, group, keepdims=False)

    def copied_as_integers(matrices: jax.Array, group: jax.Array) -> jax.Array:
        # The barrier keeps XLA from converting all matrices in front of the loop.
        matrices, group = jax.lax.optimization_barrier((matrices, group))
        matrix = copied(jax.lax.bitcast_convert_type(matrices, f"uint{8 * matrices.dtype.itemsize}"), group)
        return jax.lax.bitcast_convert_type(matrix, matrices.dtype)

    if matrices.dtype.itemsize > 2 or jnp.issubdtype(matrices.dtype, jnp.integer):
        return copied(matrices, group)
    # A CPU copies floats of 16 and 8 bits number by number, and integers as memory.
    return jax.lax.platform_dependent(matrices, group, cpu=copied_as_integers, default=copied)


def _walk(x: jax.Array, sizes: jax.Array, tile: int, after: int = 0) -> visits.Visits:
    """Return the tiles of all groups, without so many first rows of each."""
    return visits.of_groups(sizes, x.shape[0], tile, alignment=1, after=after)
