"""Kernels in Pallas: compiled by Triton for NVIDIA GPUs and by Mosaic for TPUs, each beside its reference in plain JAX.

Every function takes `implementation`: None chooses by the chip being lowered for, also ahead of time, and by the shape;
a name is kept or refused. `jax.grad`, `jax.vmap`, `jax.checkpoint`, `jax.jit` and `jax.shard_map` compose with all of
them; forward-mode differentiation is the reference's alone.
"""

from kernels_pallas.rms_norm import rms_norm

__all__ = ["rms_norm"]
