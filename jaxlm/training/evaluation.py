"""Held-out loss."""

import math
from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.data.loader import evaluation_batches
from jaxlm.data.packing import Rows
from jaxlm.models.tree import Tree


class Evaluation(NamedTuple):
    """`loss` in nats per token, over `tokens` targets."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))

    def bits_per_byte(self, size: int) -> float:
        """Total information of the text over its size in bytes: comparable across tokenizers."""
        return self.loss * self.tokens / math.log(2) / size


def evaluate(
    step: Callable,
    parameters: Tree,
    rows: Rows,
    batch: int,
    mesh: Mesh,
    limit: int | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Evaluation | None:
    """Mean loss over all rows, or the first `limit` batches; call it under `jax.set_mesh`. None where `go_on`,
    asked before every batch, said no.

    `step` is a compiled `training.step.Steps.evaluate`. Sums of losses are added in float64 on the host.
    """
    losses, tokens, ahead = 0.0, 0, None
    for host in evaluation_batches(rows, batch, limit, sharding.process_rows(batch, mesh)):
        if not go_on():
            return None
        ahead, done = step(parameters, sharding.put_batch(host, mesh)), ahead
        if done is not None:
            losses, tokens = losses + float(done[0]), tokens + int(done[1])
    if ahead is not None:
        losses, tokens = losses + float(ahead[0]), tokens + int(ahead[1])
    return Evaluation(losses / max(tokens, 1), tokens)
