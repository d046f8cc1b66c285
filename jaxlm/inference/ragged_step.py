"""One step of the engine on a shard: a row of each sequence that decodes and rows of prompts; then the draw of the next
tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.inference.paged_cache import Arrays, PagedCache, PageLayout
from jaxlm.inference.requests import GREEDY, MAX_LOGPROBS
from jaxlm.inference.sampling import NO_TOKEN, Drawn, RowSampling, count_drawn, row_sampling, sample
from jaxlm.inference.step_shapes import StepShape
from jaxlm.models.doors import select
from jaxlm.models.transformer import Transformer
from jaxlm.parallel.collectives import on_any_shard
from jaxlm.parallel.partition import constrain
from kernels_pallas.flash_attention import KeyRange
from kernels_pallas.linear_cross_entropy.xla import cross_entropy


class Batch(NamedTuple):
    """The rows of one step, from the host. A run is one row of a sequence that decodes, or a tile of a prompt.

    `token_R`: int32; −1 is what was drawn last in the slot of a row that decodes. `position_R`: in the sequence, −1 is
    padding. `length_R`: the tokens that the row's sequence may come to. `row_Q`: the row that each draw follows:
    the rows that decode, in order, then the last rows of prompts. `slot_Q`: the slot on the device that keeps each
    draw; the last slot takes draws of padding. `tables`: of each group, int32 [·, M] of the runs that decode, and of
    the tiles where there are any. `target_R`: the token after each row of a prompt whose score is asked for; −1
    elsewhere. `is_ranked_R`: bool, whether the target's rank and all `MAX_LOGPROBS` likeliest tokens are asked for too.
    """

    token_R: np.ndarray
    position_R: np.ndarray
    length_R: np.ndarray
    row_Q: np.ndarray
    slot_Q: np.ndarray
    tables: tuple[tuple[np.ndarray, ...], ...]
    target_R: np.ndarray
    is_ranked_R: np.ndarray

    def shard(self, index: int, shards: int) -> "Batch":
        """Return the rows of one of the shards, which lie one after the other, as views."""
        return self if shards == 1 else jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:])[index], self)


class SlotState(NamedTuple):
    """The state of each slot on the device. `last_S`: the token drawn last. `counts_SV`: the counts of the
    slot's tokens (`sampling.token_counts`). `how`: the slot's sampling."""

    last_S: jax.Array
    counts_SV: jax.Array
    how: RowSampling

    @classmethod
    def empty(cls, slots: int, vocab_size: int) -> "SlotState":
        """Return the state of slots without a sequence, on the host: each takes the likeliest token."""
        counts_SV = np.zeros((slots, vocab_size), np.int32)
        return cls(np.zeros(slots, np.int32), counts_SV, row_sampling([GREEDY] * slots, 0))


class StepResults(NamedTuple):
    """The results of one step.

    `logits_QV`, `hidden_QD`: float32, the logits that each draw is from, and the normalised residual there.
    `logprob_R`: float32, ln p of the prompts' rows' targets. `rank_R`: int32, one more than the number of likelier
    tokens. `top_RK`, `top_logprob_RK`: the likeliest tokens there, in order, and their ln p, K as `Drawn` has it; where
    no ranks are asked for only the first, and no rank. These four arrays hold any values for rows without target, and
    are empty without scores.
    """

    logits_QV: jax.Array
    hidden_QD: jax.Array
    logprob_R: jax.Array
    rank_R: jax.Array
    top_RK: jax.Array
    top_logprob_RK: jax.Array


def ragged_step(
    module: Transformer,
    layout: PageLayout,
    shape: StepShape,
    pages: Arrays,
    last_S: jax.Array,
    batch: Batch,
    valid_V: jax.Array,
) -> tuple[Arrays, StepResults]:
    """Return the pages with the keys of all rows, and the results.

    Args:
      module: with parameters in the dtype to compute in.
      layout: of the pages, with the entries of the module's cache.
      last_S: int32, the token that each slot has drawn last.
      valid_V: bool, whether an id has a token.

    A row's results depend on the tokens of its own sequence alone.
    """
    decode_Q, prompt_R = batch.token_R[: shape.decode], batch.token_R[shape.decode :]
    token_R = jnp.concatenate([jnp.where(decode_Q < 0, last_S[batch.slot_Q], decode_Q), prompt_R])
    is_row_R = batch.position_R >= 0
    position_R1 = jnp.maximum(batch.position_R, 0)[:, None]
    end_R1 = jnp.where(is_row_R[:, None], position_R1 + 1, 0)
    rows = (1, shape.tile) if shape.tiles else (1,)
    cache = PagedCache(pages, batch.tables, batch.position_R, layout, rows)
    hidden_R1D, cache, _ = module.hidden(
        token_R[:, None],
        position_R1,
        KeyRange(jnp.zeros_like(end_R1), end_R1),
        cache=cache,
        length_BT=batch.length_R[:, None],
    )
    last_Q1D = select(hidden_R1D, batch.row_Q)
    logits_QV = module.logits(last_Q1D)[:, 0]
    if shape.scores:
        scores = _scores(module, hidden_R1D[shape.decode :], batch, valid_V, shape)
    else:
        scores = _no_scores(0, len(valid_V))
    return cache.arrays, StepResults(logits_QV, last_Q1D[:, 0].astype(jnp.float32), *scores)


def draw(
    state: SlotState, logits_QV: jax.Array, slot_Q: jax.Array, position_Q: jax.Array, valid_V: jax.Array
) -> tuple[SlotState, Drawn]:
    """Draw a token of each slot from logits, as the slot says, and return the state after it.

    `position_Q`: int32, of the tokens that are drawn. A program of its own: it takes as long to compile as a step of a
    small model, and is the same for all steps.
    """
    # The counts stay whole on each device. Otherwise XLA would shard them like the logits, and gather them again.
    counts_SV = constrain(state.counts_SV, "batch", None)
    how = jax.tree.map(lambda x: x[slot_Q], state.how)
    drawn = sample(logits_QV, how, position_Q, valid_V, lambda: counts_SV[slot_Q])
    last_S = state.last_S.at[slot_Q].set(drawn.token)
    counts_SV = constrain(count_drawn(counts_SV, slot_Q, drawn.token), "batch", None)
    return SlotState(last_S, counts_SV, state.how), drawn


def _no_scores(rows: int, vocabulary: int) -> tuple[jax.Array, ...]:
    """Return the last four fields of `StepResults` for rows without scores."""
    size = rows, min(MAX_LOGPROBS, vocabulary)
    return jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.full(size, NO_TOKEN), jnp.full(size, -jnp.inf)


def _scores(
    module: Transformer, hidden_R1D: jax.Array, batch: Batch, valid_V: jax.Array, shape: StepShape
) -> tuple[jax.Array, ...]:
    """Return the last four fields of `StepResults`: a tile of logits at a time, and none of tiles without target."""

    def of_tile(each: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        hidden_T1D, target_T, is_ranked_T = each
        _, no_rank_T, no_top_TK, no_logprob_TK = nothing = _no_scores(shape.tile, len(valid_V))
        is_ranked = on_any_shard(jnp.any(is_ranked_T))  # within a branch shards may exchange nothing

        def scored() -> tuple[jax.Array, ...]:
            logits_TV = module.logits(hidden_T1D)[:, 0]
            valid_logits_TV = jnp.where(valid_V[None], logits_TV, -jnp.inf)
            loss_T, ln_total_T = cross_entropy(logits_TV, jnp.maximum(target_T, 0))

            def ranked() -> tuple[jax.Array, ...]:
                whole_TV = constrain(valid_logits_TV, "batch", None)  # gathered once
                top_TK, id_TK = jax.lax.top_k(whole_TV, no_top_TK.shape[1])
                at_target_T1 = jnp.take_along_axis(whole_TV, jnp.maximum(target_T, 0)[:, None], axis=1)
                logprob_TK = top_TK - ln_total_T[:, None]
                is_token_TK = top_TK > -jnp.inf
                rank_T = 1 + jnp.sum(whole_TV > at_target_T1, axis=-1, dtype=jnp.int32)
                return rank_T, jnp.where(is_token_TK, id_TK, NO_TOKEN), jnp.where(is_token_TK, logprob_TK, -jnp.inf)

            def likeliest() -> tuple[jax.Array, ...]:
                id_T = jnp.argmax(valid_logits_TV, axis=-1).astype(jnp.int32)
                least_T, _ = cross_entropy(logits_TV, id_T)
                return no_rank_T, no_top_TK.at[:, 0].set(id_T), no_logprob_TK.at[:, 0].set(-least_T)

            return -loss_T, *jax.lax.cond(is_ranked, ranked, likeliest)

        return jax.lax.cond(on_any_shard(jnp.any(target_T >= 0)), scored, lambda: nothing)

    tiles = shape.tiles, shape.tile
    rows = hidden_R1D.reshape(*tiles, 1, -1), batch.target_R.reshape(tiles), batch.is_ranked_R.reshape(tiles)
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), jax.lax.map(of_tile, rows))
