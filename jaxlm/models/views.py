"""Views of a layer's cache, which attention reads: whole slots, or pages of them."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models.masks import Mask
from kernels_pallas.flash_attention import KeyRange


class CacheView(NamedTuple):
    """The slots of a layer's cache, for reading.

    `arrays`: by slot of tokens, [B, S, *shape]. `key_range`: the keys, as indices into S, that each token of this pass
    sees; None before they were written. `is_causal`: a promise that S are the tokens of this pass, and that none sees a
    key after its own.
    """

    arrays: dict[str, jax.Array]
    key_range: Mask | None = None
    is_causal: bool = False


class RowRuns(NamedTuple):
    """The runs among rows of which some are drafts that follow one another in one sequence: rows [Q] that read one by
    one may read the pages of a run together.

    `row_GT`: int32, the rows of each run, Q where it has fewer. `place_Q`: int32, the place of a row among all of them.
    """

    row_GT: jax.Array
    place_Q: jax.Array

    @classmethod
    def of(cls, draft_Q: jax.Array, most: int, length: int) -> "RowRuns":
        """Return at most `most` runs of at most `length` rows; longer ones are cut. `draft_Q`: how many rows of its
        sequence come before each row. Rows of padding are those of no sequence, after all others; they may be in any
        run, also several in one place."""
        Q = len(draft_Q)
        run_Q = jnp.minimum(jnp.cumsum(draft_Q % length == 0) - 1, most - 1)
        place_Q = run_Q * length + draft_Q % length
        row_GT = jnp.full(most * length, Q, jnp.int32).at[place_Q].set(jnp.arange(Q, dtype=jnp.int32))
        return cls(row_GT.reshape(most, length), place_Q)

    def gathered(self, x_Q: jax.Array) -> jax.Array:
        """Return rows [Q, …] by runs, [G, T, …], zeros where a run has fewer."""
        return jnp.pad(x_Q, [(0, 1), *[(0, 0)] * (x_Q.ndim - 1)])[self.row_GT]

    def scattered(self, x_GT: jax.Array) -> jax.Array:
        """Return the rows [Q, …] of runs."""
        return x_GT.reshape(-1, *x_GT.shape[2:])[self.place_Q]


@partial(jax.tree_util.register_dataclass, data_fields=["table", "runs"], meta_fields=["rows"])
@dataclass(frozen=True)
class PagedSection:
    """Rows of a step, `rows` of each of Q sequences: the page table of these sequences is int32 [Q, M]. `runs`: those
    of a section of one row whose sequences may be equal, which may be read together."""

    table: jax.Array
    rows: int
    runs: RowRuns | None = None


def scales_of(slot: str) -> str:
    """Return the name of the slot with the scales of another slot, whose numbers are of eight bits."""
    return f"{slot}_scales"


class PagedView(NamedTuple):
    """The slots of tokens of a layer's cache in pages, for reading by rows [R, 1] that follow one another in sections.

    `pages`: by slot, [P, …, S, H] where an entry is [..., H]: each head's tokens of a page together; [P, …, H, S] of
    those `tokens_last`; scales of numbers of eight bits are [P, …, 1, S] (`scales_of`). `key_range`: the positions that
    each row sees in its sequence.
    """

    pages: dict[str, jax.Array]
    sections: tuple[PagedSection, ...]
    key_range: KeyRange
    tokens_last: frozenset[str] = frozenset()

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The slots as a `CacheView` has them, [R, M · S, *shape]: a copy of all pages for each row."""
        table_RM = jnp.concatenate([jnp.repeat(each.table, each.rows, axis=0) for each in self.sections])

        def gathered(pages: jax.Array) -> jax.Array:
            by_token = jnp.moveaxis(pages, -2, 1)[table_RM]  # [R, M, S, …, H]
            return by_token.reshape(by_token.shape[0], -1, *by_token.shape[3:])

        return {name: gathered(self.pages_of(name, tokens_last=False)) for name in self.pages}

    def pages_of(self, name: str, *, tokens_last: bool) -> jax.Array:
        """Return the pages of a slot with tokens last, or last but one: a copy of all where they lie otherwise."""
        pages = self.pages[name]
        return pages if tokens_last == (name in self.tokens_last) else jnp.swapaxes(pages, -1, -2)
