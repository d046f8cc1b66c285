"""Several decoding steps in one program, so that the host dispatches, transfers and reads once for all of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxlm.inference.paged_cache import Arrays, PageLayout
from jaxlm.inference.ragged_step import Batch, DrawResults, DrawRows, SlotState, draw, ragged_step
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.models.transformer import Transformer


def multi_step(
    module: Callable[[], Transformer],
    layout: PageLayout,
    steps: int,
    pages: Arrays,
    state: SlotState,
    batch: Batch,
    valid_V: jax.Array,
) -> tuple[Arrays, SlotState, DrawResults]:
    """Return the pages, the state and the draws after so many steps, each of which reads what the one before has drawn.

    The steps are those of `ragged_step` and `draw`, without drafts. A sequence that reaches its limit (`Batch`) reads
    nothing more. Results are of each row and step, [Q · steps], the steps of a row one after the other.

    Args:
      module: returns the model. It is called in the loop: in front of it XLA would copy each matrix that is turned.
      batch: of rows that decode alone.
    """
    shape = StepShape(len(batch.slot_Q), 0, TILE)
    rows = DrawRows(batch.slot_Q, batch.draft_Q, batch.limit_Q, jnp.zeros_like(batch.slot_Q))

    def step(carry: tuple[Arrays, SlotState], _: None) -> tuple[tuple[Arrays, SlotState], DrawResults]:
        pages, state = carry
        pages, results = ragged_step(module(), layout, shape, pages, state.upcoming, batch, valid_V)
        state, draws = draw(state, results.logits_QV, rows, valid_V)
        return (pages, state), draws

    (pages, state), of_steps = jax.lax.scan(step, (pages, state), None, length=steps)
    draws = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), of_steps)
    return pages, state, draws
