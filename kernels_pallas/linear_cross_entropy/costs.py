"""Costs of the loss: the kernels that process a chunk's logits, and XLA's products around them."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.linear_cross_entropy.chunks import chunk, padded

_SINGLE = 4  # bytes of a float32


def statistics_cost(rows: int, vocabulary: int, soft_cap: float | None) -> KernelCost:
    """Return the cost of reading the logits and writing three numbers for each row."""
    n, cap = rows * vocabulary, 3 if soft_cap is not None else 0
    return KernelCost((6 + cap) * n, (1 + (cap > 0)) * n, _SINGLE * (n + 4 * rows))


def gradient_cost(rows: int, vocabulary: int, soft_cap: float | None, dtype: Any) -> KernelCost:
    """Return the cost of reading the logits and writing their gradient in this dtype."""
    n, cap = rows * vocabulary, 7 if soft_cap is not None else 0
    return KernelCost(
        (5 + cap) * n, (1 + (cap > 0)) * n, (_SINGLE + jnp.dtype(dtype).itemsize) * n + _SINGLE * 4 * rows
    )


def costs(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    soft_cap: float | None = None,
    reduction: str = "none",
    **_: Any,
) -> KernelCosts:
    """Return the costs of the kernels and the products on these arrays, or shapes and dtypes, on one device.

    The forward cost is that of a call that is not differentiated. With reduction="sum" and differentiation, the forward
    pass also makes the gradients, from the same logits; their cost counts as backward.
    """
    D, item = hidden.shape[-1], hidden.dtype.itemsize
    labels = unembedding.size // max(D, 1)
    chunks, C = chunk(targets.size, labels)
    V = padded(labels)
    product = 2 * C * D * V
    table, rows, logits, narrow = item * D * V, item * C * D, _SINGLE * C * V, item * C * V
    unembed = KernelCost(product, 0, rows + table + logits)
    gradients = KernelCost(2 * product, 0, (narrow + table + rows) + (narrow + rows + _SINGLE * D * V))
    looks = statistics_cost(C, V, soft_cap)
    logits = gradient_cost(C, V, soft_cap, hidden.dtype)
    again = KernelCost() if reduction == "sum" else unembed
    return KernelCosts(_times(chunks, unembed, looks), _times(chunks, again, logits, gradients))


def _times(n: int, *parts: KernelCost) -> KernelCost:
    return KernelCost(*(n * sum(numbers) for numbers in zip(*parts, strict=True)))
