"""The tiles in which groups of sorted rows are walked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
    """Return the most tiles that so many groups of these rows together need, where tiles lie at multiples."""
    return -(-rows // tile) + groups - 1


def most_tiles(rows: int, groups: int, tile: int) -> int:
    """Return the most tiles that so many groups of these rows together need, where those of a group begin with it."""
    groups = min(rows, groups)
    return (rows + groups * (tile - 1)) // tile


def of_groups(sizes: jax.Array, rows: int, tile: int, aligned: bool) -> Visits:
    """Return the visits of groups of these sizes, int32 [G].

    aligned: tiles lie at multiples of `tile`, and one that has rows of several groups is visited once for each.
    Otherwise the tiles of a group begin at its first row, and the last may reach into the next group.
    """
    end = jnp.cumsum(sizes, dtype=jnp.int32)
    begin = end - sizes
    first = begin // tile if aligned else begin
    tiles = jnp.where(sizes > 0, (end - 1) // tile - first + 1, 0) if aligned else -(-sizes // tile)
    before = jnp.cumsum(tiles, dtype=jnp.int32)
    visit = jnp.minimum(
        jnp.arange(most_visits(rows, len(sizes), tile), dtype=jnp.int32), jnp.maximum(before[-1], 1) - 1
    )
    group = jnp.minimum(jnp.searchsorted(before, visit, side="right", method="compare_all"), len(sizes) - 1).astype(
        jnp.int32
    )
    of_group = visit - (before[group] - tiles[group])
    start = (first[group] + of_group) * tile if aligned else first[group] + of_group * tile
    return Visits(group, start.astype(jnp.int32), begin, end, before[-1])
