"""Which blocks of scores have to be looked at: block ranges from the rows' intervals, in O(T + S) memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Ranges(NamedTuple):
    """int32 [B, blocks]: for each block of queries the blocks first ≤ j < last of keys of which it may see something,
    and those full ≤ j < full_end ≤ last of which each of its queries sees all. Or the other way round."""

    first: jax.Array
    full: jax.Array
    full_end: jax.Array
    last: jax.Array

    def stacked(self) -> jax.Array:
        """int32 [B, blocks, 4], as kernels read it."""
        return jnp.stack(self, axis=-1).astype(jnp.int32)


def key_ranges(start_BT: jax.Array, end_BT: jax.Array, queries: int, keys: int) -> Ranges:
    """For each block of `queries` queries, the blocks of `keys` keys. Intervals lie within the keys."""
    B, T = start_BT.shape
    # Rows that are not there see nothing: no block with one of them is full.
    rows = [(0, 0), (0, -T % queries)]
    start, end = (jnp.pad(x, rows).reshape(B, -1, queries) for x in (start_BT, end_BT))
    sees = start < end
    far = jnp.iinfo(jnp.int32).max
    last = jnp.max(jnp.where(sees, -(-end // keys), 0), axis=-1)
    first = jnp.minimum(jnp.min(jnp.where(sees, start // keys, far), axis=-1), last)
    full = jnp.clip(-(-jnp.max(start, axis=-1) // keys), first, last)
    full_end = jnp.clip(jnp.min(end, axis=-1) // keys, full, last)
    return Ranges(first, full, full_end, last)


def query_ranges(of_queries: Ranges, key_blocks: int) -> Ranges:
    """For each block of keys, the blocks of queries: the other way round of what `key_ranges` gave.

    Between first and last there may be blocks that see nothing of these keys; the full ones are the first run of them.
    """
    first, full, full_end, last = (x[:, :, None] for x in of_queries)
    j = jnp.arange(key_blocks, dtype=jnp.int32)[None, None]
    blocks = first.shape[1]
    i = jnp.arange(blocks, dtype=jnp.int32)[None, :, None]
    touched, whole = (first <= j) & (j < last), (full <= j) & (j < full_end)
    end = jnp.max(jnp.where(touched, i + 1, 0), axis=1)
    begin = jnp.minimum(jnp.min(jnp.where(touched, i, blocks), axis=1), end)
    run = jnp.min(jnp.where(whole, i, blocks), axis=1)
    run_end = jnp.min(jnp.where(~whole & (i >= run[:, None]), i, blocks), axis=1)
    return Ranges(begin, jnp.minimum(run, end), jnp.minimum(run_end, end), end)
