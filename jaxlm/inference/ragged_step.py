"""One step of the engine on a shard: rows of each sequence that decodes and rows of prompts; then the draw of the next
tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.inference.ngrams import NO_DRAFT, look_up
from jaxlm.inference.paged_cache import Arrays, PagedCache, PageLayout
from jaxlm.inference.requests import GREEDY, MAX_LOGPROBS
from jaxlm.inference.sampling import NO_TOKEN, Drawn, RowSampling, count_drawn, row_sampling, sample
from jaxlm.inference.speculation import accepted, count_drafts, drafts_after, is_last
from jaxlm.inference.step_shapes import StepShape
from jaxlm.models.doors import select
from jaxlm.models.transformer import Transformer
from jaxlm.models.views import RowRuns
from jaxlm.parallel.collectives import all_parts, of_parts, on_any_shard, own_part, parts_of
from jaxlm.parallel.partition import constrain
from kernels_pallas.flash_attention import KeyRange
from kernels_pallas.linear_cross_entropy.xla import cross_entropy
from kernels_pallas.paged_attention.costs import FEW_QUERIES


class Batch(NamedTuple):
    """The rows of one step, from the host: first those that decode, then tiles of prompts.

    `token_R`: int32. `position_R`: in the sequence, −1 is padding. `length_R`: the tokens that the row's sequence may
    come to. `row_Q`: the row that each draw follows: the rows that decode, in order, then the last rows of prompts.
    `slot_Q`: the slot on the device that keeps each draw; the last slot takes draws of padding. `draft_Q`, `limit_Q`:
    of rows that decode. Their tokens and positions are on the device alone: row 0 of a run reads what was drawn last in
    its slot, row j the j-th draft after it, if its position is below the limit. The limit is 0 where `token_R` and
    `position_R` say what is read. `tables`: of each group, int32 [·, M] of the rows that decode, and of the tiles where
    there are any. `target_R`: the token after each row of a prompt whose score is asked for; −1 elsewhere.
    `is_ranked_R`: bool, whether the target's rank and all `MAX_LOGPROBS` likeliest tokens are asked for too.
    `adapter_R`: the adapter of each row, from 1 on, and 0 for none; None where the engine has no adapters. `given_Q`:
    the drafts that the host gives, in the rows that read them in place of those on the device; `NO_DRAFT` elsewhere;
    None where the engine has no drafts.
    """

    token_R: np.ndarray
    position_R: np.ndarray
    length_R: np.ndarray
    row_Q: np.ndarray
    slot_Q: np.ndarray
    draft_Q: np.ndarray
    limit_Q: np.ndarray
    tables: tuple[tuple[np.ndarray, ...], ...]
    target_R: np.ndarray
    is_ranked_R: np.ndarray
    adapter_R: np.ndarray | None = None
    given_Q: np.ndarray | None = None

    def shard(self, index: int, shards: int) -> "Batch":
        """Return the rows of one of the shards, which lie one after the other, as views."""
        return self if shards == 1 else jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:])[index], self)


class NextTokens(NamedTuple):
    """The tokens that each slot reads next, int32. `last_S`: the token drawn last. `length_S`: the tokens of the
    sequence with that token. `draft_SK`: tokens that may follow it; `NO_DRAFT` where nothing is foreseen."""

    last_S: jax.Array
    length_S: jax.Array
    draft_SK: jax.Array

    @classmethod
    def empty(cls, slots: int, drafts: int = 0) -> "NextTokens":
        """Return those of slots without a sequence, on the host."""
        zeros = np.zeros(slots, np.int32)
        return cls(zeros, zeros.copy(), np.full((slots, drafts), NO_DRAFT, np.int32))

    def rows(self, of: "Batch | DrawRows") -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the token and the position of each row of runs that decode (`Batch`), and whether it is read: below
        its limit, and a draft only where one is foreseen. No row of another kind is."""
        token_Q, position_Q = self.last_S[of.slot_Q], self.length_S[of.slot_Q] - 1 + of.draft_Q
        if drafts := self.draft_SK.shape[1]:
            draft_QK = self.draft_SK[of.slot_Q, jnp.clip(of.draft_Q - 1, 0, drafts - 1)]
            draft_QK = jnp.where(of.given_Q == NO_DRAFT, draft_QK, of.given_Q)
            token_Q = jnp.where(of.draft_Q > 0, draft_QK, token_Q)
        return token_Q, position_Q, (of.limit_Q > 0) & (position_Q < of.limit_Q) & (token_Q != NO_DRAFT)


class SlotState(NamedTuple):
    """The state of each slot on the device. `upcoming`: the tokens that it reads next. `history_SL`: int32, the tokens
    of the sequence, in which drafts are looked up; L is 0 where they are not. `counts_SV`: the counts of the slot's
    tokens (`sampling.token_counts`). `how`: the slot's sampling."""

    upcoming: NextTokens
    history_SL: jax.Array
    counts_SV: jax.Array
    how: RowSampling

    @classmethod
    def empty(cls, slots: int, vocab_size: int, drafts: int = 0, history: int = 0) -> "SlotState":
        """Return the state of slots without a sequence, on the host: each takes the likeliest token."""
        counts_SV = np.zeros((slots, vocab_size), np.int32)
        history_SL = np.zeros((slots, history), np.int32)
        return cls(NextTokens.empty(slots, drafts), history_SL, counts_SV, row_sampling([GREEDY] * slots, 0))


REFUSED, ACCEPTED, FORESEEN = 0, 1, 2


class DrawResults(NamedTuple):
    """The results of a draw.

    `drawn`: of each row. `accepted_Q`: int8, `REFUSED` where the row was not read or a draft up to it was not drawn in
    its place; otherwise the token is the next of its sequence, `FORESEEN` where it equals the draft after the row.
    """

    drawn: Drawn
    accepted_Q: jax.Array


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
    upcoming: NextTokens,
    batch: Batch,
    valid_V: jax.Array,
) -> tuple[Arrays, StepResults]:
    """Return the pages with the keys of all rows, and the results.

    Args:
      module: with parameters in the dtype to compute in.
      layout: of the pages, with the entries of the module's cache.
      upcoming: the tokens that each slot reads next.
      valid_V: bool, whether an id has a token.

    A row's results depend on the tokens of its own sequence alone. Devices that share out the tiles of prompts
    (`own_rows`) have pages and results of all rows, and each computes with its own.
    """
    token_Q, position_Q, is_read_Q = upcoming.rows(batch)
    token_R = own_rows(_with_runs(batch.token_R, token_Q, is_read_Q), shape)
    position_R = _with_runs(batch.position_R, position_Q, is_read_Q)
    own_position_R = own_rows(position_R, shape)
    position_R1 = jnp.maximum(own_position_R, 0)[:, None]
    end_R1 = jnp.where((own_position_R >= 0)[:, None], position_R1 + 1, 0)
    rows = (1, shape.tile) if shape.tiles else (1,)
    drafts, runs = upcoming.draft_SK.shape[1], None
    if drafts:
        length = min(1 + drafts, FEW_QUERIES)  # more of a sequence would not be split among programs
        most = min(shape.decode, len(upcoming.last_S) * -(-(1 + drafts) // length))
        runs = RowRuns.of(batch.draft_Q, most, length)
    cache = PagedCache(pages, batch.tables, position_R, layout, rows, drafts, runs)
    hidden_R1D, cache, _ = module.hidden(
        token_R[:, None],
        position_R1,
        KeyRange(jnp.zeros_like(end_R1), end_R1),
        cache=cache,
        length_BT=own_rows(batch.length_R, shape)[:, None],
    )
    last_Q1D = _selected(hidden_R1D, batch.row_Q, shape)
    logits_QV = module.logits(last_Q1D)[:, 0]
    if shape.scores:
        scores = _scores(module, hidden_R1D[shape.decode :], batch, valid_V, shape)
    else:
        scores = _no_scores(0, len(valid_V))
    return cache.arrays, StepResults(logits_QV, last_Q1D[:, 0].astype(jnp.float32), *scores)


def own_rows(x_R: jax.Array, shape: StepShape) -> jax.Array:
    """Return values of the rows that this device reads: all that decode, and its own tiles of prompts."""
    if not shape.tiles or parts_of("tiles") == 1:
        return x_R
    tiles_MT = jnp.asarray(x_R[shape.decode :]).reshape(shape.tiles, shape.tile)
    return jnp.concatenate([x_R[: shape.decode], own_part(tiles_MT, "tiles").reshape(-1)])


def _selected(hidden_R1D: jax.Array, row_Q: jax.Array, shape: StepShape) -> jax.Array:
    """Return the rows at these indices among all rows, of the rows that each device reads."""
    parts = parts_of("tiles")
    if not shape.tiles or parts == 1:
        return select(hidden_R1D, row_Q)
    tile_Q, place_Q = jnp.divmod(row_Q - shape.decode, shape.tile)
    is_decode_Q = row_Q < shape.decode
    own_Q = jnp.where(is_decode_Q, row_Q, shape.decode + tile_Q // parts * shape.tile + place_Q)
    own_Q1D = select(hidden_R1D, own_Q).astype(jnp.float32)  # XLA may not have rounded them yet
    return of_parts(own_Q1D, jnp.where(is_decode_Q, 0, tile_Q % parts), "tiles").astype(hidden_R1D.dtype)


def _with_runs(given_R: jax.Array, of_runs_Q: jax.Array, is_read_Q: jax.Array) -> jax.Array:
    """Return values of rows, of those that decode from the device where they are read."""
    decode = len(is_read_Q)
    return jnp.concatenate([jnp.where(is_read_Q, of_runs_Q, given_R[:decode]), given_R[decode:]])


class DrawRows(NamedTuple):
    """The rows after which tokens are drawn. `slot_Q`, `draft_Q`, `limit_Q`, `given_Q`: as `Batch` has them.
    `position_Q`: int32, of the token that is drawn, where the limit is 0."""

    slot_Q: np.ndarray
    draft_Q: np.ndarray
    limit_Q: np.ndarray
    position_Q: np.ndarray
    given_Q: np.ndarray | None = None


def draw(
    state: SlotState,
    logits_QV: jax.Array,
    rows: DrawRows,
    valid_V: jax.Array,
    allowed_QW: jax.Array | None = None,
) -> tuple[SlotState, DrawResults]:
    """Draw a token after each row from logits, as the row's slot says, and return the state after it.

    A draft is accepted if it equals the token that is drawn in its place with the random numbers of that place
    (arXiv:2408.07978), so that the tokens of a sequence are the same whatever the drafts. A program of its own: it
    takes as long to compile as a step of a small model, and is the same for all steps.

    Args:
      allowed_QW: uint32 [Q, ⌈V / 32⌉], the ids that each token may be, as `sample` takes them; None for all.
    """
    slot_Q = rows.slot_Q
    token_Q, read_Q, is_read_Q = state.upcoming.rows(rows)
    is_run_Q = rows.limit_Q > 0
    position_Q = jnp.where(is_run_Q, read_Q + 1, rows.position_Q)
    # The counts stay whole on each device. Otherwise XLA would shard them like the logits, and gather them again.
    counts_SV = constrain(state.counts_SV, "batch", None)
    how = jax.tree.map(lambda x: x[slot_Q], state.how)
    drafts = state.upcoming.draft_SK.shape[1]

    def counts() -> jax.Array:
        return count_drafts(counts_SV[slot_Q], token_Q, rows.draft_Q, drafts)

    drawn = sample(logits_QV, how, position_Q, valid_V, counts, allowed_QW)
    is_accepted_Q = accepted(token_Q, is_read_Q | ~is_run_Q, rows.draft_Q, drawn.token, drafts)
    is_foreseen_Q = drawn.token == drafts_after(state.upcoming.draft_SK, slot_Q, rows.draft_Q)
    accepted_Q = jnp.where(is_accepted_Q, jnp.where(is_foreseen_Q, FORESEEN, ACCEPTED), REFUSED).astype(jnp.int8)
    # A row that is not accepted writes to no slot, and of a run the last row that is accepted says how it goes on.
    none = len(state.counts_SV)
    slot_Q = jnp.where(is_accepted_Q, slot_Q, none)
    last_Q = jnp.where(is_last(is_accepted_Q, rows.draft_Q), slot_Q, none)
    last_S = state.upcoming.last_S.at[last_Q].set(drawn.token, mode="drop")
    length_S = state.upcoming.length_S.at[last_Q].set(position_Q + 1, mode="drop")
    history_SL, draft_SK = state.history_SL, state.upcoming.draft_SK
    if history_SL.shape[1]:
        history_SL = history_SL.at[slot_Q, position_Q].set(drawn.token, mode="drop")
        if len(slot_Q) < none:
            draft_QK = look_up(history_SL[rows.slot_Q], length_S[rows.slot_Q], drafts, jnp)
            draft_SK = draft_SK.at[last_Q].set(draft_QK, mode="drop")
        else:
            draft_SK = look_up(history_SL, length_S, drafts, jnp)
    counts_SV = constrain(count_drawn(counts_SV, slot_Q, drawn.token), "batch", None)
    upcoming = NextTokens(last_S, length_S, draft_SK)
    return SlotState(upcoming, history_SL, counts_SV, state.how), DrawResults(drawn, accepted_Q)


def _no_scores(rows: int, vocabulary: int) -> tuple[jax.Array, ...]:
    """Return the last four fields of `StepResults` for rows without scores."""
    size = rows, min(MAX_LOGPROBS, vocabulary)
    return jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.full(size, NO_TOKEN), jnp.full(size, -jnp.inf)


def _scores(
    module: Transformer, hidden_R1D: jax.Array, batch: Batch, valid_V: jax.Array, shape: StepShape
) -> tuple[jax.Array, ...]:
    """Return the last four fields of `StepResults`: a tile of logits at a time, and none of tiles without target."""
    hidden_MT1D = hidden_R1D.reshape(-1, shape.tile, *hidden_R1D.shape[1:])
    of_prompts = (x_R.reshape(shape.tiles, shape.tile) for x_R in (batch.target_R, batch.is_ranked_R))
    target_MT, is_ranked_MT = (own_part(x_MT, "tiles") for x_MT in of_prompts)
    # Within a branch shards may exchange nothing.
    is_scored_M, is_ranked_M = (on_any_shard(jnp.any(x, axis=1)) for x in (target_MT >= 0, is_ranked_MT))

    def of_tile(each: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden_T1D, target_T, is_scored, is_ranked = each
        _, no_rank_T, no_top_TK, no_logprob_TK = nothing = _no_scores(shape.tile, len(valid_V))

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

        return jax.lax.cond(is_scored, scored, lambda: nothing)

    def of_all_tiles() -> tuple[jax.Array, ...]:
        scores = jax.lax.map(of_tile, (hidden_MT1D, target_MT, is_scored_M, is_ranked_M))
        return tuple(x.reshape(-1, *x.shape[2:]) for x in scores)

    nothing = _no_scores(len(hidden_R1D), len(valid_V))
    scores = jax.lax.cond(jnp.any(is_scored_M), of_all_tiles, lambda: nothing)
    by_tile = (x.reshape(-1, shape.tile, *x.shape[1:]) for x in scores)
    return tuple(all_parts(x, "tiles", *[None] * (x.ndim - 1)).reshape(-1, *x.shape[2:]) for x in by_tile)
