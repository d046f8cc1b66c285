"""Attention by cuDNN: only where its semantics are exactly those of the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.target import TargetChip
from kernels_pallas.flash_attention.operands import Operands

# XLA asks cuDNN for another algorithm backward only where the flags of the whole program do
# (xla_gpu_deterministic_ops, xla_gpu_exclude_nondeterministic_ops), which also switch off autotuning or Triton.
NOT_DETERMINISTIC = "its gradients differ from run to run in the last bits, which deterministic=False allows"


def unsupported_reason(
    operands: Operands,
    key_range: Any,
    soft_cap: float | None,
    return_log_sum_exp: bool,
    documents: int | None,
    chip: TargetChip,
) -> str | None:
    """Return why cuDNN, as JAX calls it, cannot serve a call, or None."""
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
        if documents is None or key_range[0].ndim == 3:
            return (
                "of masks known while tracing it serves all keys and, with as many keys as queries, causal; of others "
                "packed rows whose most `documents` are given"
            )
        return _packed_reason(operands, chip)
    return None


def _packed_reason(operands: Operands, chip: TargetChip) -> str | None:
    """Return why packed rows cannot be served, or None."""
    _, T, S, N, K, _, _ = operands.sizes
    if (chip.compute_capability or (0,)) < (9, 0):
        return "it serves packed rows on Hopper and later"
    if T != S:
        return f"packed rows have as many keys as queries, and there are {S} and {T}"
    if N != K and jax.__version_info__ < (0, 12):
        return "JAX before 0.12 finds keys of packed rows by the number of query heads, and here they share heads"
    return None


def is_absent() -> str | None:
    """Return why cuDNN cannot be compiled here, or None: XLA asks the chip for its plans."""
    return None if jax.default_backend() == "gpu" else "it cannot be compiled ahead of time, and there is no GPU here"


def flash_attention(operands: Operands, key_range: Any, scale: float, documents: int | None) -> jax.Array:
    """Return the output [B, T, N, V]; NaN where packed rows are not what was promised (`packed_documents`)."""
    causal = is_causal(key_range, *operands.sizes[1:3])
    if causal is not None:
        return jax.nn.dot_product_attention(*operands[:3], scale=scale, is_causal=causal, implementation="cudnn")
    assert documents is not None, "unsupported_reason refuses it"
    from jax._src.cudnn import fused_attention_stablehlo as stablehlo  # no public function has offsets

    lengths, first, is_kept = packed_documents(key_range, operands.query.shape[0], documents)
    out = stablehlo.dot_product_attention(
        *operands[:3],
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=first,
        kv_offsets=first,
        scale=scale,
        mask_type=stablehlo.MaskType.PADDING_CAUSAL,
    )
    return jnp.where(is_kept[:, None, None, None], out, jnp.nan)


def packed_documents(key_range: Any, B: int, documents: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the documents of packed rows as cuDNN takes them, from the intervals [B or 1, T] of their causal mask.

    Returns:
      lengths, int32 [B, M]: tokens of each document, −1 behind the last; M is `documents`, or 2 where that is less.
      first, int32 [B, M + 1]: the first token of each, −1 behind the last.
      is_kept, bool [B]: the row has at most M documents, which tile it, and each token sees its own up to itself.
    """
    start, end = (jnp.broadcast_to(x, (B, x.shape[1])).astype(jnp.int32) for x in key_range)
    T, M = start.shape[1], max(documents, 2)  # of one document cuDNN takes another form
    index = jnp.arange(T, dtype=jnp.int32)[None]
    begins = start == index
    own = jax.lax.cummax(jnp.where(begins, index, -1), axis=1)
    is_kept = jnp.all((start == own) & (end == index + 1), axis=1) & (jnp.sum(begins, axis=1) <= M)
    first = jnp.sort(jnp.where(begins, index, T), axis=1)[:, : M + 1]
    first = jnp.pad(first, ((0, 0), (0, M + 1 - first.shape[1])), constant_values=T)
    lengths = jnp.where(first[:, :-1] < T, first[:, 1:] - first[:, :-1], -1)
    return lengths, jnp.where(first < T, first, -1), is_kept


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
