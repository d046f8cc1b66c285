"""The chunks in which causal attention skips scores on a CPU: queries, each chunk with the keys before its end."""

import itertools

# Fewest queries of a chunk: smaller products are slower. Most chunks: the program holds the products of each.
_QUERIES, _CHUNKS = 128, 8


def bounds(length: int) -> list[tuple[int, int]]:
    """Return (first, end) of the queries of each chunk; its keys are those before `end`."""
    n = min(max(length // _QUERIES, 1), _CHUNKS)
    ends = [length * i // n for i in range(n + 1)]
    return list(itertools.pairwise(ends))
