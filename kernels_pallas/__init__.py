"""Kernels in Pallas: compiled by Triton for NVIDIA GPUs and by Mosaic for TPUs, each with a reference in plain JAX.

Every function takes `implementation`. None chooses by the shape and by the chip being lowered for, also ahead of time;
a name is kept or refused, and `explain` says what None takes and why. `jax.grad`, `jax.vmap`, `jax.checkpoint`,
`jax.jit` and `jax.shard_map` compose with every operation, but paged attention has no derivative; only the references
support forward-mode differentiation.
"""

from kernels_pallas.bias_activation import bias_activation
from kernels_pallas.core.choice import explain
from kernels_pallas.flash_attention import flash_attention
from kernels_pallas.gated_activation import gated_activation
from kernels_pallas.grouped_matmul import grouped_matmul, quantized_grouped_matmul
from kernels_pallas.layer_norm import layer_norm
from kernels_pallas.linear_attention import gated_delta_rule, state_space
from kernels_pallas.linear_cross_entropy import linear_cross_entropy
from kernels_pallas.matmul import matmul
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.quantized_matmul import quantized_matmul
from kernels_pallas.rms_norm import rms_norm
from kernels_pallas.rotary_embedding import rotary_embedding
from kernels_pallas.softmax import log_softmax, softmax

__all__ = [
    "bias_activation",
    "explain",
    "flash_attention",
    "gated_activation",
    "gated_delta_rule",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "paged_attention",
    "quantized_grouped_matmul",
    "quantized_matmul",
    "rms_norm",
    "rotary_embedding",
    "softmax",
    "state_space",
]
