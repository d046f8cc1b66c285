"""How attention on a CPU leaves out scores that causality hides: queries in parts, each with the keys before the part's
end. Imports no JAX."""

import itertools

# Queries of a part at least: smaller products are slower. Parts at most: the program holds the products of each.
_QUERIES, _PARTS = 128, 8


def parts(length: int) -> list[tuple[int, int]]:
    """(first, end) of the queries of each part; of keys it has those before its end."""
    n = min(max(length // _QUERIES, 1), _PARTS)
    bounds = [length * i // n for i in range(n + 1)]
    return list(itertools.pairwise(bounds))
