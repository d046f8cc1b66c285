"""Speculation by equality: drafts of the next tokens, and which of them are accepted (arXiv:2408.07978).

Rows of a run read a sequence's last token and the drafts after it, and each draws a token with the random numbers of
its place. A draft is accepted if it equals the token that the row before it has drawn. So a sequence has the tokens
that it has without drafts, at any temperature, and penalties, biases and log-probabilities are those of its tokens.
"""

import jax
import jax.numpy as jnp

from jaxlm.inference.ngrams import NO_DRAFT


def accepted(
    token_Q: jax.Array, is_read_Q: jax.Array, draft_Q: jax.Array, drawn_Q: jax.Array, drafts: int
) -> jax.Array:
    """Return whether the token drawn after each row is the next of its sequence, bool [Q].

    Args:
      token_Q: int32, that the row has read.
      draft_Q: int32, the index of the row in its run; the rows of a run follow one another.
      drawn_Q: int32.
      drafts: the most of a run.
    """
    is_accepted_Q = is_read_Q & (draft_Q == 0)
    equals_Q = is_read_Q & (token_Q == jnp.roll(drawn_Q, 1))
    for draft in range(1, drafts + 1):
        is_accepted_Q |= (draft_Q == draft) & equals_Q & jnp.roll(is_accepted_Q, 1)
    return is_accepted_Q


def is_last(is_accepted_Q: jax.Array, draft_Q: jax.Array) -> jax.Array:
    """Return whether a row is the last of its run that is accepted, bool [Q]."""
    goes_on_Q = (is_accepted_Q & (draft_Q > 0))[1:]
    return is_accepted_Q & ~jnp.append(goes_on_Q, False)


def drafts_after(draft_SK: jax.Array, slot_Q: jax.Array, draft_Q: jax.Array) -> jax.Array:
    """Return the draft that follows each row in its slot, int32 [Q]; `NO_DRAFT` after the last."""
    none_S1 = jnp.full((len(draft_SK), 1), NO_DRAFT, jnp.int32)
    return jnp.concatenate([draft_SK, none_S1], axis=1)[slot_Q, draft_Q]


def count_drafts(counts_QV: jax.Array, token_Q: jax.Array, draft_Q: jax.Array, drafts: int) -> jax.Array:
    """Return counts (`sampling.token_counts`) with the drafts that each row and those before it in its run read."""
    rows_Q = jnp.arange(len(token_Q))
    for back in range(drafts):
        token = jnp.where(draft_Q > back, jnp.roll(token_Q, back), counts_QV.shape[1])
        counts_QV = counts_QV.at[rows_Q, token].add(2, mode="drop")
    return counts_QV
