"""The blocks of scores that are computed: block ranges from the rows' intervals, in O(T + S) memory, fused by XLA.

Ranges of intervals that are numpy arrays are computed while tracing, so that the program only reads them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.core.attention.key_range import array_module, without_repeats


class BlockRanges(NamedTuple):
    """Ranges of blocks, int32 [B or 1, blocks], for each block of queries.

    The blocks of keys first ≤ j < last may contain unmasked scores; in the blocks full ≤ j < full_end ≤ last all scores
    are unmasked. For each block of keys the roles are exchanged.
    """

    first: Any
    full: Any
    full_end: Any
    last: Any

    def stacked(self, batch: int) -> jax.Array:
        """Return int32 [B, blocks, 4], as kernels read it."""
        ranges = array_module(*self).stack(self, axis=-1).astype(np.int32)
        return jnp.broadcast_to(ranges, (batch, *ranges.shape[1:]))


def key_ranges(start: Any, end: Any, queries: int, keys: int) -> BlockRanges:
    """Return for each block of `queries` queries the range of blocks of `keys` keys. Intervals [B, T] lie within the
    keys.
    """
    module = array_module(start, end)
    # Rows beyond T attend to nothing: no block that contains one is full.
    rows = [(0, 0), (0, -start.shape[1] % queries)]
    start, end = (module.pad(without_repeats(x), rows) for x in (start, end))
    start, end = (x.reshape(x.shape[0], -1, queries) for x in (start, end))
    nonempty = start < end
    far = np.iinfo(np.int32).max
    last = module.max(module.where(nonempty, -(-end // keys), 0), axis=-1)
    first = module.minimum(module.min(module.where(nonempty, start // keys, far), axis=-1), last)
    full = module.clip(-(-module.max(start, axis=-1) // keys), first, last)
    full_end = module.clip(module.min(end, axis=-1) // keys, full, last)
    return BlockRanges(first, full, full_end, last)


def query_ranges(of_queries: BlockRanges, key_blocks: int) -> BlockRanges:
    """Return for each block of keys the range of blocks of queries, from the result of `key_ranges`.

    Between first and last there may be blocks in which these keys are masked; full blocks are the first consecutive
    run.
    """
    module = array_module(*of_queries)
    first, full, full_end, last = (x[:, :, None] for x in of_queries)
    j = np.arange(key_blocks, dtype=np.int32)[None, None]
    blocks = first.shape[1]
    i = np.arange(blocks, dtype=np.int32)[None, :, None]
    touched, whole = (first <= j) & (j < last), (full <= j) & (j < full_end)
    end = module.max(module.where(touched, i + 1, 0), axis=1)
    begin = module.minimum(module.min(module.where(touched, i, blocks), axis=1), end)
    run = module.min(module.where(whole, i, blocks), axis=1)
    run_end = module.min(module.where(~whole & (i >= run[:, None]), i, blocks), axis=1)
    run, run_end = module.minimum(run, end), module.minimum(run_end, end)
    return BlockRanges(begin, run, run_end, end)


def add_order(of_keys: BlockRanges, query_blocks: int) -> jax.Array:
    """Return the order in which blocks of keys add to blocks of queries: the number of earlier blocks that do.

    int32 [B or 1, blocks of keys, blocks of queries], from the result of `query_ranges`: too large for a constant of
    the program.
    """
    first, last = jax.lax.optimization_barrier((jnp.asarray(of_keys.first), jnp.asarray(of_keys.last)))
    i = jnp.arange(query_blocks, dtype=jnp.int32)[None, None]
    touched = ((first[:, :, None] <= i) & (i < last[:, :, None])).astype(jnp.int32)
    return jnp.cumsum(touched, axis=1) - touched
