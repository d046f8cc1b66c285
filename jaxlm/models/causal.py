"""What causality hides, on a CPU: a program of XLA computes a part of the queries with the keys up to that part's end.
Imports no JAX."""

# Queries of a part at least, and parts at most: smaller products are slower, and the program has each of them.
_QUERIES, _PARTS = 128, 8


def parts(length: int) -> list[tuple[int, int]]:
    """(first, end) of the queries of each part; of keys it has those before its end."""
    n = min(max(length // _QUERIES, 1), _PARTS)
    bounds = [length * i // n for i in range(n + 1)]
    return list(zip(bounds, bounds[1:], strict=False))
