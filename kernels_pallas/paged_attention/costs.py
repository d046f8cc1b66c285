"""The cost of paged attention: one page of each sequence, as XLA reads it, and the kernels."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax

from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.paged_attention.xla import block_sequences, multiplied_by_xla, padded_columns, padded_queries

# A GPU's kernel splits the keys of few queries: `SPLIT` tokens go to each of `LANES` programs in turn. The keys of a
# prompt's tile, of which there are several at once, go to one.
FEW_QUERIES, SPLIT, LANES = 8, 256, 32
_LATENT_SPLIT = 1024  # of latents, whose sums of many heads are as long as four times as many tokens

# FLOPs for each score between the two products (scale, maximum, difference, exponential, sum), and for a soft cap.
_SCORE_FLOPS, _CAP_FLOPS = 5, 3
_RESCALE_FLOPS = 2  # for each element of the sum so far


class SectionReads(NamedTuple):
    """A section of an engine's step, and the pages that its rows read.

    Attributes:
      sequences: sequences of the section, padding included.
      queries: rows of each sequence.
      pages: the most pages of a sequence in all counted steps together, for each window (the last tokens that a row
        reads; None: all). A section whose rows are all padding has zero.
      table: pages of a sequence's table.
      steps: the number of counted steps.
      padding: rows of padding in all counted steps together.
      run: sequences that are rows of one run, a token and drafts of the next ones: a kernel reads their pages once. A
        fraction is the mean of runs that were cut from one sequence's rows.
      loops: as `pages`, the trips of XLA's loops over pages, of all blocks of sequences together (`block_trips`); None
        where one block has all sequences.
    """

    sequences: int
    queries: int
    pages: tuple[tuple[int | None, int], ...]
    table: int
    steps: int = 1
    padding: int = 0
    run: Fraction | int = 1
    loops: tuple[tuple[int | None, int], ...] | None = None

    @property
    def together(self) -> int:
        """The sequences of a block, of which a trip of XLA's loop reads a page each."""
        return block_sequences(self.sequences, self.queries)

    @property
    def blocks(self) -> int:
        """The blocks of sequences."""
        return -(-self.sequences // max(self.together, 1))

    @property
    def runs(self) -> int:
        """The runs of all sequences."""
        return math.ceil(self.sequences / self.run)

    def trips(self, window: int | None) -> int:
        """Return the most pages of a sequence in layers with this window."""
        return dict(self.pages)[window]

    def loop_trips(self, window: int | None) -> int:
        """Return the trips of XLA's loops over pages, of all blocks together, in layers with this window."""
        return dict(self.loops or self.pages)[window]


def block_trips(pages: Sequence[int], sequences: int, queries: int) -> int:
    """Return the trips of XLA's loops over the blocks of so many sequences, with so many queries each, of which some
    see these numbers of pages and the others none."""
    size = block_sequences(sequences, queries)
    padding = -(-sequences // size) * size - len(pages)
    return sum(sorted([*pages, *[0] * padding])[size - 1 :: size])


def loop_name(queries: int, window: int | None) -> str:
    """Return the scope in a program of the loop over pages, for sequences with this number of rows each."""
    return f"pages_of_{queries}_rows" + ("" if window is None else f"_in_windows_of_{window}")


class PageCost(NamedTuple):
    """The cost of one page of each of Q sequences.

    Attributes:
      products: sizes (batch, m, k, n) of two products: queries with keys, and weights with values.
      flops: FLOPs of the element-wise work between the two products.
      least_bytes: bytes moved if each page is read once and nothing else goes through memory.
      most_bytes: bytes moved if pages are gathered first, and scores, weights and sums go through memory.
      workspace: bytes of the gathered pages, the scores, the weights, and the sums before and after the page.
    """

    products: tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
    flops: int
    least_bytes: int
    most_bytes: int
    workspace: int


def page_cost(
    query: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    value: jax.ShapeDtypeStruct | int,
    soft_cap: float | None,
    platform: str | None,
) -> PageCost:
    """Return the cost of one page of each sequence, for operands as `kernels_pallas.paged_attention` takes them: query
    [Q, T, N, H], key [P, K, H, S] and value [P, K, S, V], or V where values are a part of the keys. Pages of eight bits
    have scales."""
    (Q, T, N, H), (_, K, _, S), V = query.shape, key.shape, _width(value)
    rows = padded_queries(T, N // K, H, V, S) * (N // K)
    columns = padded_columns(V)
    scores, sums = Q * K * rows * S, Q * K * rows * columns
    itemsize = multiplied_by_xla(query, key, platform).itemsize if key.dtype.itemsize == 1 else key.dtype.itemsize
    pages, gathered = (Q * K * S * (H + V) * size for size in (key.dtype.itemsize, itemsize))
    scales = Q * K * S * _scale_bytes(key, value)
    through_memory = scores * (4 + 4 + 2 * itemsize) + 2 * 4 * sums
    return PageCost(
        ((Q * K, rows, H, S), (Q * K, rows, S, columns)),
        scores * _score_flops(key, soft_cap) + _RESCALE_FLOPS * sums,
        Q * K * S * _token_bytes(H, key, value),
        pages + 2 * gathered + 3 * scales + through_memory,
        gathered + scales + scores * (4 + itemsize) + 2 * 4 * sums,
    )


def _width(value: Any) -> int:
    """Return the channels of values."""
    return value if isinstance(value, int) else value.shape[3]


def _token_bytes(H: int, key: Any, value: Any) -> int:
    """Return the bytes of a token in pages, for each key head, scales included."""
    numbers = H if isinstance(value, int) else H + value.shape[3]
    return numbers * key.dtype.itemsize + _scale_bytes(key, value)


def _scale_bytes(key: Any, value: Any) -> int:
    """Return the bytes of a token's scales, for each key head: those of pages of eight bits."""
    return 0 if key.dtype.itemsize > 1 else 4 if isinstance(value, int) else 8


def _score_flops(key: Any, soft_cap: float | None) -> int:
    """Return the FLOPs for each score between the two products; a score and its weight each have a scale."""
    return _SCORE_FLOPS + (_CAP_FLOPS if soft_cap else 0) + (2 if key.dtype.itemsize == 1 else 0)


def kernel_costs(
    query: Any,
    key: Any,
    value: Any,
    table: Any,
    *,
    soft_cap: float | None = None,
    implementation: str | None = None,
    **_: Any,
) -> KernelCosts:
    """Return the costs of an implementation's kernels, or without one of a kernel that reads each page once, on these
    arrays, or shapes and dtypes, if all pages of the table are seen. There is no derivative."""
    each = launch_costs(implementation, query, key, value, table.shape[1] * key.shape[3], soft_cap)
    return KernelCosts(KernelCost(*map(sum, zip(*each, strict=True))), KernelCost())


def launch_costs(
    implementation: str | None,
    query: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    value: jax.ShapeDtypeStruct | int,
    tokens: int,
    soft_cap: float | None,
) -> tuple[KernelCost, ...]:
    """Return the cost of each launch that attends to this many tokens of each sequence, for operands as `page_cost`
    takes them."""
    if implementation not in ("triton", "mosaic_gpu"):
        return (one_kernel_cost(query, key, value, tokens, soft_cap),)
    of_lanes = lanes(query.shape[1], tokens, value)
    return lanes_cost(query, key, value, tokens, of_lanes, soft_cap), join_cost(query, _width(value), of_lanes)


def split_of(value: Any) -> int:
    """Return the tokens that a program takes in turn; `value` may be the number of a key's channels that are its
    value."""
    return _LATENT_SPLIT if isinstance(value, int) else SPLIT


def lanes(queries: int, tokens: int, value: Any) -> int:
    """Return the programs among which a sequence of this many tokens is split, for so many queries of it."""
    return min(LANES, -(-tokens // split_of(value))) if queries <= FEW_QUERIES else 1


def one_kernel_cost(
    query: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    value: jax.ShapeDtypeStruct | int,
    tokens: int,
    soft_cap: float | None,
) -> KernelCost:
    """Return the cost of a kernel that attends to this many tokens of each sequence by itself, for operands as
    `page_cost` takes them: each token is read once, and the result is written."""
    (Q, T, N, H), K, V = query.shape, key.shape[1], _width(value)
    scores, rows = Q * T * N * tokens, Q * T * N
    flops = scores * (2 * (H + V) + _score_flops(key, soft_cap))
    moved = Q * K * tokens * _token_bytes(H, key, value) + rows * (H + V) * query.dtype.itemsize
    return KernelCost(flops, scores, moved)


def lanes_cost(
    query: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    value: jax.ShapeDtypeStruct | int,
    tokens: int,
    lanes: int,
    soft_cap: float | None,
) -> KernelCost:
    """Return the cost of the kernel that attends to this many tokens of each sequence, for operands as `page_cost`
    takes them: each token is read once, and the sums of each lane are written."""
    flops, scores, moved = one_kernel_cost(query, key, value, tokens, soft_cap)
    rows, V = math.prod(query.shape[:3]), _width(value)
    return KernelCost(flops, scores, moved - rows * V * query.dtype.itemsize + lane_bytes(rows, lanes, V))


def join_cost(query: jax.ShapeDtypeStruct, V: int, lanes: int) -> KernelCost:
    """Return the cost of the kernel that joins the sums of lanes."""
    rows = math.prod(query.shape[:3])
    flops = rows * lanes * (_RESCALE_FLOPS * (V + 1) + 1)
    return KernelCost(flops, rows * lanes, lane_bytes(rows, lanes, V) + rows * V * query.dtype.itemsize)


def lane_bytes(rows: int, lanes: int, V: int) -> int:
    """Return the bytes of the sums of lanes for these rows, in float32: V columns of values, the weights, and the
    largest score."""
    return 4 * rows * lanes * (V + 2)
