"""The lookup of angles by blocks of rows in a table that rows share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def tables_of_blocks(
    cos_AP: jax.Array, sin_AP: jax.Array, rows: int, block: int
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Return the tables that blocks of `block` rows read, and a map from a block to its index in the tables.

    Row i is rotated by the angles i modulo A, and A divides rows. The tables are unchanged if each consists of whole
    blocks; otherwise XLA repeats them for each row.
    """
    A = len(cos_AP)
    if A < rows and A % block:
        cos_AP, sin_AP, A = jnp.tile(cos_AP, (rows // A, 1)), jnp.tile(sin_AP, (rows // A, 1)), rows
    blocks = pl.cdiv(A, block)
    return cos_AP, sin_AP, lambda i: i % blocks
