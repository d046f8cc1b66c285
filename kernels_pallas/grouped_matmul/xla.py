"""A grouped product as XLA runs it: a loop over the tiles that have rows, which reads no other matrix.

Tiles are slices of the sorted rows in place: the end of a group's last tile has rows of the next group, whose results
that group's first tile overwrites.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

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


def loop_name(tile: int) -> str:
    """Return the scope in a program of the loop over tiles of so many rows, whose number sizes decide."""
    return f"tiles_of_{tile}_rows"


def product(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool, tile: int) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group."""
    wide = np.promote_types(x.dtype, jnp.float32)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply(rows: jax.Array, group: jax.Array) -> jax.Array:
        matrix = _matrix_of(matrices, group)
        return jax.lax.dot_general(rows, matrix, contracted, preferred_element_type=wide)

    return _of_tiles(multiply, x, matrices.shape[1 if transposed else 2], sizes, tile)


def quantized_product(
    x: jax.Array, values: jax.Array, scales: jax.Array, sizes: jax.Array, *, kind: str, by_outputs: bool, tile: int
) -> jax.Array:
    """Return x · matrix of each row's group, [R, N] in x's dtype; zeros past the last group. The numbers of a tile's
    matrix are made inside the loop, and of no other matrix."""

    def multiply(rows: jax.Array, group: jax.Array) -> jax.Array:
        own = (_matrix_of(each, group) for each in (values, scales))
        return quantized.product(rows, *own, kind=kind, by_outputs=by_outputs)

    return _of_tiles(multiply, x, values.shape[1 if by_outputs else 2], sizes, tile)


def quantized_gradient(
    d_y: jax.Array, values: jax.Array, scales: jax.Array, sizes: jax.Array, *, kind: str, by_outputs: bool, tile: int
) -> jax.Array:
    """Return d_y · matrixᵀ of each row's group, [R, K] in d_y's dtype; zeros past the last group."""

    def multiply(rows: jax.Array, group: jax.Array) -> jax.Array:
        own = (_matrix_of(each, group) for each in (values, scales))
        return quantized.gradient(rows, *own, kind=kind, by_outputs=by_outputs)

    K = values.shape[2 if by_outputs else 1] * (1 + KINDS[kind].packed)
    return _of_tiles(multiply, d_y, K, sizes, tile)


def _of_tiles(
    multiply: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, N: int, sizes: jax.Array, tile: int
) -> jax.Array:
    """Return multiply(rows, group), [tile, N], of all tiles, [R, N] in x's dtype; zeros past the last group."""
    R, walk = x.shape[0], _walk(x, sizes, tile)
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def one(visit: jax.Array, y: jax.Array) -> jax.Array:
        start = walk.start[visit]
        y_tile = multiply(jax.lax.dynamic_slice_in_dim(padded, start, tile), walk.group[visit])
        return jax.lax.dynamic_update_slice_in_dim(y, y_tile.astype(x.dtype), start, 0)

    begins = jnp.zeros_like(padded, shape=(R + tile, N))
    with jax.named_scope(loop_name(tile)):
        y = jax.lax.fori_loop(0, walk.count, one, begins)[:R]
    return jnp.where(jnp.arange(R)[:, None] < walk.end[-1], y, 0)


def matrix_gradient(x: jax.Array, y: jax.Array, sizes: jax.Array, *, tile: int) -> jax.Array:
    """Return the sum of xᵀ · y over the rows of each group, [G, K, N] in x's dtype; zeros of an empty group."""
    wide, walk = np.promote_types(x.dtype, jnp.float32), _walk(x, sizes, tile)
    padded_x, padded_y = (jnp.pad(each, ((0, tile), (0, 0))) for each in (x, y))
    row = jnp.arange(tile)[:, None]

    def one(visit: jax.Array, sums: jax.Array) -> jax.Array:
        group, start = walk.group[visit], walk.start[visit]
        # Both are masked: a zero times a NaN of another group's row is a NaN.
        is_own = row < walk.end[group] - start
        x_tile, y_tile = (
            jnp.where(is_own, jax.lax.dynamic_slice_in_dim(each, start, tile), 0) for each in (padded_x, padded_y)
        )
        more = jax.lax.dot_general(x_tile, y_tile, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        total = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False) + more
        return jax.lax.dynamic_update_index_in_dim(sums, total, group, 0)

    begins = jnp.zeros_like(padded_x, shape=(len(sizes), x.shape[1], y.shape[1]), dtype=wide)
    with jax.named_scope(loop_name(tile)):
        return jax.lax.fori_loop(0, walk.count, one, begins).astype(x.dtype)


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


def _walk(x: jax.Array, sizes: jax.Array, tile: int) -> visits.Visits:
    """Return the tiles of all groups."""
    return visits.of_groups(sizes, x.shape[0], tile, alignment=1)
