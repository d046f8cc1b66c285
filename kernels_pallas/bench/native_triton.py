"""Attention in the `triton` language, without Pallas, for comparison: the forward pass of FlashAttention-2
(arXiv:2307.08691, algorithm 1). Imported only where `triton` and a GPU are present.
"""

import math

import torch
import triton
import triton.language as tl


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    blocks: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return softmax(scale · q·kᵀ) · v [B, T, N, H] of query [B, T, N, H], key and value [B, S, K, H], N a multiple of
    K.

    Args:
      causal: query t attends to the keys s ≤ t; S is T.
      blocks: numbers of queries and keys; None takes the fastest of a few on this chip.

    Raises NotImplementedError unless all head dims are the same power of two.
    """
    (B, T, N, H), (S, K), V = query.shape, key.shape[1:3], value.shape[3]
    if H != V or H < 16 or H & (H - 1):
        raise NotImplementedError(f"head widths {H} and {V} are not one power of two from 16 on")
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(query)
    arguments = query, key, value, out, scale * math.log2(math.e), T, S, N, K, H, causal

    def grid(sizes: dict) -> tuple[int, int]:
        return triton.cdiv(T, sizes["QUERIES"]), B * N

    if blocks is None:
        _fastest[grid](*arguments)
    else:
        _forward[grid](*arguments, *blocks)
    return out


@triton.jit
def _forward(
    query,
    key,
    value,
    out,
    scale,
    T,
    S,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Process the keys for a block of queries of one head. Under a causal mask the longest rows come first."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // N).to(tl.int64), tl.program_id(1) % N
    rows, width = i * QUERIES + tl.arange(0, QUERIES), tl.arange(0, H)
    at = (batch * T * N + head) * H + rows[:, None] * (N * H) + width[None, :]
    first_key = (batch * S * K + head // (N // K)) * H
    query_block = tl.load(query + at, mask=rows[:, None] < T, other=0.0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, H], tl.float32)

    # First the blocks that are unmasked for all of these queries, then those that are partly masked.
    if CAUSAL:
        whole, end = i * QUERIES // KEYS, tl.cdiv(tl.minimum((i + 1) * QUERIES, S), KEYS)
    else:
        whole, end = S // KEYS, tl.cdiv(S, KEYS)
    key, value = key + first_key + width[:, None], value + first_key + width[None, :]
    largest, total, mixed = _over_keys(
        largest, total, mixed, query_block, key, value, scale, rows, S, 0, whole, K * H, False, CAUSAL, KEYS
    )
    largest, total, mixed = _over_keys(
        largest, total, mixed, query_block, key, value, scale, rows, S, whole, end, K * H, True, CAUSAL, KEYS
    )
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < T)


@triton.jit
def _over_keys(
    largest,
    total,
    mixed,
    query,
    key,
    value,
    scale,
    rows,
    S,
    first,
    end,
    STRIDE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return largest scores, their sums and weighted values [QUERIES, H] after the blocks first ≤ j < end of keys."""
    for j in tl.range(first, end):
        columns = j * KEYS + tl.arange(0, KEYS)
        key_at, value_at = key + columns[None, :] * STRIDE, value + columns[:, None] * STRIDE
        if MASKED:
            scores = tl.dot(query, tl.load(key_at, mask=columns[None, :] < S, other=0.0))
            unmasked = columns[None, :] < S
            if CAUSAL:
                unmasked = unmasked & (columns[None, :] <= rows[:, None])
            scores = tl.where(unmasked, scores, float("-inf"))
            values = tl.load(value_at, mask=columns[:, None] < S, other=0.0)
        else:
            scores = tl.dot(query, tl.load(key_at))
            values = tl.load(value_at)
        raised = tl.maximum(largest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - raised[:, None])
        kept = tl.exp2(largest - raised)
        total = total * kept + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * kept[:, None])
        largest = raised
    return largest, total, mixed


_fastest = triton.autotune(
    [
        triton.Config({"QUERIES": queries, "KEYS": keys}, num_warps=warps, num_stages=stages)
        for queries, keys, warps in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
        for stages in (2, 3)
    ],
    key=["T", "S", "N", "K", "H", "CAUSAL"],
)(_forward)
