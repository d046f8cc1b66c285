"""Attention by cuDNN, on request: only where its semantics are exactly those of the reference."""

from typing import Any

import jax
import numpy as np

from kernels_pallas.core.target import TargetChip
from kernels_pallas.flash_attention.operands import Operands

# XLA asks cuDNN for another algorithm backward only where the flags of the whole program do
# (xla_gpu_deterministic_ops, xla_gpu_exclude_nondeterministic_ops), which also switch off autotuning or Triton.
NOT_DETERMINISTIC = "its gradients differ from run to run in the last bits, which deterministic=False allows"


def unsupported_reason(
    operands: Operands, key_range: Any, soft_cap: float | None, return_log_sum_exp: bool, chip: TargetChip
) -> str | None:
    """Return why cuDNN, as `jax.nn.dot_product_attention` calls it, cannot serve a call, or None."""
    H, V = operands.sizes[5:]
    if chip.platform != "gpu":
        return f"it runs on NVIDIA GPUs, and this is lowered for {chip.kind} ({chip.platform})"
    if operands.query.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, not {operands.query.dtype}"
    if soft_cap is not None or operands.sinks is not None:
        return "it has neither soft cap nor sinks"
    if H != V or H % 8 or H > (256 if (chip.compute_capability or (0,)) >= (9, 0) else 128):
        return f"head widths {H} and {V} are not equal, multiples of 8, and within what this chip has"
    if operands.bias is not None:
        return "of a row whose bias is −∞ throughout, which is not known while tracing, it may make NaN"
    if return_log_sum_exp:
        return "it rounds the log-sum-exp to the dtype of the query, and JAX drops its gradient"
    if is_causal(key_range, *operands.sizes[1:3]) is None:
        return "of masks known while tracing it serves all keys and, with as many keys as queries, causal"
    return None


def is_absent() -> str | None:
    """Return why cuDNN cannot be compiled here, or None: XLA asks the chip for its plans."""
    return None if jax.default_backend() == "gpu" else "it cannot be compiled ahead of time, and there is no GPU here"


def flash_attention(operands: Operands, key_range: Any, scale: float) -> jax.Array:
    """Return the output [B, T, N, V]."""
    causal = bool(is_causal(key_range, *operands.sizes[1:3]))
    return jax.nn.dot_product_attention(*operands[:3], scale=scale, is_causal=causal, implementation="cudnn")


def is_causal(key_range: Any, T: int, S: int) -> bool | None:
    """Return whether the mask of T queries and S keys is causal (True) or absent (False).

    None for any other mask, and for one that is known only at run time.
    """
    if key_range is None:
        return False
    if any(not isinstance(x, np.ndarray | jax.Array) or isinstance(x, jax.core.Tracer) for x in key_range):
        return None
    if any(x.ndim == 3 for x in key_range):
        return None
    start, end = (np.asarray(x) for x in key_range)
    if np.all(start <= 0) and np.all(end >= S):
        return False
    causal = T == S and np.all(start <= 0) and np.all(end == np.arange(1, T + 1)[None])
    return True if causal else None
