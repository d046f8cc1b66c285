"""The order in which devices that share a sequence hold its columns.

Of 2n chunks of a sequence, shard i of n has chunk i and chunk 2n − 1 − i: under a causal mask each shard then has as
many scores as another, for keys of any shard (Brandon et al. 2023, arXiv:2311.09431, and Llama 3, arXiv:2407.21783,
section 3.3.2). Batches are laid out so on the host; masks are made of the columns.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.parallel.partition import shards_of


def balanced_columns(length: int, shards: int) -> np.ndarray:
    """Return the column at each place of a sequence that lies in so many shards, int32 [length].

    Raises ValueError where twice the shards do not divide the length.
    """
    index = np.arange(length, dtype=np.int32)
    if shards == 1:
        return index
    if length % (2 * shards):
        raise ValueError(f"a sequence of {length} tokens does not lie in {shards} shards of two equal chunks each")
    first, second = np.split(index.reshape(2, shards, -1), 2)
    return np.stack([first[0], second[0, ::-1]], axis=1).reshape(-1)


def columns_around(length: int) -> np.ndarray:
    """Return the column at each place of a sequence, under the mesh and rules around, int32 [length]."""
    return balanced_columns(length, shards_of("sequence", length))


def in_column_order(x: jax.Array, shards: int) -> jax.Array:
    """Return an array [B, T, …] whose T lies in `balanced_columns` in the order of the columns."""
    if shards == 1:
        return x
    chunks = x.reshape(len(x), shards, 2, -1, *x.shape[2:])
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x.shape)


def from_column_order(x: jax.Array, shards: int) -> jax.Array:
    """Return an array [B, T, …] in the order of the columns with its T in `balanced_columns`."""
    if shards == 1:
        return x
    chunks = x.reshape(len(x), 2, shards, -1, *x.shape[2:])
    return jnp.stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2).reshape(x.shape)
