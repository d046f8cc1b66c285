"""The arguments that attention takes, and what is said of others."""

from typing import Any

import numpy as np

from kernels_pallas.core import checks
from kernels_pallas.core.attention.key_range import are_positions


def check(
    query,
    key,
    value,
    key_range,
    is_causal=False,
    scale=None,
    soft_cap=None,
    sinks=None,
    bias=None,
    query_chunk=None,
    documents=None,
) -> None:
    """Raise ValueError for arguments of `flash_attention` that do not fit one another."""

    def wrong(what: str, got: Any, right: str) -> None:
        raise ValueError(f"flash_attention: {what} is {got}; it must be {right}")

    checks.array("flash_attention", query=query, key=key, value=value)
    checks.floating("flash_attention", query=query, key=key, value=value, sinks=sinks, bias=bias)
    for name, x, axes in (("query", query, "B, T, N, H"), ("key", key, "B, S, K, H"), ("value", value, "B, S, K, V")):
        if x.ndim != 4:
            wrong(name, list(x.shape), f"[{axes}]")
        if x.dtype != query.dtype:
            wrong(name, x.dtype, f"{query.dtype} like query")
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    if key.shape != (B, S, K, H):
        wrong("key", list(key.shape), f"[{B}, S, K, {H}] for query {list(query.shape)}")
    if value.shape[:3] != (B, S, K):
        wrong("value", list(value.shape), f"[{B}, {S}, {K}, V] for key {list(key.shape)}")
    if H == 0:
        wrong("query", list(query.shape), "of heads with at least one channel")
    if N % K if K else N:
        wrong("the number of query heads", N, f"a multiple of the {K} key/value heads")
    pair = isinstance(key_range, tuple) and len(key_range) == 2 and all(hasattr(x, "dtype") for x in key_range)
    if key_range is not None and not pair:
        got = f"{key_range.dtype}{list(key_range.shape)}" if hasattr(key_range, "dtype") else repr(key_range)[:60]
        wrong(
            "key_range", got, "two arrays, start and end, as `causal` and others make; any other mask is a bias of −∞"
        )
    for name, x in zip(("start", "end"), key_range or (), strict=bool(key_range)):
        shaped = x.ndim in (2, 3) and 0 not in x.shape[:-2] and x.shape[-2:] in ((B, T), (1, T))
        if not (shaped and are_positions(x)):
            right = f"int32[{B}, {T}] or int32[1, {T}], or a union's, with one more axis"
            wrong(f"key_range's {name}", f"{x.dtype}{list(x.shape)}", right)
    if key_range is not None and key_range[0].shape[:-2] != key_range[1].shape[:-2]:
        wrong("key_range's end", list(key_range[1].shape), f"of as many intervals as start, {list(key_range[0].shape)}")
    if is_causal and T != S:
        wrong("the number of keys", S, f"{T} like that of queries where is_causal")
    if sinks is not None and sinks.shape != (N,):
        wrong("sinks", list(sinks.shape), f"[{N}]")
    if bias is not None and (
        bias.ndim != 4
        or bias.shape[3] != S
        or any(size not in (1, most) for size, most in zip(bias.shape, (B, N, T), strict=False))
    ):
        wrong("bias", list(bias.shape), f"[{B} or 1, {N} or 1, {T} or 1, {S}]")
    checks.positive_or_none("flash_attention", scale=scale, soft_cap=soft_cap)
    if documents is not None and not (isinstance(documents, int | np.integer) and documents > 0 and T == S):
        wrong("documents", documents, f"a positive whole number, of {T} queries and as many keys")
    if query_chunk is not None and not (isinstance(query_chunk, int | np.integer) and query_chunk > 0):
        wrong("query_chunk", query_chunk, "a positive whole number")
