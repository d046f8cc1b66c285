"""What the kernels are given, and what they cost."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.launch import Cost, Costs, size_of


class Operands(NamedTuple):
    """The arrays of a call: intervals within the keys, and of their full batch.

    query [B, T, N, H], key [B, S, K, H], value [B, S, K, V], start and end int32 [B, T], sinks [N] or None,
    bias [B or 1, N or 1, T or 1, S] or None.
    """

    query: Any
    key: Any
    value: Any
    start: Any
    end: Any
    sinks: Any
    bias: Any

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, T, S, N, K, H, V."""
        (B, T, N, H), (_, S, K, V) = self.query.shape, self.value.shape
        return B, T, S, N, K, H, V

    @property
    def out(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Output [B, T, N, V] and log-sum-exp [B, N, T]."""
        B, T, _, N, _, _, V = self.sizes
        return (
            jax.ShapeDtypeStruct((B, T, N, V), self.query.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        )

    def forward_cost(self) -> Cost:
        """Of the forward kernel: two products, and six operations per score around them."""
        H, V = self.sizes[5:]
        return self._cost(2 * (H + V) + 6, *self, *self.out)

    def query_cost(self) -> Cost:
        """Of the kernel for the queries' gradient: three products."""
        H, V = self.sizes[5:]
        out, rows = self.out
        return self._cost(2 * (2 * H + V) + 6, *self, out, rows, rows, self.query)

    def key_cost(self) -> Cost:
        """Of the kernel for the keys' and values' gradients: four products."""
        H, V = self.sizes[5:]
        out, rows = self.out
        return self._cost(4 * (H + V) + 6, *self, out, rows, rows, self.key, self.value)

    def costs(self) -> Costs:
        """Of all T·S scores: which blocks are skipped is known only when it runs."""
        backward = (sum(parts) for parts in zip(self.query_cost(), self.key_cost(), strict=True))
        return Costs(self.forward_cost(), Cost(*backward))

    def _cost(self, flops_per_score: int, *arrays: Any) -> Cost:
        B, T, S, N = self.sizes[:4]
        scores = B * N * T * S
        return Cost(scores * flops_per_score, scores, size_of(*arrays))
