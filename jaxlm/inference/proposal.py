"""Drafts of the next tokens of sequences, drawn by a smaller model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.inference.paged_cache import Arrays, PageLayout
from jaxlm.inference.ragged_step import Batch, NextTokens, ragged_step
from jaxlm.inference.sampling import RowSampling, sample
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.models.transformer import Transformer


class DraftRows(NamedTuple):
    """The sequences whose next tokens are foreseen. `slot_N`: int32, the last slot for padding. `length_N`: int32, the
    tokens that each may come to. `tables`: of each group of the smaller model's layers, int32 [N, M]."""

    slot_N: np.ndarray
    length_N: np.ndarray
    tables: tuple[np.ndarray, ...]

    def shard(self, index: int, shards: int) -> "DraftRows":
        """Return the rows of one of the shards, which lie one after the other, as views."""
        return self if shards == 1 else jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:])[index], self)


def propose(
    module: Transformer,
    layout: PageLayout,
    pages: Arrays,
    upcoming: NextTokens,
    how: RowSampling,
    rows: DraftRows,
    valid_V: jax.Array,
) -> tuple[Arrays, jax.Array]:
    """Return the pages with the keys of the tokens that were read, and the drafts of all slots, int32 [S, drafts].

    A draft is drawn as the slot draws, without penalties, and with the random numbers of its place: the likelier is it
    the token that will be drawn there.

    Args:
      valid_V: bool, whether an id may be drawn.
    """
    slots, drafts = upcoming.draft_SK.shape
    N, position_N = len(rows.slot_N), upcoming.length_S[rows.slot_N] - 1
    is_row_N = rows.slot_N < slots - 1
    alone = upcoming._replace(draft_SK=upcoming.draft_SK[:, :0])  # a row of each sequence, so that no page has two
    none, zeros = jnp.zeros(0, jnp.int32), jnp.zeros(N, jnp.int32)
    how = jax.tree.map(lambda x: x[rows.slot_N], how)._replace(logprobs=jnp.full(N, -1))
    token_N, drawn = upcoming.last_S[rows.slot_N], []
    for draft in range(drafts):
        # Beyond the pages of a sequence keys go to page 0; they are written again when their tokens are read.
        at_N = jnp.where(is_row_N & (position_N + draft < rows.length_N), position_N + draft, -1)
        batch = Batch(
            token_R=jnp.maximum(token_N, 0),
            position_R=at_N,
            length_R=rows.length_N,
            row_Q=jnp.arange(N),
            slot_Q=rows.slot_N,
            draft_Q=zeros,
            limit_Q=zeros,
            tables=tuple((table,) for table in rows.tables),
            target_R=none,
            is_ranked_R=none,
        )
        pages, results = ragged_step(module, layout, StepShape(N, 0, TILE), pages, alone, batch, valid_V)
        token_N = sample(results.logits_QV, how, position_N + draft + 1, valid_V).token
        drawn.append(token_N)
    return pages, upcoming.draft_SK.at[rows.slot_N].set(jnp.stack(drawn, axis=1))
