"""Batches of packed rows, in an order that depends on nothing but the seed and the step."""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from jaxlm.data.packing import Rows, empty_row

Batch = dict[str, np.ndarray]

_ENDLESS = 2**62  # steps


def training_batches(
    sources: Sequence[tuple[Rows, float]], batch: int, seed: int, start: int, share: Sequence[int] | None = None
) -> Iterator[Batch]:
    """Endless batches, int32 [batch, T] each, from step `start` on; rows of each source by its weight to within 1 %,
    evenly, and in a new order every time all of its rows have been.

    Batch i is the same however often, and from wherever, reading begins: the step is the loader's whole state.
    `share` names the rows of each batch to read, where a process needs no others; arrays then hold these alone.
    Grain reads ahead in threads.
    """
    shuffled = [
        grain.MapDataset.source(rows).shuffle(seed=_seed_of(seed, position)).repeat()
        for position, (rows, _) in enumerate(sources)
    ]
    endless = grain.MapDataset.mix(shuffled, [weight for _, weight in sources])
    share = range(batch) if share is None else share

    def read(step: int) -> Batch:
        return _stack([endless[step * batch + row] for row in share])

    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(grain.MapDataset.range(start, _ENDLESS).map(read).to_iter_dataset(ahead))


def _seed_of(seed: int, position: int) -> int:
    """One for each source, for Grain counts on from it in the epochs that follow: sources of a size would be drawn in
    lockstep, and one seed's first epoch would be another's second."""
    return int(np.random.SeedSequence([seed, position]).generate_state(1)[0])


def evaluation_batches(
    rows: Rows, batch: int, limit: int | None = None, share: Sequence[int] | None = None
) -> Iterator[Batch]:
    """All rows, or `limit` batches of them, always the same: rows in an order that depends on their number alone, since
    they are packed by the lengths of documents, and the first would be pieces of the longest. The last batch is filled
    up with rows without targets.

    `share` as in `training_batches`.
    """
    count = -(-len(rows) // batch)
    order = np.random.default_rng(0).permutation(len(rows))
    empty = empty_row(rows.sequence)
    share = range(batch) if share is None else share
    for first in range(0, min(count, limit or count) * batch, batch):
        yield _stack([rows[int(order[first + row])] if first + row < len(rows) else empty for row in share])


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
