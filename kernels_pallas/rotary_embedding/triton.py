"""Rotary position embedding on NVIDIA GPUs, compiled by Triton."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import launch
from kernels_pallas.launch import Cost

_NUMBERS = 4096  # of both halves together, per program


def run(
    x_MNH: jax.Array,
    cos_MP: jax.Array,
    sin_MP: jax.Array,
    *,
    inverse: bool,
    interleaved: bool,
    cost: Cost,
    interpret: bool,
) -> jax.Array:
    """Turn the pairs of x [M, N, H] by the angles of each row [M, H/2], or back."""
    M, N, H = x_MNH.shape
    P = H // 2
    # The halves of a pair are two places of one axis: both layouts are one kernel, on two views of the same bytes.
    x = x_MNH.reshape(M, N, P, 2) if interleaved else x_MNH.reshape(M, N, 2, P)
    p, n = pl.next_power_of_2(P), min(pl.next_power_of_2(N), max(1, _NUMBERS // pl.next_power_of_2(H)))
    m = min(max(1, _NUMBERS // (2 * n * p)), pl.next_power_of_2(M))

    def half(i: int) -> tuple:
        at = jnp.int32(i)  # interpreted loads know no Python integers
        return (slice(None), slice(None), slice(None), at) if interleaved else (slice(None), slice(None), at)

    def kernel(x_ref, cos_ref, sin_ref, y_ref) -> None:
        row = pl.program_id(0) * m + jax.lax.broadcasted_iota(jnp.int32, (m, 1), 0) < M
        pair = jax.lax.broadcasted_iota(jnp.int32, (1, p), 1) < P
        head = pl.program_id(1) * n + jax.lax.broadcasted_iota(jnp.int32, (1, n, 1), 1) < N
        angles = row & pair
        mask = jnp.broadcast_to(angles[:, None, :], (m, n, p)) & head
        cos, sin = (launch.load(ref, angles).astype(jnp.float32)[:, None, :] for ref in (cos_ref, sin_ref))
        sin = -sin if inverse else sin
        first, second = (launch.load(x_ref.at[half(i)], mask).astype(jnp.float32) for i in (0, 1))
        launch.store(y_ref.at[half(0)], first * cos - second * sin, mask)
        launch.store(y_ref.at[half(1)], second * cos + first * sin, mask)

    tile = pl.BlockSpec((m, n, p, 2) if interleaved else (m, n, 2, p), lambda i, j: (i, j, 0, 0))
    angle = pl.BlockSpec((m, p), lambda i, j: (i, 0))
    (y,) = launch.call(
        kernel,
        (x, cos_MP, sin_MP),
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        params=launch.triton(warps=4),
        grid=(pl.cdiv(M, m), pl.cdiv(N, n)),
        in_specs=[tile, angle, angle],
        out_specs=[tile],
        cost=cost,
        name="rotary_embedding_backward" if inverse else "rotary_embedding",
        interpret=interpret,
    )
    return y.reshape(M, N, H)
