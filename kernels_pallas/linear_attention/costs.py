"""Costs of the kernels of linear attention."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.core.tiles import LANES
from kernels_pallas.linear_attention.gpu_tile import BLOCK, multiplied_as


class LinearWork(NamedTuple):
    """The sizes of a call: B rows, K heads of queries and keys, N of values, chunks of C tokens, and H × V numbers of a
    state; dtypes of queries and keys, and of values."""

    B: int
    K: int
    N: int
    chunks: int
    C: int
    H: int
    V: int
    key_dtype: jnp.dtype
    value_dtype: jnp.dtype
    is_delta: bool

    @classmethod
    def of(cls, query: Any, value: Any, chunk: int, *, is_delta: bool) -> "LinearWork":
        """Return those of a call's arrays, or of their shapes and dtypes."""
        (B, T, K, H), (N, V) = query.shape, value.shape[2:]
        return cls(B, K, N, -(-T // chunk), chunk, H, V, query.dtype, value.dtype, is_delta)

    @property
    def tokens(self) -> int:
        return self.B * self.chunks * self.C

    @property
    def times(self) -> int:
        """The chunks of all value heads."""
        return self.B * self.N * self.chunks

    @property
    def keys(self) -> int:
        """Bytes of the queries, and of the keys."""
        return self.key_dtype.itemsize * self.tokens * self.K * self.H

    @property
    def values(self) -> int:
        """Bytes of the values, of the outputs, and of the gradients of either."""
        return self.value_dtype.itemsize * self.tokens * self.N * self.V

    @property
    def states(self) -> int:
        """Bytes of a state of all heads."""
        return 4 * self.B * self.N * self.H * self.V

    @property
    def skip(self) -> int:
        """Bytes of the state space's weights."""
        return 0 if self.is_delta else 4 * self.N


def kernel_costs(implementation: str, query: Any, value: Any, chunk: int, *, is_delta: bool) -> KernelCosts:
    """Return the costs of an implementation's kernels: the forward pass, which writes the state before each chunk, and
    the backward pass, which reads these and computes the chunks again.

    Args:
      query, value: as an operation takes them, arrays or shapes and dtypes.
    """
    costs = COSTS[implementation](LinearWork.of(query, value, chunk, is_delta=is_delta))
    in_both = [costs.pop("within_chunks")] if "within_chunks" in costs else []
    forward = costs.pop("forward")
    return KernelCosts(_sum(*in_both, forward), _sum(*in_both, *costs.values()))


def mosaic_tpu_costs(work: LinearWork) -> dict[str, KernelCost]:
    """Return the costs of the kernel of each pass."""
    B, K, N, chunks, C, H, V, *_, is_delta = work
    # What tokens read of one another and of the state, and what they leave in it; then the delta rule's system.
    of_tokens, of_state, inverse = 2 * C * C * (H + V), 4 * C * H * V, 0
    if is_delta:
        of_tokens, of_state = of_tokens + 2 * C * C * (H + V), of_state + 2 * C * H * V
        inverse = 2 * C**3 * inverse_products("mosaic_tpu", C)
    elementwise, exponentials = 12 * C * C + 3 * C * (H + V) + 2 * H * V, C * C + 2 * C
    once = of_tokens + of_state + inverse + elementwise + exponentials
    again = once + 2 * (of_tokens + of_state + elementwise)
    numbers, documents = 8 * work.tokens * N, 4 * work.tokens
    forward = 2 * work.keys + 2 * work.values + numbers + documents + (2 + chunks) * work.states + work.skip
    backward = 4 * work.keys + 3 * work.values + 2 * numbers + documents + (2 + chunks) * work.states + work.skip
    times = work.times
    return {
        "forward": KernelCost(times * once, times * exponentials, forward),
        "backward": KernelCost(times * again, times * exponentials, backward),
    }


def triton_costs(work: LinearWork) -> dict[str, KernelCost]:
    """Return the cost of each kernel, in the order in which they run. What programs of several blocks of columns read
    alike counts once."""
    B, K, N, chunks, C, H, V, *_, is_delta = work
    # Products of queries or keys with keys, of tokens with tokens' values, and with a state or into one.
    of_keys, of_tokens, of_state = 2 * C * C * H, 2 * C * C * V, 2 * C * H * V
    inverse = 2 * C**3 * inverse_products("triton", C) + 2 * (BLOCK - 1) * C * BLOCK
    delta, times = int(is_delta), work.times
    multiplied = multiplied_as(work.key_dtype, work.value_dtype).itemsize
    queries, numbers, documents = multiplied * work.tokens * K * H, 4 * work.tokens * N, 4 * work.tokens
    squares, wide = multiplied * work.tokens * N * C, multiplied * work.tokens * N * V
    states = chunks * work.states

    def cost(flops: int, moved: int, *, exponentials: int = 0) -> KernelCost:
        return KernelCost(times * (flops + exponentials), times * exponentials, moved)

    return {
        "within_chunks": cost(
            (1 + delta) * of_keys + delta * (inverse + 2 * C * C) + 2 * C * C,
            2 * queries + (1 + delta) * (numbers + squares) + documents,
            exponentials=C * C,
        ),
        "forward": cost(
            (1 + delta) * of_tokens + (2 + delta) * of_state + (4 + 2 * delta) * C * V + 2 * H * V,
            2 * queries + 3 * numbers + 2 * work.values + (1 + delta) * squares + 2 * work.states + states + work.skip,
        ),
        "state_gradients": cost(
            2 * delta * of_tokens + (1 + 2 * delta) * of_state + (1 + 3 * delta) * C * V + (2 + delta) * H * V,
            (1 + delta) * queries
            + (1 + 2 * delta) * numbers
            + work.values
            + 2 * delta * squares
            + 2 * work.states
            + states,
        ),
        "value_gradients": cost(
            (2 + 3 * delta) * of_tokens
            + (2 + delta) * of_state
            + delta * of_keys
            + (10 + 6 * delta) * C * V
            + 2 * H * V
            + (5 + 6 * delta) * C * C,
            2 * queries
            + 8 * numbers
            + documents
            + 3 * work.values
            + 2 * delta * wide
            + (2 + 2 * delta) * squares
            + 2 * states
            + work.skip,
            exponentials=C * C,
        ),
        "query_gradients": cost(
            (2 + delta) * of_state + (2 + 2 * delta) * of_keys + (2 + 2 * delta) * C * V + (2 + 2 * delta) * C * H,
            2 * queries
            + 2 * 4 * work.tokens * K * H
            + 3 * numbers
            + (1 + delta) * squares
            + work.values
            + (2 * wide if is_delta else work.values)
            + 2 * states,
        ),
    }


COSTS = {"triton": triton_costs, "mosaic_tpu": mosaic_tpu_costs}


class ChunkProducts(NamedTuple):
    """Numbers of products of a chunk: of queries or keys with keys, of what tokens read of one another's values, of
    queries or keys with a state, and of keys with values, which update a state."""

    of_keys: int
    of_tokens: int
    of_state: int
    updates: int


def chunk_products(is_delta: bool) -> ChunkProducts:
    """Return the products of the forward pass, without those of the delta rule's inverse."""
    reads = 2 if is_delta else 1
    return ChunkProducts(reads, reads, reads, 1)


def products_again(implementation: str, is_delta: bool) -> ChunkProducts:
    """Return those that the backward pass computes besides the gradients of the forward pass's products."""
    if implementation == "mosaic_tpu":
        return chunk_products(is_delta)
    return ChunkProducts(3, 3, 3, 0) if is_delta else ChunkProducts(1, 0, 1, 0)  # each kernel what it reads


def inverse_products(implementation: str, chunk: int) -> int:
    """Return the products of matrices of a chunk that make the inverse of the delta rule's system."""
    least = 2 if implementation == "mosaic_tpu" else BLOCK
    return 2 * max((chunk // least).bit_length() - 1, 0)


class KernelMemory(NamedTuple):
    """Memory of a call's kernels.

    Attributes:
      padding: bytes that the operands and the states of chunks, which the backward pass reads, take beyond their
        numbers.
      forward, backward: the most bytes that the kernels of each pass hand to one another, and of padding of what else
        the pass reads and writes.
    """

    padding: int
    forward: int
    backward: int


def kernel_memory(implementation: str, query: Any, value: Any, chunk: int, *, is_delta: bool) -> KernelMemory:
    """Return the memory that the kernels of a call need besides its operands, results, and states of chunks.

    Args: as of `kernel_costs`.
    """
    work = LinearWork.of(query, value, chunk, is_delta=is_delta)
    if implementation == "mosaic_tpu":
        keys, values = _padding(work.keys, work.H), _padding(work.values, work.V)
        numbers, states = _padding(4 * work.tokens * work.N, work.C), _padding(work.states, work.V)
        operands = 2 * keys + values + 2 * numbers
        return KernelMemory(operands + work.chunks * states, values, operands + values)
    multiplied = multiplied_as(work.key_dtype, work.value_dtype).itemsize
    squares = (1 + is_delta) * multiplied * work.tokens * work.N * work.C
    wide = 2 * is_delta * multiplied * work.tokens * work.N * work.V
    forward = 2 * multiplied * work.tokens * work.K * work.H + squares
    return KernelMemory(0, forward, forward + squares + wide + work.chunks * work.states)


def _padding(size: int, columns: int) -> int:
    """Return the bytes beyond its own that an array of this size takes as a TPU's kernel reads it: its last dimension
    fills rows of lanes."""
    return size * (-columns % LANES) // columns


def _sum(*costs: KernelCost) -> KernelCost:
    return KernelCost(*map(sum, zip(*costs, strict=True)))
