"""Held-out loss."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.data.loader import evaluation_batches
from jaxlm.data.packing import PreferenceRows, Rows
from jaxlm.models.tree import Tree
from jaxlm.parallel.batches import process_rows, put_batch


class Evaluation(NamedTuple):
    """A held-out loss: `loss` in nats per token, measured on `tokens` of the `targets` of a text of `size` bytes. With
    several `sources`, each has an evaluation of its own. The loss `of_pairs` is that of a pair of answers, measured on
    `tokens` of `targets` pairs."""

    loss: float
    tokens: int
    targets: int
    size: int
    sources: Mapping[str, "Evaluation"] | None = None
    of_pairs: bool = False

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Information of the text over its size in bytes, comparable across tokenizers. If only some targets were
        measured, each counts for the average bytes per target."""
        return self.loss * self.targets / math.log(2) / max(self.size, 1)

    def row(self) -> dict[str, Any]:
        """Return the recorded figures, with None for numbers that are not finite, which JSON does not have."""
        row: dict[str, Any] = {"loss": self.loss}
        if self.of_pairs:
            row |= {"pairs": self.tokens}
        else:
            row |= {"tokens": self.tokens, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        row = {name: value if math.isfinite(value) else None for name, value in row.items()}
        if self.sources:
            row["sources"] = {name: source.row() for name, source in self.sources.items()}
        return row


def evaluate(
    step: Callable,
    parameters: Tree,
    rows: Rows | PreferenceRows,
    batch: int,
    mesh: Mesh,
    limit: int | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Evaluation | None:
    """Return the mean loss over all rows, or over `limit` batches; call it under `jax.set_mesh`. Return None once
    `go_on`, which is asked before every batch, says no.

    `step` is a compiled `TrainStep.evaluate`. Losses are accumulated in float64 on the host. Raises InputError where
    the rows have nothing to measure the loss on.
    """
    losses, tokens, ahead = 0.0, 0, None
    for host in evaluation_batches(rows, batch, limit, process_rows(batch, mesh)):
        if not go_on():
            return None
        ahead, done = step(parameters, put_batch(host, mesh)), ahead
        if done is not None:
            losses, tokens = losses + float(done[0]), tokens + int(done[1])
    if ahead is not None:
        losses, tokens = losses + float(ahead[0]), tokens + int(ahead[1])
    if not tokens:
        raise InputError("there is no token to measure a loss on: no row has a target that counts")
    if isinstance(rows, PreferenceRows):
        return Evaluation(losses / tokens, tokens, len(rows), 0, of_pairs=True)
    return Evaluation(losses / tokens, tokens, rows.store.targets, rows.store.predicted_bytes)


def evaluate_sources(
    step: Callable,
    parameters: Tree,
    sources: Mapping[str, Rows | PreferenceRows],
    batch: int,
    mesh: Mesh,
    limit: int | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Evaluation | None:
    """Return the mean loss over all text of all sources, and of each source. `limit` applies to each source; a source
    is still weighted by all of its targets. None as in `evaluate`."""
    each: dict[str, Evaluation] = {}
    for name, rows in sources.items():
        measured = evaluate(step, parameters, rows, batch, mesh, limit, go_on)
        if measured is None:
            return None
        each[name] = measured
    if len(each) == 1:
        return each.popitem()[1]
    tokens, targets, size = (sum(x) for x in zip(*(e[1:4] for e in each.values()), strict=True))
    loss, of_pairs = sum(e.loss * e.targets for e in each.values()) / targets, any(e.of_pairs for e in each.values())
    return Evaluation(loss, tokens, targets, size, each, of_pairs)
