"""One step of the engine: a row of each sequence that decodes, rows of prompts, and the draw of the next tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlm.inference.paged_cache import Arrays, PagedCache, PageLayout
from jaxlm.inference.sampling import Drawn, RowSampling, count_drawn, sample
from jaxlm.inference.weights import WeightLayout
from jaxlm.models.tree import Tree
from kernels_pallas.flash_attention import KeyRange
from kernels_pallas.linear_cross_entropy.xla import cross_entropy


class StepShape(NamedTuple):
    """The rows of a step, which a program is compiled for: `decode` sequences of one row, and `tiles` runs of `tile`
    rows of prompts. `scores`: whether it also gives the log-probabilities of the tokens after the prompts' rows."""

    decode: int
    tiles: int
    tile: int
    scores: bool = False

    @property
    def rows(self) -> int:
        """The rows in all."""
        return self.decode + self.tiles * self.tile

    @property
    def runs(self) -> int:
        """The runs of rows of one sequence."""
        return self.decode + self.tiles


class Batch(NamedTuple):
    """The rows of one step, from the host. A run is one row of a sequence that decodes, or a tile of a prompt.

    `token_R`: int32; −1 is what was drawn last in the row's slot. `position_R`: in the sequence, −1 is padding.
    `slot_Q`: of each run, where its draw is kept on the device; the last slot is of runs that draw nothing. `last_Q`:
    the row of each run that draws. `tables`: of each group, int32 [Q, M] of the runs that decode, and of the tiles
    where there are any. `target_R`: the token after each row of a prompt, where scores are asked for.
    """

    token_R: np.ndarray
    position_R: np.ndarray
    slot_Q: np.ndarray
    last_Q: np.ndarray
    tables: tuple[tuple[np.ndarray, ...], ...]
    target_R: np.ndarray


class SlotState(NamedTuple):
    """The state of each slot on the device: `last_S`, the token drawn last, and `counts_SV`, of its tokens
    (`sampling.count_prompt`)."""

    last_S: jax.Array
    counts_SV: jax.Array


class StepResults(NamedTuple):
    """The results of one step.

    `drawn`: after the last row of each run. `hidden_QD`: float32, the normalised stream there. `logprob_R`, `greedy_R`:
    of the prompts' rows the log-probability of their targets in float32, and whether it is the likeliest token; empty
    without scores.
    """

    drawn: Drawn
    hidden_QD: jax.Array
    logprob_R: jax.Array
    greedy_R: jax.Array


def ragged_step(
    weights: WeightLayout,
    layout: PageLayout,
    shape: StepShape,
    parameters: Tree,
    pages: Arrays,
    state: SlotState,
    batch: Batch,
    how: RowSampling,
    known_V: jax.Array,
) -> tuple[Arrays, SlotState, StepResults]:
    """Return the pages with the keys of all rows, the state of the slots after the draws, and the results.

    Args:
      parameters: as `weights` keeps them, in the dtype to compute in.
      pages: given up.
      state: given up.
      how: of each run [Q].
      known_V: bool, whether an id has a token.

    A row's results depend on the tokens of its own sequence alone.
    """
    module = nnx.merge(weights.graph, weights.restored(parameters))
    slot_R = jnp.concatenate([batch.slot_Q[: shape.decode], jnp.repeat(batch.slot_Q[shape.decode :], shape.tile)])
    token_R = jnp.where(batch.token_R < 0, state.last_S[slot_R], batch.token_R)
    is_row_R = batch.position_R >= 0
    position_R1 = jnp.maximum(batch.position_R, 0)[:, None]
    end_R1 = jnp.where(is_row_R[:, None], position_R1 + 1, 0)
    groups = tuple((name, group) for name, (group, _) in layout.entries.items())
    cache = PagedCache(pages, batch.tables, batch.position_R, groups, (1, shape.tile)[: len(batch.tables[0])])
    hidden_R1D, cache, _ = module.hidden(
        token_R[:, None], position_R1, KeyRange(jnp.zeros_like(end_R1), end_R1), cache=cache
    )
    last_Q1D = hidden_R1D[batch.last_Q]
    logits_QV = module.logits(last_Q1D)[:, 0]
    counts_QV = state.counts_SV[batch.slot_Q]
    drawn = sample(logits_QV, how, position_R1[batch.last_Q, 0] + 1, known_V, counts_QV)
    state = SlotState(
        state.last_S.at[batch.slot_Q].set(drawn.token), count_drawn(state.counts_SV, batch.slot_Q, drawn.token)
    )
    nothing = jnp.zeros(0), jnp.zeros(0, bool)
    scores = _scores(module, hidden_R1D[shape.decode :], batch.target_R, known_V, shape) if shape.scores else nothing
    return cache.arrays, state, StepResults(drawn, last_Q1D[:, 0].astype(jnp.float32), *scores)


def _scores(
    module: nnx.Module, hidden_R1D: jax.Array, target_R: jax.Array, known_V: jax.Array, shape: StepShape
) -> tuple[jax.Array, jax.Array]:
    """Return ln p of each row's target, and whether it is the likeliest, a tile of logits at a time."""

    def of_tile(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden_T1D, target_T1 = each
        logits_T1V = module.logits(hidden_T1D)
        losses_T1, _ = cross_entropy(logits_T1V, target_T1)
        likeliest = jnp.argmax(jnp.where(known_V[None, None], logits_T1V, -jnp.inf), axis=-1)
        return -losses_T1[:, 0], (likeliest == target_T1)[:, 0]

    tiles = shape.tiles, shape.tile, 1
    logprob, greedy = jax.lax.map(of_tile, (hidden_R1D.reshape(*tiles, -1), target_R.reshape(tiles)))
    return logprob.reshape(-1), greedy.reshape(-1)
