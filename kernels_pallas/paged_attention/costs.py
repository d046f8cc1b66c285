"""The cost of paged attention as XLA runs it: one trip of its loop over the pages of each sequence."""

from typing import NamedTuple

import jax

from kernels_pallas.paged_attention.xla import padded_columns, padded_queries

# FLOPs of a score between the two products: scale, largest, difference, exponential, sum; of a soft cap besides.
_SCORE_FLOPS, _CAP_FLOPS = 5, 3
_RESCALE_FLOPS = 2  # of each number of the sum so far


class PagedRuns(NamedTuple):
    """Runs of rows, each of one sequence, which a step of an engine reads pages for.

    Attributes:
      sequences: the runs, padding among them.
      queries: rows of each.
      pages: by window (the last tokens that a row reads; None: all) the trips of the loop over their pages.
    """

    sequences: int
    queries: int
    pages: tuple[tuple[int | None, int], ...]

    def trips(self, window: int | None) -> int:
        """Return the trips of the loop over pages where rows read this window."""
        return dict(self.pages)[window]


def loop_name(queries: int, window: int | None) -> str:
    """Return the name of the loop over the pages of runs of so many rows, in the scopes of a program."""
    return f"pages_of_{queries}_rows" + ("" if window is None else f"_in_windows_of_{window}")


class PageCost(NamedTuple):
    """The cost of one page of each of Q sequences.

    Attributes:
      products: the scores, and their product with the values, as (batch, m, k, n).
      flops: of what lies between the two.
      least_bytes: of the pages, read once.
      most_bytes: where pages are gathered first, and scores, weights and sums go through memory.
      workspace: bytes of the gathered pages, the scores and weights, and the sums before and after.
    """

    products: tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
    flops: int
    least_bytes: int
    most_bytes: int
    workspace: int


def page_cost(
    query: jax.ShapeDtypeStruct, key: jax.ShapeDtypeStruct, value: jax.ShapeDtypeStruct, soft_cap: float | None
) -> PageCost:
    """Return the cost of one page of each sequence, for operands as `kernels_pallas.paged_attention` takes them: query
    [Q, T, N, H], key [P, K, H, S] and value [P, K, S, V]."""
    (Q, T, N, H), (_, K, S, V) = query.shape, value.shape
    rows = padded_queries(T, N // K, H, V, S) * (N // K)
    columns = padded_columns(V)
    scores, sums = Q * K * rows * S, Q * K * rows * columns
    pages = Q * K * S * (H + V) * key.dtype.itemsize
    through_memory = scores * (4 + 4 + 2 * value.dtype.itemsize) + 2 * 4 * sums
    return PageCost(
        ((Q * K, rows, H, S), (Q * K, rows, S, columns)),
        scores * (_SCORE_FLOPS + (_CAP_FLOPS if soft_cap else 0)) + _RESCALE_FLOPS * sums,
        pages,
        3 * pages + through_memory,
        pages + scores * (4 + value.dtype.itemsize) + 2 * 4 * sums,
    )
