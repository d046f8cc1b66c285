"""Measured limits of this chip: bytes/s of a copy and FLOP/s of a matrix product."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.bench.timing import measure


class Ceilings(NamedTuple):
    """Bytes/s read and written by a copy, and FLOP/s of a square product of the dtype."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    matmul_dtype: str


def ceilings() -> Ceilings:
    """Measure the default device."""
    here = jax.devices()[0].platform != "cpu"
    # A copy far larger than any cache, and a product far above the ridge of any roofline.
    numbers, side, dtype = (2**29, 8192, jnp.bfloat16) if here else (2**24, 1024, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (numbers,), dtype)
    copy = jax.jit(lambda x: -x)  # XLA would remove a bare copy
    a, b = jax.random.normal(jax.random.key(1), (2, side, side), dtype)
    product = jax.jit(jnp.matmul)
    moved = 2 * x.size * x.dtype.itemsize / measure(lambda: copy(x)).median
    return Ceilings(moved, 2 * side**3 / measure(lambda: product(a, b)).median, jnp.dtype(dtype).name)
