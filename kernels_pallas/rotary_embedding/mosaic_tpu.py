"""Rotary position embedding on TPUs, compiled by Mosaic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.rotary_embedding.angles import tables_of_blocks

_BUDGET = 8 * 2**20  # bytes of VMEM for the blocks and their float32 intermediates


class RotaryTpuBlocks(NamedTuple):
    """A block of `rows` rows of all heads in VMEM."""

    rows: int


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
    lanes, heads = pl.cdiv(H, 128) * 128, pl.cdiv(N, 8) * 8
    fit = max(_BUDGET // (heads * lanes * 4 * 6) // 8 * 8, 8)
    name = "rotary_embedding_backward" if inverse else "rotary_embedding"
    # The measured size may come from fewer or narrower heads.
    most = min(tuning.blocks(name, "mosaic_tpu", (N, H), x_MNH.dtype, RotaryTpuBlocks(fit)).rows, fit, M)
    # Somewhat smaller blocks, if the table then consists of whole blocks.
    m = next((m for m in range(most // 8 * 8, most // 4, -8) if len(cos_AP) % m == 0), most)
    cos, sin, index = tables_of_blocks(cos_AP, sin_AP, M, m)

    def wide(angle: jax.Array) -> jax.Array:
        """Return [A, H/2] as [A, H]: each angle at both positions of its pair. XLA makes it, at most as large as one
        head.
        """
        angle = angle.astype(jnp.float32)
        return jnp.repeat(angle, 2, axis=1) if interleaved else jnp.concatenate([angle, angle], axis=1)

    def kernel(x_ref, cos_ref, sin_ref, y_ref) -> None:
        x = x_ref[...].astype(jnp.float32)
        cos, sin = cos_ref[...][:, None, :], sin_ref[...][:, None, :]
        y_ref[...] = (x * cos + _partner(x, interleaved) * sin).astype(y_ref.dtype)

    lane = jnp.arange(H)[None]
    is_first = lane % 2 == 0 if interleaved else lane < H // 2
    signed_sin = wide(sin) * jnp.where(is_first != inverse, -1.0, 1.0)
    tile = pl.BlockSpec((m, N, H), lambda i: (i, 0, 0))
    angle = pl.BlockSpec((m, H), lambda i: (index(i), 0))
    (y_MNH,) = launch.call(
        kernel,
        (x_MNH, wide(cos), signed_sin),
        [jax.ShapeDtypeStruct(x_MNH.shape, x_MNH.dtype)],
        params=launch.mosaic_tpu(("parallel",)),
        grid=(pl.cdiv(M, m),),
        in_specs=[tile, angle, angle],
        out_specs=[tile],
        cost=cost,
        name=name,
    )
    return y_MNH


def _partner(x: jax.Array, interleaved: bool) -> jax.Array:
    """Return each number's partner in its pair, [m, N, H]."""
    if not interleaved:
        half = x.shape[2] // 2
        return jnp.concatenate([x[:, :, half:], x[:, :, :half]], axis=2)
    before = jnp.concatenate([x[:, :, -1:], x[:, :, :-1]], axis=2)
    after = jnp.concatenate([x[:, :, 1:], x[:, :, :1]], axis=2)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 2)
    return jnp.where(lane % 2 == 0, after, before)
