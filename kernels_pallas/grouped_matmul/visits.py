"""The tiles in which groups of sorted rows are walked."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Visits(NamedTuple):
    """The tiles of groups of rows, in order; those beyond `count` repeat the last.

    Attributes:
      group, start: int32 [most]: of each visit its group and the first row of its tile.
      begin, end: int32 [G]: the rows of each group, from `begin` to before `end`.
      count: int32 []: the number of visits.
    """

    group: jax.Array
    start: jax.Array
    begin: jax.Array
    end: jax.Array
    count: jax.Array


def most_visits(rows: int, groups: int, tile: int) -> int:
    """Return the most tiles that so many groups of these rows together need, whatever divisor of `tile` they are
    aligned to."""
    return -(-rows // tile) + groups - 1


def most_tiles(rows: int, groups: int, tile: int, after: int = 0) -> int:
    """Return the most tiles that so many groups of these rows together need, where those of a group begin with it, or
    `after` rows later, fewer than a tile has."""
    groups = min(rows // (after + 1), groups)
    return (rows + groups * (tile - 1 - after)) // tile


class TileRows(NamedTuple):
    """The rows that the tiles of all groups compute, those for nothing included.

    Attributes:
      tile: the rows of a tile.
      expected: the mean, where each token chooses its groups with equal probability.
      most: the bound over all sizes of groups.
    """

    tile: int
    expected: float
    most: int


@functools.lru_cache(maxsize=256)
def computed_rows(
    tokens: int,
    choices: int,
    groups: int,
    tile: int,
    is_aligned: bool,
    multiplied: int | None = None,
    room: int | None = None,
    lengths: tuple[int, ...] = (),
) -> TileRows:
    """Return the rows that are computed for tokens of which each chooses so many of the groups.

    is_aligned: tiles lie at multiples of `tile`, and one with rows of several groups is computed for each of them;
    otherwise they begin with their group.
    multiplied: the groups whose rows are computed; all where None.
    room: the most rows that there may be; None: all that tokens may choose.
    lengths: the numbers of rows, in order, of which a tile computes the least that has those of its group; all where
        there are none. Tiles that are aligned have none.
    """
    multiplied = groups if multiplied is None else multiplied
    rows, most_rows = tokens * choices * multiplied / groups, room or tokens * min(choices, multiplied)
    most = tile * (most_visits if is_aligned else most_tiles)(most_rows, multiplied, tile) if most_rows else 0
    chance = choices / groups
    if is_aligned:  # each group but the first begins anywhere in a tile
        touched = multiplied * (1 - (1 - chance) ** tokens)
        expected = tile * math.ceil(rows / tile) + (tile - 1) * max(touched - 1, 0)
    else:
        steps = itertools.pairwise((0, *(lengths or (tile,))))
        expected = multiplied * sum((n - less) * _expected_tiles(tokens, chance, tile, less) for less, n in steps)
    return TileRows(tile, min(float(expected), float(most)), most)


def _expected_tiles(tokens: int, chance: float, tile: int, after: int = 0) -> float:
    """Return the mean number of tiles with more than `after` rows of a group that each token chooses with this
    probability: the sum over tiles of the probability that more tokens choose the group than the tiles before it and so
    many rows of it hold."""
    if chance >= 1:
        return max(math.ceil((tokens - after) / tile), 0)
    mean, deviation = tokens * chance, math.sqrt(tokens * chance * (1 - chance))
    # So many standard deviations from the mean nothing is left of a binomial distribution; 40 where the mean is small.
    low, high = max(0, math.floor(mean - 12 * deviation)), min(tokens, math.ceil(mean + 12 * deviation) + 40)
    n = np.arange(low + 1, high + 1)
    of_low = math.lgamma(tokens + 1) - math.lgamma(low + 1) - math.lgamma(tokens - low + 1)
    of_low += low * math.log(chance) + (tokens - low) * math.log1p(-chance)
    steps = np.log((tokens - n + 1) / n) + math.log(chance) - math.log1p(-chance)
    more = np.cumsum(np.exp(of_low + np.cumsum(steps))[::-1])[::-1]  # than low, low + 1, … tokens
    full = -((after - low) // tile)
    return full + float(more[full * tile + after - low :: tile].sum())


def of_groups(sizes: jax.Array, rows: int, tile: int, alignment: int, after: int = 0) -> Visits:
    """Return the visits of groups of these sizes, int32 [G].

    alignment: a divisor of `tile`. The tiles of a group follow one another from the last multiple of it that is not
    past the group's first row; the first may begin in the group before, and the last reach into the next.
    after: a multiple of `alignment`: the first rows of each group that no tile has.
    """
    end = jnp.cumsum(sizes, dtype=jnp.int32)
    begin = end - sizes
    first = begin // alignment * alignment + after
    tiles = jnp.where(sizes > 0, jnp.maximum(-((first - end) // tile), 0), 0)
    before = jnp.cumsum(tiles, dtype=jnp.int32)
    visit = jnp.minimum(
        jnp.arange(most_visits(rows, len(sizes), tile), dtype=jnp.int32), jnp.maximum(before[-1], 1) - 1
    )
    group = jnp.minimum(jnp.searchsorted(before, visit, side="right", method="compare_all"), len(sizes) - 1).astype(
        jnp.int32
    )
    of_group = visit - (before[group] - tiles[group])
    start = first[group] + of_group * tile
    return Visits(group, start.astype(jnp.int32), begin, end, before[-1])


def check_sizes(operation: str, sizes: Any, groups: int, rows: int) -> None:
    """Raise ValueError for sizes that are not those of so many groups of these rows; their values are checked where
    they are known."""
    if sizes.dtype != jnp.int32 or sizes.shape != (groups,):
        raise ValueError(f"{operation}: sizes are {sizes.dtype}{list(sizes.shape)}; they must be int32[{groups}]")
    if isinstance(sizes, jax.core.Tracer) or not isinstance(sizes, jax.Array | np.ndarray):
        return
    known = np.asarray(sizes)
    if (known < 0).any():
        raise ValueError(f"{operation}: sizes[{known.argmin()}] = {known.min()}; no group has fewer than 0 rows")
    if known.sum(dtype=np.int64) > rows:
        raise ValueError(f"{operation}: sizes add up to {known.sum(dtype=np.int64)}, and x has {rows} rows")
