"""A grouped product as XLA runs it: a loop over the tiles that have rows, which reads no other matrix.

Tiles are slices of the sorted rows in place: the end of a group's last tile has rows of the next group, whose results
that group's first tile overwrites.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

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
    R, (wide, walk) = x.shape[0], _walk(x, sizes, tile)
    padded = jnp.pad(x, ((0, tile), (0, 0)))
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def one(visit: jax.Array, y: jax.Array) -> jax.Array:
        group, start = walk.group[visit], walk.start[visit]
        matrix = _matrix_of(matrices, group)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        y_tile = jax.lax.dot_general(rows, matrix, contracted, preferred_element_type=wide)
        return jax.lax.dynamic_update_slice_in_dim(y, y_tile.astype(x.dtype), start, 0)

    N = matrices.shape[1 if transposed else 2]
    begins = jnp.zeros_like(padded, shape=(R + tile, N))
    with jax.named_scope(loop_name(tile)):
        y = jax.lax.fori_loop(0, walk.count, one, begins)[:R]
    return jnp.where(jnp.arange(R)[:, None] < walk.end[-1], y, 0)


def matrix_gradient(x: jax.Array, y: jax.Array, sizes: jax.Array, *, tile: int) -> jax.Array:
    """Return the sum of xᵀ · y over the rows of each group, [G, K, N] in x's dtype; zeros of an empty group."""
    wide, walk = _walk(x, sizes, tile)
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
        matrix = copied(jax.lax.bitcast_convert_type(matrices, jnp.uint16), group)
        return jax.lax.bitcast_convert_type(matrix, matrices.dtype)

    if matrices.dtype.itemsize != 2:
        return copied(matrices, group)
    # A CPU copies 16-bit floats number by number, and integers as memory.
    return jax.lax.platform_dependent(matrices, group, cpu=copied_as_integers, default=copied)


def _walk(x: jax.Array, sizes: jax.Array, tile: int) -> tuple[np.dtype, visits.Visits]:
    """Return the dtype of sums, and the tiles of all groups."""
    return np.promote_types(x.dtype, jnp.float32), visits.of_groups(sizes, x.shape[0], tile, alignment=1)
