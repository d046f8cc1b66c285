"""One step of the engine on a shard: a row of each sequence that decodes and rows of prompts; then the draw of the next
tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.inference.paged_cache import Arrays, PagedCache, PageLayout
from jaxlm.inference.requests import GREEDY
from jaxlm.inference.sampling import Drawn, RowSampling, count_drawn, row_sampling, sample
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
    elsewhere.
    """

    token_R: np.ndarray
    position_R: np.ndarray
    length_R: np.ndarray
    row_Q: np.ndarray
    slot_Q: np.ndarray
    tables: tuple[tuple[np.ndarray, ...], ...]
    target_R: np.ndarray

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
    `logprob_R`: float32, ln p of the prompts' rows' targets. `likeliest_R`, `likeliest_logprob_R`: the likeliest token
    there, and its ln p. These three arrays hold any values for rows without target, and are empty without scores.
    """

    logits_QV: jax.Array
    hidden_QD: jax.Array
    logprob_R: jax.Array
    likeliest_R: jax.Array
    likeliest_logprob_R: jax.Array


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
    nothing = [jnp.zeros(0), jnp.zeros(0, jnp.int32), jnp.zeros(0)]
    scores = _scores(module, hidden_R1D[shape.decode :], batch.target_R, valid_V, shape) if shape.scores else nothing
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


def _scores(
    module: Transformer, hidden_R1D: jax.Array, target_R: jax.Array, valid_V: jax.Array, shape: StepShape
) -> list[jax.Array]:
    """Return ln p of each row's target, the likeliest token and its ln p: a tile of logits at a time, and none of tiles
    without target."""

    def of_tile(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        hidden_T1D, target_T1 = each
        nothing = jnp.zeros(shape.tile), jnp.zeros(shape.tile, jnp.int32), jnp.zeros(shape.tile)

        def scored() -> tuple[jax.Array, ...]:
            logits_T1V = module.logits(hidden_T1D)
            valid_logits_T1V = jnp.where(valid_V[None, None], logits_T1V, -jnp.inf)
            likeliest_T1 = jnp.argmax(valid_logits_T1V, axis=-1).astype(jnp.int32)
            losses_T1, _ = cross_entropy(logits_T1V, jnp.maximum(target_T1, 0))
            least_T1, _ = cross_entropy(logits_T1V, likeliest_T1)
            return -losses_T1[:, 0], likeliest_T1[:, 0], -least_T1[:, 0]

        return jax.lax.cond(on_any_shard(jnp.any(target_T1 >= 0)), scored, lambda: nothing)

    tiles = shape.tiles, shape.tile, 1
    scores = jax.lax.map(of_tile, (hidden_R1D.reshape(*tiles, -1), target_R.reshape(tiles)))
    return [each.reshape(-1) for each in scores]
