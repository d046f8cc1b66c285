"""Rotary position embedding on NVIDIA GPUs, compiled by Triton."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.rotary_embedding.angles import tables_of_blocks


class RotaryTritonBlocks(NamedTuple):
    """A block of `numbers` (a power of two; both halves together) in registers, computed by `warps` of 32 threads."""

    numbers: int = 4096
    warps: int = 4


def run(
    x_MNH: jax.Array,
    cos_AP: jax.Array,
    sin_AP: jax.Array,
    *,
    inverse: bool,
    interleaved: bool,
    cost: KernelCost,
) -> jax.Array:
    """Rotate the pairs of x [M, N, H] by angles [A, H/2], or back; row i by row i modulo A, which divides M."""
    M, N, H = x_MNH.shape
    P = H // 2
    # Adjacent pairs are read as they lie and split in registers: a thread reads 16 bytes at a time.
    x = x_MNH if interleaved else x_MNH.reshape(M, N, 2, P)
    name = "rotary_embedding_backward" if inverse else "rotary_embedding"
    blocks = tuning.blocks(name, "triton", (N, H), x_MNH.dtype, RotaryTritonBlocks())
    p, n = pl.next_power_of_2(P), min(pl.next_power_of_2(N), max(1, blocks.numbers // pl.next_power_of_2(H)))
    m = min(max(1, blocks.numbers // (2 * n * p)), pl.next_power_of_2(M))
    cos, sin, index = tables_of_blocks(cos_AP, sin_AP, M, m)

    def load(ref: Any, mask: jax.Array) -> Sequence[jax.Array]:
        if not interleaved:
            return [launch.load(ref.at[_half(i)], mask) for i in (0, 1)]
        pairs = launch.load(ref, _twice(mask)).reshape(m, n, p, 2)
        return [half.reshape(m, n, p) for half in jnp.split(pairs, 2, axis=3)]

    def store(ref: Any, pairs: Sequence[jax.Array], mask: jax.Array) -> None:
        if not interleaved:
            for i, half in enumerate(pairs):
                launch.store(ref.at[_half(i)], half, mask)
        else:
            both = jnp.concatenate([half[..., None] for half in pairs], axis=3)
            launch.store(ref, both.reshape(m, n, 2 * p), _twice(mask))

    def kernel(x_ref, cos_ref, sin_ref, y_ref) -> None:
        row = pl.program_id(0) * m + jax.lax.broadcasted_iota(jnp.int32, (m, 1), 0) < M
        pair = jax.lax.broadcasted_iota(jnp.int32, (1, p), 1) < P
        head = pl.program_id(1) * n + jax.lax.broadcasted_iota(jnp.int32, (1, n, 1), 1) < N
        angles = row & pair
        mask = jnp.broadcast_to(angles[:, None, :], (m, n, p)) & head
        cos, sin = (launch.load(ref, angles).astype(jnp.float32)[:, None, :] for ref in (cos_ref, sin_ref))
        sin = -sin if inverse else sin
        first, second = (half.astype(jnp.float32) for half in load(x_ref, mask))
        rotated = first * cos - second * sin, second * cos + first * sin
        store(y_ref, [half.astype(y_ref.dtype) for half in rotated], mask)

    tile = pl.BlockSpec((m, n, 2, p), lambda i, j: (i, j, 0, 0))
    if interleaved:
        tile = pl.BlockSpec((m, n, 2 * p), lambda i, j: (i, j, 0))
    angle = pl.BlockSpec((m, p), lambda i, j: (index(i), 0))
    (y,) = launch.call(
        kernel,
        (x, cos, sin),
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        params=launch.triton(blocks.warps),
        grid=(pl.cdiv(M, m), pl.cdiv(N, n)),
        in_specs=[tile, angle, angle],
        out_specs=[tile],
        cost=cost,
        name=name,
    )
    return y.reshape(M, N, H)


def _half(i: int) -> tuple:
    """Return the index of the first (0) or second (1) numbers of half-split pairs."""
    return slice(None), slice(None), jnp.int32(i)  # interpreted loads know no Python integers


def _twice(mask: jax.Array) -> jax.Array:
    """Repeat a mask [m, n, p] to [m, n, 2p], each entry for both numbers of a pair."""
    m, n, p = mask.shape
    return jnp.broadcast_to(mask[..., None], (m, n, p, 2)).reshape(m, n, 2 * p)
