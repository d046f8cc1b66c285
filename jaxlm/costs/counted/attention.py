"""Attention of a step on one device: its sizes, the scores that are computed and those that are seen, its kernel."""

import functools
from fractions import Fraction
from typing import NamedTuple

import jax

from jaxlm.costs.counted.device import DeviceStep
from jaxlm.costs.counted.recorder import RecordedOp
from kernels_pallas.core.launch import KernelCosts
from kernels_pallas.flash_attention import causal_chunks, costs, runs_kernel


class Heads(NamedTuple):
    """The sizes of an attention on one device: rows, query and key tokens, key/value heads, query heads that share
    each, and their size."""

    rows: int
    queries: int
    keys: int
    kv_heads: int
    groups: int
    head_dim: int


class Seen(NamedTuple):
    """The share of the scores of all queries and keys that windows leave, and of it what causality leaves."""

    whole: Fraction
    causal: Fraction


def heads(device: DeviceStep, use: RecordedOp) -> Heads:
    """Return the sizes of an attention."""
    (rows, queries, N, head_dim), (_, keys, K, _) = device.operand(use, 0), device.operand(use, 1)
    return Heads(rows, queries, keys, K, N // K, head_dim)


def attended(device: DeviceStep, use: RecordedOp) -> list[tuple[int, int]]:
    """Return queries and keys of each sequence between which scores are computed, part by part: on a CPU training
    computes attention in chunks (`kernels_pallas.flash_attention.causal_chunks`)."""
    queries, keys = use.shapes[0][1], use.shapes[1][1]
    if device.work.platform == "cpu" and device.work.kind == "train":
        return [(end - first, end) for first, end in causal_chunks.bounds(queries)]
    return [(queries, keys)]


def scores(device: DeviceStep, use: RecordedOp) -> int:
    """Return the number of scores that are computed."""
    sizes = heads(device, use)
    return sizes.rows * sizes.kv_heads * sizes.groups * sum(q * k for q, k in attended(device, use))


def seen(use: RecordedOp) -> Seen:
    """Return the shares of scores that a token sees: half of them without a window. One token sees its whole window."""
    queries, S = use.shapes[0][1], use.shapes[1][1]
    size = min(use.options["window"] or S, S)
    whole = Fraction(size, S)
    return Seen(whole, whole if queries == 1 else Fraction(size * (2 * S - size), 2 * S * S))


def kernel(device: DeviceStep, use: RecordedOp) -> KernelCosts | None:
    """Return the cost of its kernel with all scores visible; None if XLA runs it instead: with few queries, or with a
    head dim that the platform's kernel does not take."""
    work = device.work
    return _kernel(work.platform, heads(device, use), work.dtype) if work.runs_kernels else None


@functools.lru_cache(maxsize=1024)
def _kernel(platform: str, sizes: Heads, dtype: str) -> KernelCosts | None:
    B, T, S, K, G, H = sizes
    key, query = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, S, K, H), (B, T, K * G, H)))
    if not runs_kernel(platform, query, key, key):
        return None
    return costs(query, key, key, implementation="triton")  # kernels for TPUs cost the same
