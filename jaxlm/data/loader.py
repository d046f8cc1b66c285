"""Batches of packed rows, in an order that depends on nothing but the seed and the step."""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from jaxlm.data.packing import Rows, empty_row

Batch = dict[str, np.ndarray]


def training_batches(sources: Sequence[tuple[Rows, float]], batch: int, seed: int, start: int) -> Iterator[Batch]:
    """Endless batches, int32 [batch, T] each, from step `start` on; rows of each source by its weight, evenly, and in
    a new order every time all of its rows have been.

    Batch i is the same however often, and from wherever, reading begins: the step is the loader's whole state.
    Grain reads ahead in threads.
    """
    shuffled = [grain.MapDataset.source(rows).shuffle(seed=seed).repeat() for rows, _ in sources]
    mixed = grain.MapDataset.mix(shuffled, [weight for _, weight in sources])
    dataset = mixed.batch(batch, drop_remainder=True)
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(dataset[start:].to_iter_dataset(ahead))


def evaluation_batches(rows: Rows, batch: int, limit: int | None = None) -> Iterator[Batch]:
    """All rows in order, or the first `limit` batches; the last is filled up with rows without targets."""
    count = -(-len(rows) // batch)
    for first in range(0, min(count, limit or count) * batch, batch):
        chosen = [rows[i] for i in range(first, min(first + batch, len(rows)))]
        chosen += [empty_row(len(chosen[0]["tokens"]))] * (batch - len(chosen))
        yield {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}
