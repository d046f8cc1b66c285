"""Operands of the kernels, and their costs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core import target
from kernels_pallas.core.attention.key_range import clipped, without_repeats
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of


class Gradients(NamedTuple):
    """The gradients that a backward pass is asked for: the queries', and the keys' or the values'."""

    query: bool = True
    key: bool = True


EVERY_GRADIENT = Gradients()


class Operands(NamedTuple):
    """The arrays of a call, with intervals clipped to the keys and of the full batch.

    query [B, T, N, H], key [B, S, K, H], value [B, S, K, V], start and end int32 [P, B, T] of the P intervals of each
    row, sinks [N] or None, bias [B or 1, N or 1, T or 1, S] or None. A kernel takes one of `by_interval`, whose start
    and end are [B, T], and numpy arrays where they are known while tracing.
    """

    query: Any
    key: Any
    value: Any
    start: Any
    end: Any
    sinks: Any
    bias: Any

    def by_interval(self) -> list["Operands"]:
        """Return the operands of each interval; the sinks are in the sums of the first."""
        return [
            self._replace(start=start, end=end, sinks=None if i else self.sinks)
            for i, (start, end) in enumerate(zip(self.start, self.end, strict=True))
        ]

    @property
    def intervals(self) -> tuple[jax.Array, jax.Array]:
        """Start and end of one interval as arrays [B, T]; numpy arrays with equal rows take one row of the program."""
        B, T = self.query.shape[:2]
        return tuple(jnp.broadcast_to(jnp.asarray(without_repeats(x)), (B, T)) for x in (self.start, self.end))

    def shares(self, blocks: int) -> int:
        """Return the number of shares into which the query heads of a key head are divided.

        More than one share where a kernel for the keys' gradient would have too few `blocks` to occupy half of a chip's
        SMs. Each share accumulates its own gradient.
        """
        _, _, _, N, K, _, _ = self.sizes
        enough = (n for n in range(1, N // K) if N // K % n == 0 and 2 * blocks * n > target.current().cores)
        return next(enough, N // K)

    @staticmethod
    def of_shares(x: Any, shares: int) -> jax.ShapeDtypeStruct:
        """Return the gradient of a key or value [B, S, K, …] by shares: [B, S, K · shares, …], in float32 if more than
        one.
        """
        B, S, K, width = x.shape
        return jax.ShapeDtypeStruct((B, S, K * shares, width), x.dtype if shares == 1 else jnp.float32)

    def joined(self, x: jax.Array, shares: int) -> jax.Array:
        """Return the sum over the shares."""
        if shares == 1:
            return x
        B, S, many, width = x.shape
        return jnp.sum(x.reshape(B, S, many // shares, shares, width), axis=3).astype(self.key.dtype)

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """The sizes B, T, S, N, K, H, V."""
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

    def forward_cost(self, per_head: int) -> KernelCost:
        """Return the cost of the forward kernel: two products, and six operations per unmasked score.

        Like the costs below it takes the number of unmasked scores per head.
        """
        H, V = self.sizes[5:]
        return self._cost(per_head, 2 * (H + V) + 6, *self, *self.out)

    def query_cost(self, per_head: int) -> KernelCost:
        """Return the cost of the kernel for the queries' gradient: three products."""
        H, V = self.sizes[5:]
        out, rows = self.out
        return self._cost(per_head, 2 * (2 * H + V) + 6, *self, out, rows, rows, self.query)

    def key_cost(self, per_head: int) -> KernelCost:
        """Return the cost of the kernel for the keys' and values' gradients: four products."""
        H, V = self.sizes[5:]
        out, rows = self.out
        return self._cost(per_head, 4 * (H + V) + 6, *self, out, rows, rows, self.key, self.value)

    def backward_cost(self, per_head: int, d_query_dtype: Any = jnp.float32) -> KernelCost:
        """Return the cost of one kernel for all gradients, that of the queries written in a dtype: five products."""
        H, V = self.sizes[5:]
        out, rows = self.out
        d_query = jax.ShapeDtypeStruct(self.query.shape, d_query_dtype)
        return self._cost(per_head, 2 * (3 * H + 2 * V) + 6, *self, out, rows, rows, d_query, self.key, self.value)

    def costs(self, per_head: int, d_query_dtype: Any, gradients: Gradients = EVERY_GRADIENT) -> KernelCosts:
        """Return a call's costs: forward, and backward of one kernel for all three gradients, the queries' written in a
        dtype, or, where that is None, of one for each of those that are asked for.
        """
        if d_query_dtype is None:
            kernels = [self.query_cost(per_head)] * gradients.query + [self.key_cost(per_head)] * gradients.key
        else:
            kernels = [self.backward_cost(per_head, d_query_dtype)]
        return KernelCosts(self.forward_cost(per_head), KernelCost(*map(sum, zip(*kernels, strict=True))))

    def _cost(self, per_head: int, flops_per_score: int, *arrays: Any) -> KernelCost:
        scores = per_head * self.sizes[3]
        return KernelCost(scores * flops_per_score, scores, size_of(*arrays))


def unmasked_scores(key_range: Any, B: int, T: int, S: int) -> tuple[int, ...]:
    """Return the unmasked scores per head in each interval of a union, by which a call is costed.

    Exact for intervals that are numpy arrays, which are known while tracing; otherwise all scores.
    """
    if key_range is None:
        return (B * T * S,)
    start, end = (
        clipped(key_range, 1, T, S) if all(x.shape[-2] == 1 for x in key_range) else clipped(key_range, B, T, S)
    )
    if not (isinstance(start, np.ndarray) and isinstance(end, np.ndarray)):
        return (B * T * S,) * len(start)
    sequences = B // start.shape[1]  # a mask of batch size 1 serves all
    return tuple(sequences * int(np.sum(one, dtype=np.int64)) for one in np.maximum(end - start, 0))
